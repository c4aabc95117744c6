"""Drafts of a real chat model by task: speed-up over plain decoding, tokens per call and exactness of each cell.

    python -m studies.real_target --output OUT.json NAME=DRAFT [NAME=DRAFT ...] [--target smollm2] [--regimes 0,0.7,1,card]
        [--rows 1,8] [--tasks chat,code,json,edits,summaries] [--plan tasks|stored] [--seconds 50] [--set KEY=VALUE ...]
    python -m studies.real_target --output OUT.json --summary
    python -m studies.real_target --output OUT.json NAME=DRAFT [...] --beside [--vllm PYTHON] [--llamacpp MODULES] ...

A draft is a folder, or the settings with which `cotrain train` would begin one: "draft=retrieval", "draft=quantised",
"draft=hybrid init=pretrained draft.path=FOLDER". A cell is a draft, a regime, a number of rows and a task. Plain decoding
and the draft take turns on the task's prompts, both compiled where that is faster. Each task's first prompts are not
timed: the draft length (--set bench.trees=16: or the tree) is chosen on them, unless --plan stored asks for the
folder's. OUT.json holds the cells that are done, and only others are measured, in the order of the options; it is the
target's own prompts that drafts are trained on, so these are in no training text. --beside compares with other engines,
see `real_target_beside`.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from cotrain.bench.calibration import prepare
from cotrain.bench.plan import CompiledParts, Plan
from cotrain.bench.planner import (
    MeasuredCosts,
    PlannedDraft,
    choose_compiled,
    plain_texts,
    plan_draft,
    rounds_of,
)
from cotrain.commands.served_pair import load_network, measured, refuse_pair
from cotrain.config.overrides import quote
from cotrain.config.settings import checked, register
from cotrain.data.conversations import Template
from cotrain.data.splits import Prompts, apart
from cotrain.paths import folder as shipped
from cotrain.training.assembly import initial
from cotrain.training.job import models, settle
from inference import Sampling
from inference.drafts.atomic import write_atomic
from inference.drafts.draft_folder import Folder
from inference.measure.adaptive import Reached, Wanted, until_known
from inference.measure.costs import of_stats, spans_of
from inference.measure.environment import environment
from inference.measure.timing import Timing, engine_arm
from inference.output import Emitted
from studies.kinds_in_turn import Chosen, Draft, at, checks, exactness
from studies.proposers import finite, trained

PROMPTS = Path(__file__).with_name("prompts_by_task.jsonl")
TASKS = ["chat", "code", "json", "edits", "summaries"]
REGIMES = {
    "0": Sampling(temperature=0), "0.7": Sampling(temperature=0.7), "1": Sampling(),
    "card": Sampling(temperature=0.2, top_p=0.9),  # that of the model's card
}  # fmt: skip
PLANNED_ON = 4  # prompts of a task that plan its drafts; the others are timed
PLAN_TOKENS, PLAN_TEXTS = 40, 16  # tokens of each text that plans, and how many texts
TIMED = 10  # batches that are timed, if there is time
PLANNING, TIMING = 0.3, 0.75  # of the seconds of a cell, when each part ends; checks have the rest
SIZES = ["prompt_tokens=1024", "new_tokens=64", "quick_prompts=1", "compile=true", "depths=[1,2,3,4,5,6,7,8]"]
Key = tuple[str, str, int, str]  # of a cell: draft, regime, rows, task


# --- what is measured


def settings(target: str, changes: Sequence[str]) -> Any:
    """Those of cotrain bench, with the sizes of this study."""
    register()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        sizes = [f"bench.{one}" for one in SIZES]
        given = quote([f"target.path={target}", "quantisation=none", *sizes, "verify=block", *changes])
        return checked("bench", compose("bench", overrides=given))


def prompts_of(file: Path, target: Any, tokenizer: Any) -> dict[str, Prompts]:
    """By task, as ids. A row has messages, which the target's chat template renders, and its task as domain."""
    template, found = Template(tokenizer, {}, ()), dict[str, list[list[int]]]()
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.setdefault(row["domain"], []).append(template.ids(template.text(row["messages"], None, prompt=True)))
    return {task: apart(ids[:PLANNED_ON], ids[PLANNED_ON:], [], "own") for task, ids in found.items()}


