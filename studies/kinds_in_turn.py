"""Cells of a study in which kinds of draft take turns: what each predicts, which draft length it is timed at, what came
of it."""

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any

from cotrain.bench.measurement import prepare
from cotrain.planning.forecast import acceptance
from cotrain.planning.plan import Plan
from cotrain.planning.planner import MeasuredCosts, measured_costs, plain_texts, plan_length, text_figures
from cotrain.students.base import DEFAULT, student_class
from inference import Engine, Sampling
from inference.drafts.draft_folder import Folder
from inference.exactness.figures import CallsCheck, Figures, check_calls
from inference.exactness.verdict import Verdict, check
from inference.measure.adaptive import Wanted, until_known
from inference.measure.arms import engine_arm
from inference.measure.timing import Timing
from inference.output import Emitted

QUEUE, BATCHES = 3, 6  # prompts a row that a run is given, and how many runs of each arm there are at least
PLANNING, TIMING = 0.4, 0.85  # of the time of a shape, when each part ends; checks have the rest
COMPARED = 4  # texts whose tokens are compared with plain decoding's, or as many as are decoded at once
Costs = dict[str, tuple[Plan, MeasuredCosts]]  # by name of the kind


@dataclass(frozen=True)
class Draft:
    """plan: of the kind, at any temperature and number of rows. seconds: of its training, None if not known."""

    name: str
    folder: Folder
    plan: Plan
    parameters: int
    seconds: float | None


def alphas(figures: Figures) -> list[float]:
    """sum_v min(p, q) by depth, the mean over rounds that draft so far."""
    rounds, found = figures.k, []
    for j in range(int(rounds.max())):
        probs = figures.alpha if figures.alpha.ndim == 2 else figures.alpha[..., j]
        drafting = rounds[:, : rounds.shape[1] - j] > j  # rounds that start at t draft token t + j at this depth
        found.append(float(probs[:, j:][drafting].mean()))
    return found


@dataclass
class Study:
    """drafts of one target, what is known of each, and the deadline of the whole on the clock."""

    drafts: list[Draft]
    until: float
    texts: dict[float, Emitted] = field(default_factory=dict)  # by temperature
    figures: dict[tuple[str, float], Figures] = field(default_factory=dict)

    def said(self, draft: Draft, plan: Plan) -> Figures:
        """Of texts of the temperature, the same for every kind."""
        temperature = plan.sampling.temperature
        if temperature not in self.texts:
            self.texts[temperature] = plain_texts(plan)
        key = draft.name, temperature
        if key not in self.figures:
            self.figures[key] = text_figures(plan, self.texts[temperature], max(plan.depths))
        return self.figures[key]

    def cells(self, temperatures: list[float], batches: list[int], rules: list[str]) -> Iterator[list[dict[str, Any]]]:
        """Rows of each cell in turn, while there is time."""
        shapes = list(product(batches, temperatures))
        for number, (rows, temperature) in enumerate(shapes):
            if (now := time.perf_counter()) > self.until:
                return
            share = (self.until - now) / (len(shapes) - number)
            costs = {}
            for i, draft in enumerate(self.drafts):
                ends = now + share * PLANNING * (i + 1) / len(self.drafts)
                plan = self.ready(draft, temperature, rows)
                costs[draft.name] = plan, measured_costs(plan, ends)
            for i, rule in enumerate(rules):
                ends = now + share * (PLANNING + (TIMING - PLANNING) * (i + 1) / len(rules))
                yield self.cell(temperature, rows, rule, costs, ends)

    def ready(self, draft: Draft, temperature: float, rows: int) -> Plan:
        """The plan of a cell, prepared as its kind wants (a gate is counted there)."""
        plan = at(draft.plan, temperature, rows)
        prepare(plan)
        if student_class(plan.kind).calibrated:  # its drafts are others now
            self.figures.pop((draft.name, temperature), None)
        return plan

    def cell(self, temperature: float, rows: int, rule: str, costs: Costs, until: float) -> list[dict[str, Any]]:
        """One interleaved run. costs: of each kind at this temperature and number of rows, as far as they are known."""
        about = {"temperature": temperature, "rows": rows, "rule": rule}
        chosen = [self.chosen(draft, rule, costs, until) for draft in self.drafts]
        timing = timed(chosen, until)
        base = next((draft.name for draft in self.drafts if draft.folder.kind == DEFAULT), None)
        found = []
        for one in chosen:
            draft = one.draft
            over = {
                "speedup": timing.ratio(draft.name, "plain")._asdict() | {"predicted": one.predicted},
                "over_independent": timing.ratio(draft.name, base)._asdict() if base else None,
            }
            said = {
                "parameters": draft.parameters,
                "train_seconds": draft.seconds,
                "alpha": alphas(self.said(draft, one.plan)),
            }
            found.append({"kind": draft.name, **about, "k": one.k, **said, **over, **judged(one, timing)})
        return found

    def chosen(self, draft: Draft, rule: str, costs: Costs, until: float) -> "Chosen":
        """The draft length, by the planner that `cotrain bench` has."""
        plan, cost = costs[draft.name]
        plan = replace(plan, verify=rule)
        rates = acceptance(self.said(draft, plan), rule, max(plan.depths))
        chains, cost = plan_length(plan, cost, rates, until)
        costs[draft.name] = plan, cost
        return Chosen(draft, plan, chains.k, plan.engine(chains.k), chains.speedup)


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
    stats = timing.stats(one.draft.name)
    assert stats is not None
    verdict, calls = checks(one, timing)
    tau = {"measured": stats.tau} | (
        {"predicted": calls.tau, "z": calls.z} if calls else {"predicted": None, "z": None}
    )
    return {"tau": tau} | exactness(verdict, calls)


def checks(one: Chosen, timing: Timing) -> tuple[Verdict, CallsCheck | None]:
    """The verdict on the engine that was timed, from some of its texts, and the target calls of all of them."""
    plan, texts = one.plan, timing.texts(one.draft.name)
    count = max(COMPARED, one.engine.rows)
    some = Emitted(texts.prompts[:count], texts.ids[:count], texts.tokens[:count], texts.counts[:count])
    verdict = check(one.engine, some, plan.sampling, plan.bench.new_tokens, plan.bench.seed)
    return verdict, check_calls(text_figures(plan, texts, one.k, verdict.text.explained), texts, plan.rule)


def exactness(verdict: Verdict, calls: CallsCheck | None) -> dict[str, Any]:
    """Whether both passed, and what they say if not."""
    exact = verdict.passed and (calls is None or calls.passed)
    return {"exact": exact, "wrong": [] if exact else [*verdict.lines(), *([calls.line()] if calls else [])]}
