"""Kinds of draft beside each other: tokens per call, acceptance and speed on one target, on the same prompts.

    python -m tests.studies.proposers OUT.json KIND=FOLDER [KIND=FOLDER ...] [--minutes 60] [--temperatures 0,0.7,1]
        [--batches 1,8] [--rules token,block] [--set bench.new_tokens=64 ...]

Folders are of `cotrain train`, the target is the one that the first names (--set target.path=). Behind KIND may stand
more, as in "eagle, pruned". A cell is a temperature, a number of rows and a rule: plain decoding and every kind take
turns on the same prompts, each kind at the draft length that its own rounds and its predicted tau call for there. OUT
holds the cells that are done; a cell is begun if there is time left of --minutes, and planned and timed in its share.
"""

import argparse
import copy
import json
import math
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from cotrain.bench.measurement import Plan
from cotrain.bench.planner import Measured, counted, plain_texts, planned, settled, tau_of
from cotrain.bench.served_pair import load_network, measured, refuse_pair, resolved
from cotrain.config.overrides import quote
from cotrain.config.settings import checked, register
from cotrain.paths import folder as shipped
from cotrain.students.base import DEFAULT, UNTRAINED
from cotrain.training.job import models
from inference import Engine, Sampling
from inference.drafts.atomic import write_atomic
from inference.drafts.draft_folder import REPORT, Folder
from inference.drafts.weight_files import read_json
from inference.exactness.checks import check, check_calls
from inference.exactness.figures import Figures
from inference.measure.adaptive import Wanted, until_known
from inference.measure.environment import environment
from inference.measure.timing import Texts, Timing, engine_arm
from inference.verify.rules import rule_of

QUEUE, BATCHES = 3, 6  # prompts a row that a run is given, and how many runs of each arm there are at least
PLANNING, TIMING = 0.4, 0.85  # of the time of a shape, when each part ends; checks have the rest
COMPARED = 4  # texts whose tokens are compared with plain decoding's
Costs = dict[str, tuple[Plan, Measured]]  # by name of the kind


@dataclass(frozen=True)
class Draft:
    """plan: of the kind, at any temperature and number of rows. seconds: of its training, None if not known."""

    name: str
    folder: Folder
    plan: Plan
    parameters: int
    seconds: float | None


def drafts(folders: dict[str, str], settings: list[str]) -> list[Draft]:
    """Every folder beside the one target. Raises UserError or ValueError for one that does not fit it."""
    register()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        cfg: Any = checked("bench", compose("bench", overrides=quote(settings)))
    cfg.draft.path = next(iter(folders.values()))
    path, found = resolved(cfg), []
    for name, place in folders.items():
        if not name.startswith(kind := measured(place).kind):
            raise ValueError(f"{name}={place}: the folder is of kind {kind}")
        refuse_pair(place, path)
    target, tokenizer = models(cfg)
    for name, place in folders.items():
        folder = measured(place)
        network = load_network(folder, target, tokenizer)
        objective = folder.metadata.objective if folder.metadata else "sampled"
        plan = Plan(target, tokenizer, network, Sampling(), cfg.verify, cfg.bench, (path, place), objective,
                    kind=folder.kind)  # fmt: skip
        size = sum(weight.numel() for weight in network.parameters() if weight.requires_grad)
        found.append(Draft(name, folder, plan, size, trained(folder)))
    return found


def trained(folder: Folder) -> float | None:
    """Seconds, as the folder's report says."""
    if folder.kind in UNTRAINED:
        return 0.0
    report = read_json(folder.path / REPORT) if (folder.path / REPORT).is_file() else {}
    seconds: float | None = report.get("extra", {}).get("training", {}).get("seconds")
    return seconds


def alphas(figures: Figures) -> list[float]:
    """sum_v min(p, q) by depth, the mean over rounds that draft so far."""
    rounds, found = figures.k, []
    for j in range(int(rounds.max())):
        law = figures.alpha if figures.alpha.ndim == 2 else figures.alpha[..., j]
        drafting = rounds[:, : rounds.shape[1] - j] > j  # rounds that start at t draft token t + j at this depth
        found.append(float(law[:, j:][drafting].mean()))
    return found