def draft_of(name: str, asked: str, cfg: Any, target: Any, tokenizer: Any) -> Draft:
    """A draft folder, or a draft that settings of cotrain train begin. Raises ValueError or UserError for others."""
    path = str(cfg.target.path)
    if asked.startswith("draft="):
        with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
            train: Any = checked("train", compose("train", overrides=quote([f"target.path={path}", *shlex.split(asked)])))
        folder, network = Folder(train.draft.kind, None, Path()), initial(train, target)
    else:
        refuse_pair(asked, path)
        folder = measured(asked)
        network = load_network(folder, target, tokenizer)
    about = folder.metadata
    plan = Plan(target, tokenizer, network.eval(), Sampling(), cfg.verify, cfg.bench, (path, asked),
                about.objective if about else "sampled", kind=folder.kind)  # fmt: skip
    plan = replace(plan, draft=plan.served)  # all cells share one network, and so its compiled passes
    size = sum(weight.numel() for weight in network.parameters() if weight.requires_grad)
    return Draft(name, folder, plan, size, trained(folder) if about else None)


@dataclass
class Cells:
    """Drafts and prompts by task, and what the cells share: which parts are compiled with the costs of each part, by
    draft, regime and rows; and texts of plain decoding that plans are made on, by regime and task. stored: drafts are
    measured as their folders were planned. seconds: of a cell."""

    drafts: Mapping[str, Draft]
    prompts: Mapping[str, Prompts]
    stored: bool
    seconds: float
    parts: dict[tuple[str, str, int], tuple[CompiledParts, MeasuredCosts]] = field(default_factory=dict)
    texts: dict[tuple[str, str], Emitted] = field(default_factory=dict)

    def cell(self, key: Key) -> dict[str, Any]:
        began = time.perf_counter()
        draft, plan = self.drafts[key[0]], self.ready(key)
        chosen = self.planned(key, plan, began + PLANNING * self.seconds)
        plan = replace(chosen.plan, bench=plan.bench)
        one = Chosen(draft, plan, chosen.k, plan.engine(chosen.k), chosen.speedup)
        timing, reached = timed(one, began + TIMING * self.seconds)
        entry = dict(zip(("draft", "regime", "rows", "task"), key, strict=True))
        return entry | figures(one, chosen, timing, reached) | {"seconds": time.perf_counter() - began}

    def ready(self, key: Key) -> Plan:
        """The plan of a cell, prepared as its kind wants (a gate is counted on prompts that are not timed)."""
        name, regime, rows, task = key
        draft = self.drafts[name]
        about = draft.folder.metadata if self.stored else None
        plan = replace(at(draft.plan, 1.0, rows), sampling=REGIMES[regime], given=self.prompts[task],
                       planned=about.k if about else None, tree=about.tree if about else None)  # fmt: skip
        prepare(plan)
        return plan

    def planned(self, key: Key, plan: Plan, until: float) -> PlannedDraft:
        """The draft length or tree, from texts and rounds of prompts that are not timed."""
        name, regime, rows, task = key
        bench = at(plan, 1.0, rows).bench
        bench.new_tokens = min(PLAN_TOKENS, bench.new_tokens)
        plan = replace(plan, bench=bench)
        if (name, regime, rows) not in self.parts:
            compiled, costs = choose_compiled(replace(plan, tree=None))
            self.parts[name, regime, rows] = compiled.compiled, costs
        if (regime, task) not in self.texts:
            self.texts[regime, task] = plain_texts(plan, PLAN_TEXTS)
        compiled_parts, costs = self.parts[name, regime, rows]
        plan, alone = replace(plan, compiled=compiled_parts), costs.alone
        chains = replace(plan, tree=None)
        rounds = rounds_of(chains, (0, *spans_of(chains.proposer(counted=True))), until)  # of this task
        return plan_draft(plan, MeasuredCosts(alone, alone, {}).at(rounds), self.texts[regime, task], until)


def timed(one: Chosen, until: float) -> tuple[Timing, Reached]:
    """Plain decoding and the draft in turn, `rows` prompts at a time."""
    plan, rows = one.plan, one.plan.bench.rows
    engines = {one.draft.name: one.engine, "plain": plan.plain()}
    arms = [engine_arm(name, engine, plan.sampling, plan.bench.new_tokens) for name, engine in engines.items()]
    prompts = plan.final(0, max(TIMED * rows, len(plan.prompts.final)))
    batches = Wanted(TIMED, until=until)
    return until_known(arms, prompts, rows, (one.draft.name, "plain"), batches, plan.bench.seed)


