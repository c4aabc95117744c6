"""This engine, transformers, vLLM and llama.cpp on one target, in turn on the same prompts: tokens per second of each.
And acceptance of a draft in vLLM and llama.cpp, measured and predicted.

Run by `python -m studies.real_target --beside`. An entry is a regime, a number of rows and a task. Every engine makes
the same number of new tokens and ignores end tokens. vLLM and llama.cpp answer in processes that stay loaded and are
stopped (SIGSTOP) while others are timed, since their idle threads spin. llama.cpp reads the GGUF file that the target
comes from, so its weights differ (4 bits, for SmolLM2). It is timed with one thread and with two, one prompt at a time.
Seconds of vLLM and llama.cpp are measured inside their processes. All have the prefill, for which vLLM alone has a
cache of prefixes. `left_out` of an entry says what was not timed, and why.

Run by `python -m studies.real_target --acceptance`, an entry is an engine, a regime and a task. vLLM samples the first
token of a text in its prefill, without a round; llama.cpp drafts in its first pass too, and drafts greedily, so its
texts say exactly which drafts were accepted.
"""

import argparse
import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from cotrain.bench.server_parity import figures_after
from cotrain.export.engines import GGUF_FILE
from cotrain.planning.plan import Plan
from cotrain.planning.planner import BATCH, choice_line
from cotrain.students.base import DEFAULT
from inference import Sampling
from inference.drafts.bundled_target import resolve
from inference.drafts.gguf_target import gguf_file
from inference.exactness.figures import expected, reach_of
from inference.measure.adaptive import Wanted, until_known
from inference.measure.arms import Arm, ArmResult, engine_arm, refuse
from inference.measure.timing import Timing, interleave
from inference.output import Counts, Stats
from inference.verify import predict_chain
from studies.assisted import assisted_arm
from studies.real_target_cells import REGIMES, Cells, speed_interval
from studies.vllm_arm import TRANSLATED, Server, Worker, on_card, vllm_arm

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
            server = Server(
                asked.vllm, resolve(asked.target), config, max(asked.rows), CONTEXT, logs / f"{name}.log", pauses=True
            )
            others.vllm[name] = stack.enter_context(server)
    file = gguf_file(asked.target)
    if asked.llamacpp is None or file is None:
        why = "the target is no GGUF file" if file is None else "--llamacpp names no folder"
        others.left_out.append(f"llama.cpp: {why}")
        return others
    drafts = [None, asked.llamacpp_draft] if asked.llamacpp_draft else [None]
    for draft, threads in product(drafts, THREADS):
        name = f"llama.cpp{', draft' * (draft is not None)}, {threads} thread{'s' * (threads > 1)}"
        others.llamacpp[name] = stack.enter_context(llamacpp(asked, file, draft, threads, logs / f"{name}.log"))
    return others


def llamacpp(asked: argparse.Namespace, target: Path, draft: Path | None, threads: int, log: Path) -> Worker:
    settings = {
        "modules": str(asked.llamacpp.absolute()),
        "target": str(target),
        "context": CONTEXT,
        "threads": threads,
        "draft": str((draft / GGUF_FILE).absolute()) if draft else None,
        "k": asked.llamacpp_k,
    }
    return Worker("llama.cpp", ["node", str(SERVE)], settings, log, pauses=True)


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
        plan, _, chosen = cells.planned(key, cells.seconds)
        arms.append(engine_arm(name, plan.engine(chosen.length), plan.sampling, plan.bench.new_tokens))
        planned[name] = {"k": chosen.length, "planned": choice_line(chosen)}
        if rows == 1 and plan.kind == DEFAULT:
            arms.append(
                assisted_arm(
                    f"transformers, {name}",
                    plan.target,
                    plan.sampling,
                    plan.bench.new_tokens,
                    assistant=plan.running,
                    k=chosen.length,
                )
            )
        else:
            why = "it takes one prompt at a time" if rows > 1 else f"the draft is of kind {plan.kind}"
            left_out.append(f"transformers assisted by {name}: {why}")
    sampling, new = plan.sampling, plan.bench.new_tokens
    arms += [
        engine_arm("plain", plan.plain(), sampling, new),
        assisted_arm("transformers", plan.target, sampling, new),
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
        "regime": regime,
        "rows": rows,
        "task": task,
        "new_tokens": new,
        "drafts": planned,
        "versions": versions,
        "batches": reached.runs,
        "cores_of_others": reached.others,
        "engines": {name: speed(timing, name, arms[0].name) for name in timing.arms},
        "left_out": left_out,
    }


def speed(timing: Timing, name: str, ours: str) -> dict[str, Any]:
    """Tokens per second, the speed of our first draft over it, and tau, which vLLM counts over rounds that drafted."""
    stats = timing.stats(name)
    tokens, over = speed_interval(timing, name), timing.ratio(ours, name)
    return {
        "tokens_per_second": tokens._asdict(),
        "ours_over_it": over._asdict(),
        "tau": stats.tau if stats else None,
    }


# --- acceptance


@dataclass(frozen=True)
class Served:
    """What an engine made of the draft. k: drafts a round. objective: how it drafts. first: tokens of each text that
    came without a round. tokens: the texts. rounds, seconds: of all texts. by_depth: rounds that accepted drafts 0 to
    d."""

    engine: str
    version: str
    k: int
    objective: str
    first: int
    tokens: list[list[int]]
    rounds: int
    by_depth: list[int]
    seconds: float