@dataclass
class Study:
    """drafts of one target, what is known of each, and the deadline of the whole on the clock."""

    drafts: list[Draft]
    until: float
    texts: dict[float, Texts] = field(default_factory=dict)  # by temperature
    figures: dict[tuple[str, float], Figures] = field(default_factory=dict)

    def said(self, draft: Draft, plan: Plan) -> Figures:
        """Of texts of the temperature, the same for every kind."""
        temperature = plan.sampling.temperature
        if temperature not in self.texts:
            self.texts[temperature] = plain_texts(plan)
        key = draft.name, temperature
        if key not in self.figures:
            self.figures[key] = counted(plan, self.texts[temperature], max(plan.depths))
        return self.figures[key]

    def cells(self, temperatures: list[float], batches: list[int], rules: list[str]) -> Any:
        """Rows of each cell in turn, while there is time."""
        shapes = list(product(batches, temperatures))
        for number, (rows, temperature) in enumerate(shapes):
            if (now := time.perf_counter()) > self.until:
                return
            share = (self.until - now) / (len(shapes) - number)
            costs = {}
            for i, draft in enumerate(self.drafts):
                ends = now + share * PLANNING * (i + 1) / len(self.drafts)
                costs[draft.name] = settled(at(draft.plan, temperature, rows), ends)
            for i, rule in enumerate(rules):
                ends = now + share * (PLANNING + (TIMING - PLANNING) * (i + 1) / len(rules))
                yield self.cell(temperature, rows, rule, costs, ends)

    def cell(self, temperature: float, rows: int, rule: str, costs: Costs, until: float) -> list[dict[str, Any]]:
        """One interleaved run. costs: of each kind at this temperature and number of rows, as far as they are known."""
        about = {"temperature": temperature, "rows": rows, "rule": rule}
        chosen = [self.chosen(draft, rule, costs, until) for draft in self.drafts]
        timing = timed(chosen, until)
        base = next((draft.name for draft in self.drafts if draft.folder.kind == DEFAULT), None)
        found = []
        for one in chosen:
            draft = one.draft
            over = {"speedup": timing.ratio(draft.name, "plain")._asdict() | {"predicted": one.predicted},
                    "over_independent": timing.ratio(draft.name, base)._asdict() if base else None}  # fmt: skip
            said = {"parameters": draft.parameters, "train_seconds": draft.seconds,
                    "alpha": alphas(self.said(draft, one.plan))}  # fmt: skip
            found.append({"kind": draft.name, **about, "k": one.k, **said, **over, **judged(one, timing)})
        return found

    def chosen(self, draft: Draft, rule: str, costs: Costs, until: float) -> "Chosen":
        """The draft length, by the planner that `cotrain bench` has."""
        plan, cost = costs[draft.name]
        plan = replace(plan, verify=rule)
        figures = self.said(draft, plan)
        length, cost = planned(plan, cost, lambda k: tau_of(figures, rule, k), until)
        costs[draft.name] = plan, cost
        k = length.drafting
        return Chosen(draft, plan, k, plan.engine(k), length.speedups[k])


@dataclass(frozen=True)
class Chosen:
    """A kind in a cell. engine: that is timed; predicted: its speed-up."""

    draft: Draft
    plan: Plan
    k: int
    engine: Engine
    predicted: float


def at(plan: Plan, temperature: float, rows: int) -> Plan:
    bench = copy.copy(plan.bench)
    bench.rows = rows
    return replace(plan, draft=plan.served, sampling=Sampling(temperature=temperature), bench=bench)


def timed(chosen: list[Chosen], until: float) -> Timing:
    """Plain decoding and every kind in turn."""
    plan = chosen[0].plan
    size, rows = plan.bench, plan.bench.rows
    engines = {"plain": plan.plain()} | {one.draft.name: one.engine for one in chosen}
    arms = [engine_arm(name, engine, plan.sampling, size.new_tokens) for name, engine in engines.items()]
    queue = rows if rows == 1 else QUEUE * rows
    prompts = plan.final(0, max(size.prompts, BATCHES * queue))
    wanted = Wanted(-(-len(prompts) // queue), inf, until)
    return until_known(arms, prompts, queue, (chosen[0].draft.name, "plain"), wanted, size.seed)[0]


def judged(one: Chosen, timing: Timing) -> dict[str, Any]:
    """Tokens per call beside what the very texts must cost, and whether the engine that was timed is exact: the calls
    of all texts, and everything else of some."""
    plan, texts, stats = one.plan, timing.texts(one.draft.name), timing.stats(one.draft.name)
    assert stats is not None
    some = Texts(*(part[:COMPARED] for part in texts))
    verdict = check(one.engine, some, plan.sampling, plan.bench.new_tokens, plan.bench.seed)
    calls = check_calls(counted(plan, texts, one.k, verdict.text.explained), texts, plan.verify)
    tau = {"measured": stats.tau} | (
        {"predicted": calls.tau, "z": calls.z} if calls else {"predicted": None, "z": None}
    )
    exact = verdict.passed and (calls is None or calls.passed)
    return {
        "tau": tau,
        "exact": exact,
        "wrong": [] if exact else [*verdict.lines(), *([calls.line()] if calls else [])],
    }


def finite(value: Any) -> Any:
    """What JSON takes: None for NaN and infinity."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def line(row: dict[str, Any]) -> str:
    cell = f"T {row['temperature']:g}, {row['rows']} rows, {row['rule']}"
    tau, speed, over = row["tau"], row["speedup"], row["over_independent"]
    beside = f", {over['value']:.2f}x [{over['low']:.2f}, {over['high']:.2f}] of {DEFAULT}" if over else ""
    predicted = f" ({tau['predicted']:.2f}, z {tau['z']:+.1f})" if tau["predicted"] else ""
    return (f"{cell}  {row['kind']:14} k {row['k']}  tau {tau['measured']:.2f}{predicted}  {speed['value']:.2f}x "
            f"[{speed['low']:.2f}, {speed['high']:.2f}], {speed['predicted']:.2f}x predicted{beside}"
            f"{'' if row['exact'] else '  NOT EXACT'}")  # fmt: skip


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.studies.proposers")
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", nargs="+", metavar="KIND=FOLDER")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--temperatures", default="0,0.7,1")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rules", default="block")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of cotrain bench")
    asked = parser.parse_args(arguments)
    start = time.perf_counter()
    rules = asked.rules.split(",")
    for rule in rules:
        rule_of(rule)
    found = drafts(dict(one.split("=", 1) for one in asked.folders), asked.set)
    study = Study(found, start + 60 * asked.minutes)
    about = environment()
    command = " ".join(["python -m tests.studies.proposers", *arguments])
    report = {"environment": about, "commit": about["commit"], "command": command, "target": found[0].plan.names[0],
              "rows": []}  # fmt: skip
    lists = [float(t) for t in asked.temperatures.split(",")], [int(n) for n in asked.batches.split(",")]
    for rows in study.cells(*lists, rules):
        report["rows"] += finite(rows)
        write_atomic(asked.out, json.dumps(report, indent=2, allow_nan=False) + "\n")
        print("\n".join(map(line, report["rows"][-len(rows) :])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