def figures(one: Chosen, chosen: PlannedDraft, timing: Timing, reached: Reached) -> dict[str, Any]:
    plan, name = one.plan, one.draft.name
    verdict, calls = checks(one, timing)
    drafted, plain = timing.stats(name), timing.stats("plain")
    assert drafted is not None and plain is not None
    speed, rounds = timing.ratio(name, "plain"), {"plain": of_stats(plain, 0), "draft": of_stats(drafted, one.k)}
    predicted = {"predicted": calls.tau, "z": calls.z, "relative": calls.relative} if calls else {}
    return {
        "kind": one.draft.folder.kind, "parameters": one.draft.parameters, "train_seconds": one.draft.seconds,
        "k": one.k, "tree": list(plan.tree.parents) if plan.tree else None, "rule": plan.rule, "planned": chosen.line,
        "compiled": plan.compiled._asdict(), "int8": plan.int8,
        "speedup": speed._asdict() | {"predicted": chosen.speedup},
        "tau": {"measured": drafted.tau} | predicted,
        "tokens_per_second": {"plain": timing.speed("plain"), "draft": timing.speed(name)},
        "acceptance": {"measured": drafted.prefix, "predicted": calls.prefix if calls else None},
        "milliseconds": {
            "draft_step": 1e3 * chosen.costs.costs.draft, "target_pass": 1e3 * chosen.costs.costs.target[one.k],
            **{f"{side}_round": {part: 1e3 * seconds for part, seconds in vars(cost).items()}
               for side, cost in rounds.items()},
        },
        "new_tokens": plan.bench.new_tokens, "batches": reached.runs, "cores_of_others": reached.others,
        **exactness(verdict, calls),
    }  # fmt: skip


# --- the report


def read_report(file: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"runs": [], "cells": [], "beside": []}
    return empty | json.loads(file.read_text(encoding="utf-8")) if file.is_file() else empty


def add(file: Path, report: dict[str, Any], part: str, entry: dict[str, Any]) -> None:
    """Write the report with one more entry, which names the last of the runs as its own."""
    report[part].append(finite(entry) | {"run": len(report["runs"]) - 1})
    write_atomic(file, json.dumps(report, indent=2, allow_nan=False) + "\n")


def begin(report: dict[str, Any], target: str, arguments: Sequence[str]) -> None:
    """Note the run in the report. Raises ValueError if the report is of another target."""
    if report.setdefault("target", target) != target:
        raise ValueError(f"--output: this report is of target {report['target']}, not of {target}")
    command = shlex.join(["python", "-m", "studies.real_target", *arguments])
    report["runs"].append(environment() | {"command": command})


def missing(report: Mapping[str, Any], asked: argparse.Namespace, names: Sequence[str]) -> Iterator[Key]:
    """The cells that are asked for and not done; tasks change fastest, since they share the most."""
    done = {(cell["draft"], cell["regime"], cell["rows"], cell["task"]) for cell in report["cells"]}
    for rows, regime, name, task in product(asked.rows, asked.regimes, names, asked.tasks):
        if (name, regime, rows, task) not in done:
            yield name, regime, rows, task


def as_predicted(cell: Mapping[str, Any]) -> bool:
    """Whether the measured tau is within 2 % or three standard errors of the predicted one."""
    tau = cell["tau"]
    return "predicted" not in tau or abs(tau["relative"]) < 0.02 or abs(tau["z"] or 0) < 3


def line(cell: Mapping[str, Any]) -> str:
    speed, tau = cell["speedup"], cell["tau"]
    shape = f"tree of {len(cell['tree'])}" if cell["tree"] else f"k {cell['k']}"
    expected = f" ({tau['predicted']:.2f} predicted)" if "predicted" in tau else ""
    return (f"{cell['draft']}, T {cell['regime']}, {cell['rows']} rows, {cell['task']}: {shape}, tau "
            f"{tau['measured']:.2f}{expected}, {speed['value']:.2f}x {interval(speed)}, {speed['predicted']:.2f}x predicted"
            f"{marks(cell)}, {cell['seconds']:.0f} s")  # fmt: skip