def acceptances(cells: Cells, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the acceptance of the one draft in each engine, regime and task. Raises ValueError without a draft, and for
    regimes other than a temperature, which other engines are not told."""
    if len(cells.drafts) != 1 or not (asked.vllm_draft or asked.llamacpp_draft):
        raise ValueError("--acceptance: name one draft, NAME=DRAFT, and its export, --vllm-draft or --llamacpp-draft")
    for regime in asked.regimes:
        refuse(REGIMES[regime], *(one for one in vars(REGIMES[regime]) if one not in TRANSLATED))
    (name,), rows = cells.drafts, max(asked.rows)
    for regime, task in product(asked.regimes, asked.tasks):
        plan = cells.ready((name, regime, rows, task))
        prompts = list(plan.prompts.final[: plan.bench.prompts])
        for engine in (vllm_serves, llamacpp_serves):
            if served := engine(asked, prompts, plan.sampling, plan.bench.new_tokens):
                yield {"draft": name, "regime": regime, "task": task} | compared(plan, prompts, served)


def vllm_serves(
    asked: argparse.Namespace, prompts: list[list[int]], sampling: Sampling, new_tokens: int
) -> Served | None:
    if asked.vllm_draft is None:
        return None
    config = on_card((asked.vllm_draft / "README.md").read_text(encoding="utf-8")).speculative
    log, rows = asked.output.parent / "vllm.log", max(asked.rows)
    with Server(asked.vllm, resolve(asked.target), config, rows, CONTEXT, log, dtype=asked.vllm_dtype) as server:
        answer = server.generate(prompts, new_tokens, sampling.temperature, 0)
    drafting = "sampled" if config.get("draft_sample_method") == "probabilistic" else "greedy"
    return Served(
        f"vllm, {asked.vllm_dtype}",
        server.version,
        config["num_speculative_tokens"],
        drafting,
        1,
        answer["tokens"],
        answer["drafts"],
        answer["by_depth"],
        answer["seconds"],
    )


def llamacpp_serves(
    asked: argparse.Namespace, prompts: list[list[int]], sampling: Sampling, new_tokens: int
) -> Served | None:
    file = gguf_file(asked.target)
    if asked.llamacpp_draft is None or file is None:
        return None
    with llamacpp(asked, file, asked.llamacpp_draft, 1, asked.output.parent / "llama.cpp.log") as worker:
        request = {"max_new_tokens": new_tokens, "temperature": sampling.temperature, "seed": 0}
        answer = worker.ask(prompts=prompts, **request)
    return Served(
        "llama.cpp",
        worker.version,
        asked.llamacpp_k,
        "greedy",
        0,
        answer["tokens"],
        answer["rounds"],
        answer["by_depth"],
        answer["seconds"],
    )


def compared(plan: Plan, prompts: list[list[int]], served: Served) -> dict[str, Any]:
    """What the engine accepted, what p and q predict on its texts, and this engine's tau on the same prompts.

    Standard errors are those of acceptance given the texts; by depth, of rounds that start independently.
    first_draft: acceptance of the first draft as sum_v min(p, q) predicts it, whatever token the text has there."""
    size = copy.copy(plan.bench)
    size.draft_int8 = False  # other engines serve the weights of the folder
    plan = replace(plan, objective=served.objective, verify="token", tree=None, bench=size)
    draft = plan.proposer()
    engine = plan.engine(served.k, BATCH, proposer=draft)
    figures = figures_after(plan, engine, draft, prompts, served.tokens, served.first)
    forecast, reach = expected(figures, "token"), reach_of(figures, "token")
    assert forecast is not None and reach is not None
    own = engine_arm("own", engine, plan.sampling, plan.bench.new_tokens)
    ours = interleave([own], prompts, BATCH, warmup=0).stats("own")
    assert ours is not None
    begun, alpha = predict_chain.round_starts(reach) * (figures.k > 0), figures.first(figures.alpha)
    accepted = reach[..., 1:]
    spread = (begun[..., None] * accepted * (1 - accepted)).sum((0, 1)).sqrt() / begun.sum()
    tokens, sigma = int(figures.lengths.sum()), forecast.variance**0.5
    return {
        "engine": served.engine,
        "version": served.version,
        "k": served.k,
        "drafting": served.objective,
        "prompts": len(prompts),
        "tokens": tokens,
        "rounds": served.rounds,
        "tokens_per_second": sum(map(len, served.tokens)) / served.seconds,
        "tau": {
            "measured": tokens / served.rounds,
            "predicted": tokens / forecast.calls,
            "relative": forecast.calls / served.rounds - 1,
            "standard_error": sigma / forecast.calls,
            "z": (forecast.calls - served.rounds) / sigma if sigma else None,
            "this_engine": ours.tau,
        },
        "acceptance": {
            "measured": [count / served.rounds for count in served.by_depth],
            "predicted": forecast.prefix,
            "standard_error": spread.tolist(),
            "this_engine": ours.prefix,
        },
        "first_draft": {
            "measured": served.by_depth[0] / served.rounds,
            "predicted": float((begun * alpha).sum() / begun.sum()),
            "standard_error": float((begun * alpha * (1 - alpha)).sum().sqrt() / begun.sum()),
        },
    }


def acceptance_line(one: dict[str, Any]) -> str:
    tau, depths = one["tau"], one["acceptance"]
    by_depth = "; ".join(
        f"{name} {', '.join(f'{value:.3f}' for value in depths[name])}" for name in ("measured", "predicted")
    )
    return (
        f"{one['draft']} in {one['engine']}, T {one['regime']}, {one['task']}, {one['tokens']} tokens: tau "
        f"{tau['measured']:.3f}, {tau['predicted']:.3f} predicted ({tau['relative']:+.1%}, standard error "
        f"{tau['standard_error']:.1%}), {tau['this_engine']:.3f} here; by depth: {by_depth}"
    )
