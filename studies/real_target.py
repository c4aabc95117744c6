"""Drafts of a real chat model by task: speed-up over plain decoding, tokens per call and exactness of each cell.

    python -m studies.real_target --output OUT.json NAME=DRAFT [NAME=DRAFT ...] [--target smollm2] [--rows 1,8]
        [--regimes 0,0.7,1,card] [--tasks chat,code,json,edits,summaries] [--plan tasks|stored] [--seconds 50]
        [--minutes 9] [--set KEY=VALUE ...]
    python -m studies.real_target --output OUT.json --beside NAME=DRAFT [--vllm PYTHON] [--vllm-draft FOLDER]
        [--llamacpp MODULES] [--llamacpp-draft FOLDER] [the options above]
    python -m studies.real_target --output OUT.json --acceptance NAME=DRAFT [the options of --beside]
    python -m studies.real_target --output OUT.json --summary

A draft is a folder, or the settings with which `cotrain train` would begin one: "draft=retrieval", "draft=quantised",
"draft=hybrid init=pretrained draft.path=FOLDER". A cell is a draft, a regime, a number of rows and a task. Plain
decoding and the draft take turns on the task's prompts. The first prompts of each
task are not timed: the draft length, or with --set bench.trees=16 the tree, is chosen on them. With --plan stored it is
the folder's. Drafts learn from prompts that the target samples, so no draft has learnt from these. OUT.json holds all
cells that are done, and a run measures those that are missing. --beside compares with other engines, see
`real_target_beside`; --acceptance compares the acceptance of one draft there with the predicted one, on the texts that
they serve to all prompts of a task but the first. With two rows and more, batches share prompts: the interval is mostly
that of noise and clock.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from cotrain.training.job import models, settle
from inference.drafts.atomic import write_atomic
from inference.measure.environment import environment
from studies.proposers import finite
from studies.real_target_beside import acceptance_line, acceptances, entries
from studies.real_target_cells import REGIMES, Cells, Key, draft_of, prompts_of, settings

PROMPTS = Path(__file__).with_name("prompts_by_task.jsonl")
TASKS = ["chat", "code", "json", "edits", "summaries"]


# --- the report


def read_report(file: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"runs": [], "cells": [], "beside": [], "acceptance": []}
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
    ready = {(cell["draft"], *where) for cell, where in zip(report["cells"], done(report["cells"]), strict=True)}
    for rows, regime, name, task in product(asked.rows, asked.regimes, names, asked.tasks):
        if (name, regime, rows, task) not in ready:
            yield name, regime, rows, task


def done(entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, str]]:
    """Regime, rows and task of each entry."""
    return [(one["regime"], one["rows"], one["task"]) for one in entries]


def as_predicted(cell: Mapping[str, Any]) -> bool:
    """Whether the measured tau is within 2 % or three standard errors of the predicted one."""
    tau = cell["tau"]
    if "predicted" not in tau:
        return True
    return abs(tau["relative"]) < 0.02 or (tau["z"] is not None and abs(tau["z"]) < 3)  # None: infinite


def line(cell: Mapping[str, Any]) -> str:
    speed, tau = cell["speedup"], cell["tau"]
    shape = f"tree of {len(cell['tree'])}" if cell["tree"] else f"k {cell['k']}"
    expected = f" ({tau['predicted']:.2f} predicted)" if "predicted" in tau else ""
    speeds = (
        f"{speed['value']:.2f}x {interval(speed)}, decoding {speed['decode']['value']:.2f}x "
        f"({speed['predicted']:.2f}x predicted)"
    )
    return (
        f"{cell['draft']}, T {cell['regime']}, {cell['rows']} rows, {cell['task']}: {shape}, tau "
        f"{tau['measured']:.2f}{expected}, {speeds}{marks(cell)}, {cell['seconds']:.0f} s"
    )


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


def beside_table(one: dict[str, Any]) -> str:
    """Engines in turn, in Markdown, the fastest first."""
    rows = [["engine", "tokens/s", "this engine's draft over it", "tau"]]
    for name, figures in sorted(one["engines"].items(), key=lambda pair: -pair[1]["tokens_per_second"]["value"]):
        tokens, over, tau = figures["tokens_per_second"], figures["ours_over_it"], figures["tau"]
        ends = [f"{tokens[end]:.1f}" if tokens[end] is not None else "?" for end in ("low", "high")]
        rows.append(
            [
                name,
                f"{tokens['value']:.1f} [{', '.join(ends)}]",
                f"{over['value']:.2f}x {interval(over)}",
                f"{tau:.2f}" if tau else "",
            ]
        )
    head = f"**T = {one['regime']}, {one['rows']} row{'s' * (one['rows'] > 1)}, {one['task']}**"
    return "\n\n".join([head, markdown(rows), *one["left_out"]])


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
    parser.add_argument("--minutes", type=float, default=inf, help="after which no cell or entry begins")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of cotrain bench")
    parser.add_argument("--summary", action="store_true", help="print tables of what is done")
    beside = parser.add_argument_group("--beside: other engines in turn with this one")
    beside.add_argument("--beside", action="store_true")
    beside.add_argument("--acceptance", action="store_true", help="of the draft in the engines, instead of speeds")
    beside.add_argument("--vllm", metavar="PYTHON", help="the interpreter of a vLLM installation")
    beside.add_argument("--vllm-draft", type=Path, metavar="FOLDER", help="of cotrain export engine=vllm")
    beside.add_argument("--vllm-dtype", default="bfloat16", help="with --acceptance")
    beside.add_argument("--llamacpp", type=Path, metavar="FOLDER", help="node_modules with node-llama-cpp")
    beside.add_argument("--llamacpp-draft", type=Path, metavar="FOLDER", help="of cotrain export engine=llamacpp")
    beside.add_argument("--llamacpp-k", type=int, default=4, help="its drafts a round")
    asked = parser.parse_args(arguments)
    if wrong := sorted(set(asked.regimes) - set(REGIMES)):
        parser.error(f"--regimes: {wrong[0]} is none of {', '.join(REGIMES)}")
    if wrong := [one for one in asked.drafts if "=" not in one]:
        parser.error(f"{wrong[0]}: a draft needs a name before it, NAME={wrong[0]}")
    return asked


def main(arguments: list[str]) -> None:
    asked = parsed(arguments)
    until = time.perf_counter() + 60 * asked.minutes
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
        if asked.acceptance:
            for entry in acceptances(cells, asked):
                add(asked.output, report, "acceptance", entry)
                print(acceptance_line(report["acceptance"][-1]), flush=True)
            return
        if asked.beside:
            for entry in entries(cells, asked, done(report["beside"])):
                add(asked.output, report, "beside", entry)
                print(beside_table(report["beside"][-1]), flush=True)
                if time.perf_counter() > until:
                    break
            return
        for key in missing(report, asked, list(drafts)):
            if time.perf_counter() > until:
                break
            add(asked.output, report, "cells", cells.cell(key))
            print(line(report["cells"][-1]), flush=True)
    print("\n\n".join([summary(report), *map(beside_table, report["beside"])]))


if __name__ == "__main__":
    main(sys.argv[1:])
