"""This engine, transformers, vLLM and llama.cpp on one target, in turn on the same prompts: tokens per second of each.

Run by `python -m studies.real_target --beside`. An entry is a regime, a number of rows and a task. Every engine makes
the same number of new tokens and ignores end tokens. vLLM and llama.cpp answer in processes that stay loaded and are
stopped (SIGSTOP) while others are timed, since their idle threads spin. llama.cpp reads the GGUF file that the target
comes from, so its weights differ (4 bits, for SmolLM2). It is timed with one thread and with two, one prompt at a time.
Seconds of vLLM and llama.cpp are measured inside their processes. All have the prefill, for which vLLM alone has a
cache of prefixes. `left_out` of an entry says what was not timed, and why.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from cotrain.export.engines import GGUF_FILE
from cotrain.export.publishing import on_card
from cotrain.students.base import DEFAULT
from inference import Sampling
from inference.drafts.bundled_target import resolve
from inference.drafts.gguf_target import gguf_file
from inference.measure.adaptive import Wanted, until_known
from inference.measure.arms import Arm, ArmResult, refuse
from inference.measure.timing import Timing, engine_arm, transformers_arm
from inference.output import Counts, Stats
from inference.servers.vllm_server import TRANSLATED, Server, vllm_arm
from inference.servers.worker import Worker
from studies.real_target_cells import Cells

SERVE = Path(__file__).parents[1] / "tests" / "engines" / "llamacpp" / "serve.mjs"
CONTEXT = 1024  # tokens of a text in other engines
THREADS = (1, 2)  # of llama.cpp
BATCHES = 8  # that are timed, if there is time


@dataclass
class Others:
    """Processes of other engines by the name of their arm. left_out: what was not started, and why."""

    vllm: dict[str, Server]
    llamacpp: dict[str, Worker]
    left_out: list[str]


def started(asked: argparse.Namespace, stack: ExitStack) -> Others:
    """Start the engines that the options name."""
    others, logs = Others({}, {}, []), asked.output.parent
    if asked.vllm is None:
        others.left_out.append("vLLM: --vllm names no interpreter")
    else:
        configs: dict[str, dict[str, Any] | None] = {"vllm": None}
        if asked.vllm_draft:
            configs["vllm, draft"] = on_card((asked.vllm_draft / "README.md").read_text(encoding="utf-8")).speculative
        for name, config in configs.items():
            server = Server(asked.vllm, resolve(asked.target), config, max(asked.rows), CONTEXT, logs / f"{name}.log",
                            pauses=True)  # fmt: skip
            others.vllm[name] = stack.enter_context(server)
    file = gguf_file(asked.target)
    if asked.llamacpp is None or file is None:
        why = "the target is no GGUF file" if file is None else "--llamacpp names no folder"
        others.left_out.append(f"llama.cpp: {why}")
        return others
    drafts = [None, asked.llamacpp_draft] if asked.llamacpp_draft else [None]
    for draft, threads in product(drafts, THREADS):
        name = f"llama.cpp{', draft' * (draft is not None)}, {threads} thread{'s' * (threads > 1)}"
        settings = {
            "modules": str(asked.llamacpp.absolute()), "target": str(file), "context": CONTEXT, "threads": threads,
            "draft": str((draft / GGUF_FILE).absolute()) if draft else None, "k": asked.llamacpp_k,
        }  # fmt: skip
        worker = Worker("llama.cpp", ["node", str(SERVE)], settings, logs / f"{name}.log", pauses=True)
        others.llamacpp[name] = stack.enter_context(worker)
    return others


def llamacpp_arm(name: str, worker: Worker, sampling: Sampling, max_new_tokens: int) -> Arm:
    """Prompt after prompt; seconds are measured in the process. Raises ValueError for settings other than the
    temperature."""
    refuse(sampling, *(one for one in vars(sampling) if one not in TRANSLATED))

    def run(prompts: Sequence[list[int]], ids: Sequence[int], seed: int) -> ArmResult:
        asked = {"max_new_tokens": max_new_tokens, "temperature": sampling.temperature, "seed": seed}
        answer = worker.ask(prompts=list(prompts), **asked)
        tokens = answer["tokens"]
        stats = Stats(sum(map(len, tokens)), answer["rounds"], rows=[Counts(len(text)) for text in tokens])
        return ArmResult(tokens, answer["seconds"], answer["seconds"], stats)

    return Arm(name, run)


def entries(cells: Cells, asked: argparse.Namespace, done: Sequence[tuple[str, int, str]]) -> Iterator[dict[str, Any]]:
    """Yield the entries that are asked for, without those of `done`. Raises ValueError without a draft."""
    if not cells.drafts:
        raise ValueError("--beside: name a draft of this engine, NAME=DRAFT")
    with ExitStack() as stack:
        others = started(asked, stack)
        for regime, rows, task in product(asked.regimes, asked.rows, asked.tasks):
            if (regime, rows, task) not in done:
                yield entry(cells, others, regime, rows, task)


def entry(cells: Cells, others: Others, regime: str, rows: int, task: str) -> dict[str, Any]:
    """All engines in turn on one task. The seconds of a cell are for each of them."""
    arms, left_out, planned = list[Arm](), list(others.left_out), dict[str, dict[str, Any]]()
    for name in cells.drafts:
        key = name, regime, rows, task
        plan, chosen = cells.planned(key, cells.seconds)
        arms.append(engine_arm(name, plan.engine(chosen.k), plan.sampling, plan.bench.new_tokens))
        planned[name] = {"k": chosen.k, "planned": chosen.line}
        if rows == 1 and plan.kind == DEFAULT:
            arms.append(transformers_arm(f"transformers, {name}", plan.target, plan.sampling, plan.bench.new_tokens,
                                         assistant=plan.running, k=chosen.k))  # fmt: skip
        else:
            why = "it takes one prompt at a time" if rows > 1 else f"the draft is of kind {plan.kind}"
            left_out.append(f"transformers assisted by {name}: {why}")
    sampling, new = plan.sampling, plan.bench.new_tokens
    arms += [
        engine_arm("plain", plan.plain(), sampling, new),
        transformers_arm("transformers", plan.target, sampling, new),
    ]
    try:
        arms += [vllm_arm(one, server, sampling, new) for one, server in others.vllm.items()]
        arms += [llamacpp_arm(one, worker, sampling, new) for one, worker in others.llamacpp.items() if rows == 1]
    except ValueError as error:
        left_out.append(f"vLLM, llama.cpp: {error}")
    prompts = plan.final(0, max(BATCHES * rows, len(plan.prompts.final)))
    until = time.perf_counter() + cells.seconds * len(arms)
    timing, reached = until_known(arms, prompts, rows, (arms[0].name, "plain"), Wanted(BATCHES, until=until))
    versions = {name: worker.version for name, worker in {**others.vllm, **others.llamacpp}.items()}
    return {
        "regime": regime, "rows": rows, "task": task, "new_tokens": new, "drafts": planned, "versions": versions,
        "compiled": plan.compiled._asdict(), "batches": reached.runs, "cores_of_others": reached.others,
        "engines": {name: speed(timing, name, arms[0].name) for name in timing.arms}, "left_out": left_out,
    }  # fmt: skip


def speed(timing: Timing, name: str, ours: str) -> dict[str, Any]:
    """Tokens per second, the speed of our first draft over it, and tau, which vLLM counts over rounds that drafted."""
    stats = timing.stats(name)
    tokens, over = timing.speed_interval(name), timing.ratio(ours, name)
    return {
        "tokens_per_second": tokens._asdict(),
        "ours_over_it": over._asdict(),
        "tau": stats.tau if stats else None,
    }