def interval(value: Mapping[str, Any]) -> str:
    low, high = value["low"], value["high"]
    return f"[{low:.2f}, {high:.2f}]" if low is not None and low == low else "[one batch]"


def marks(cell: Mapping[str, Any]) -> str:
    return ("" if cell["exact"] else " NOT EXACT") + ("" if as_predicted(cell) else " NOT AS PREDICTED")


def summary(report: Mapping[str, Any]) -> str:
    """Tables in Markdown, one for each draft and number of rows: tasks by regimes, speed-up with interval and tau."""
    parts = []
    cells = {(cell["draft"], cell["rows"], cell["task"], cell["regime"]): cell for cell in report["cells"]}
    for name, rows in dict.fromkeys((name, rows) for name, rows, _, _ in cells):
        regimes = [one for one in REGIMES if any(key[:2] == (name, rows) and key[3] == one for key in cells)]
        tasks = dict.fromkeys(key[2] for key in cells if key[:2] == (name, rows))
        table = [["task", *(f"T = {one}" if one != "card" else "card's settings" for one in regimes)]]
        table += [[task, *(_entry(cells.get((name, rows, task, one))) for one in regimes)] for task in tasks]
        parts.append(f"**{name}, {rows} row{'s' * (rows > 1)}**\n\n{markdown(table)}")
    return "\n\n".join(parts)


def _entry(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return ""
    speed = cell["speedup"]
    return f"{speed['value']:.2f}x {interval(speed)}, tau {cell['tau']['measured']:.2f}{marks(cell)}"


def markdown(table: Sequence[Sequence[str]]) -> str:
    head, *rows = (f"| {' | '.join(row)} |" for row in table)
    return "\n".join([head, "|---" * len(table[0]) + "|", *rows])


# --- the command


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m studies.real_target")
    parser.add_argument("drafts", nargs="*", metavar="NAME=DRAFT")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--regimes", type=lambda text: text.split(","), default=list(REGIMES))
    parser.add_argument("--rows", type=lambda text: [int(one) for one in text.split(",")], default=[1, 8])
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=TASKS)
    parser.add_argument("--plan", choices=["tasks", "stored"], default="tasks")
    parser.add_argument("--seconds", type=float, default=50.0, help="of a cell")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of cotrain bench")
    parser.add_argument("--summary", action="store_true", help="print tables of what is done")
    beside = parser.add_argument_group("--beside: other engines in turn with this one")
    beside.add_argument("--beside", action="store_true")
    beside.add_argument("--vllm", metavar="PYTHON", help="the interpreter of a vLLM installation")
    beside.add_argument("--vllm-draft", type=Path, metavar="FOLDER", help="of cotrain export engine=vllm")
    beside.add_argument("--llamacpp", type=Path, metavar="FOLDER", help="node_modules with node-llama-cpp")
    beside.add_argument("--llamacpp-draft", type=Path, metavar="FOLDER", help="of cotrain export engine=llamacpp")
    asked = parser.parse_args(arguments)
    if wrong := sorted(set(asked.regimes) - set(REGIMES)):
        parser.error(f"--regimes: {wrong[0]} is none of {', '.join(REGIMES)}")
    if wrong := [one for one in asked.drafts if "=" not in one]:
        parser.error(f"{wrong[0]}: a draft needs a name before it, NAME={wrong[0]}")
    return asked


def main(arguments: list[str]) -> None:
    asked = parsed(arguments)
    report = read_report(asked.output)
    if not asked.summary:
        cfg = settings(asked.target, asked.set)
        settle(cfg.threads, cfg.bench.seed)
        begin(report, asked.target, arguments)
        target, tokenizer = models(cfg)
        prompts = prompts_of(asked.prompts, target, tokenizer)
        named = dict(one.split("=", 1) for one in asked.drafts)
        drafts = {name: draft_of(name, value, cfg, target, tokenizer) for name, value in named.items()}
        cells = Cells(drafts, prompts, asked.plan == "stored", asked.seconds)
        if asked.beside:
            from studies import real_target_beside

            real_target_beside.measure(cells, report, asked)
        else:
            for key in missing(report, asked, list(drafts)):
                add(asked.output, report, "cells", cells.cell(key))
                print(line(report["cells"][-1]), flush=True)
    if report["cells"]:
        print(summary(report))


if __name__ == "__main__":
    main(sys.argv[1:])
