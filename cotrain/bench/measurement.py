"""Measuring a pair with the bundled engine: quickly at each checkpoint, in full for what is exported."""

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import inf, nan
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.bench.planner import BATCH, Compiled, advice, counted, plain_texts, planned, rounds_of, settled, taus
from cotrain.bench.timing_display import TimingDisplay
from cotrain.bench.tree_planner import best_tree, decided, told
from cotrain.config.groups import Bench
from cotrain.data.prompts import shipped_ids
from cotrain.data.splits import Prompts, apart
from cotrain.progress_display import Display
from cotrain.students.base import DEFAULT, Student, student_class
from inference import Engine, Sampling
from inference.drafts.planned_tree import PlannedTree
from inference.exactness.checks import check, check_calls
from inference.measure import adaptive
from inference.measure.adaptive import Reached, Wanted, until_known
from inference.measure.real_costs import RealRound
from inference.measure.timing import Emitted, Timing, engine_arm, interleave, together, transformers_arm
from inference.models.dtypes import cast, quantisation_of, widened
from inference.models.lm import takes_int8
from inference.policy import Fixed
from inference.proposers import NGram
from inference.proposers.base import Proposer
from inference.report.build import build

# of bench.minutes, when each part ends: costs of rounds; timing; parity on more tokens. Greedy decoding has the rest.
COSTS, TIMING, PARITY = 0.25, 0.65, 0.85
FORCED = 6  # times that a text takes to be made, to predict its calls: every token of it begins a round with a tree


@dataclass(frozen=True)
class Plan:
    """What is measured: a pair, its regime, its rule and how much."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: PreTrainedModel
    sampling: Sampling
    verify: str
    bench: Bench
    names: tuple[str, str]  # of target and draft, to print
    objective: str = "sampled"  # how it drafts; "greedy": its likeliest tokens
    compiled: Compiled = Compiled()
    given: Prompts | None = None  # None: those shipped
    kind: str = DEFAULT  # of draft
    known: dict[int, RealRound] = field(default_factory=dict)  # by draft length, of one shape of draft: measured once
    tree: PlannedTree | None = None  # what is drafted in place of a chain; before it is measured, one to consider

    @cached_property
    def served(self) -> PreTrainedModel:
        """The draft as it will be served, a copy unless it is that already."""
        wanted = self.bench.draft_dtype
        dtype = self.draft.dtype if wanted == "auto" else getattr(torch, wanted)
        if self.draft.dtype == dtype and not self.draft.training:
            return self.draft
        return cast(copy.deepcopy(self.draft).eval(), dtype)

    @cached_property
    def int8(self) -> bool:
        return self.bench.draft_int8 and takes_int8(self.served)

    @cached_property
    def running(self) -> PreTrainedModel:
        """The served draft's numbers, in float32 where this machine would emulate their dtype; the 8-bit kernel does
        not."""
        return self.served if self.int8 else widened(self.served, copied=True)

    def student(self, network: PreTrainedModel) -> Student:
        """Of the draft's kind, with other weights."""
        return student_class(self.kind)(network, self.target)

    def proposer(self, counted: bool = False) -> Proposer:
        """counted: for counts alone, which are not worth compiling on a CPU."""
        compile = None if counted else self.compiled.draft
        greedy, shape = self.objective == "greedy", {}
        if self.tree is not None:
            greedy, shape = greedy or self.tree.likeliest, {"shape": self.tree.parents}
        return self.student(self.running).proposer(greedy=greedy, compile=compile, int8=self.int8, **shape)

    @cached_property
    def depths(self) -> list[int]:
        """Draft lengths to choose from: those of bench.depths that it drafts, or the most that it does."""
        most = self.proposer(counted=True).depths or inf
        return [k for k in self.bench.depths if k <= most] or [int(most)]

    def engine(self, k: int, rows: int | None = None, proposer: Proposer | None = None) -> Engine:
        """k: drafts of a round, of trees the levels. rows: for counts alone, so many at a time. proposer: another one,
        of chains."""
        rule = self.tree.rule if self.tree and proposer is None else self.verify
        return Engine(self.target, proposer or self.proposer(bool(rows)), verify=rule, policy=Fixed(k),
                      tokenizer=self.tokenizer, rows=rows or self.bench.rows,
                      compile=None if rows else self.compiled.target)  # fmt: skip

    def plain(self, rows: int | None = None) -> Engine:
        compile = None if rows else self.compiled.plain
        return Engine(self.target, tokenizer=self.tokenizer, rows=rows or self.bench.rows, compile=compile)

    @cached_property
    def prompts(self) -> Prompts:
        return self.given or apart(*shipped_ids(self.tokenizer, self.bench.prompt_tokens), [], "shipped")

    def ranking(self, first: int, count: int) -> list[list[int]]:
        """Prompts `first`, `first` + 1, ... of those that rank checkpoints and draft lengths; they repeat when they run
        out."""
        return _from(self.prompts.ranking, first, count)

    def final(self, first: int, count: int) -> list[list[int]]:
        """The same of those that time and check what is exported."""
        return _from(self.prompts.final, first, count)


def _from(prompts: Sequence[list[int]], first: int, count: int) -> list[list[int]]:
    return [prompts[(first + i) % len(prompts)] for i in range(count)]


@dataclass(frozen=True)
class Budget:
    """Seconds for a whole measurement, since a moment on the clock; none when they are 0."""

    seconds: float
    start: float

    def until(self, share: float) -> float:
        """When that share of them is over, on the clock; inf without a limit."""
        return self.start + share * self.seconds if self.seconds else inf


def quick(plan: Plan, k: int) -> dict[str, float]:
    """Speed-up with its 95 % interval (nan ends for one batch), tau and tokens per second on a few prompts, both sides
    interleaved; share_of_cost_table: what was measured of the decoding speed-up that tau and the seconds of a round,
    timed apart from it and once for all checkpoints, predict."""
    arms = [
        engine_arm("speculative", plan.engine(k), plan.sampling, plan.bench.new_tokens),
        engine_arm("plain", plan.plain(), plan.sampling, plan.bench.new_tokens),
    ]
    timing = interleave(arms, plan.ranking(0, plan.bench.quick_prompts), plan.bench.rows, plan.bench.seed)
    stats, speedup = timing.stats("speculative"), timing.ratio("speculative", "plain")
    tau, decoding = stats.tau if stats else nan, timing.ratio("speculative", "plain", decode=True).value
    k = min(k, plan.proposer(counted=True).depths or k)
    if k not in plan.known:
        plan.known.update(rounds_of(plan, (0, k), until=0.0))
    predicted = tau * plan.known[0].seconds / plan.known[k].seconds
    return {
        "speedup": speedup.value,
        "low": speedup.low,
        "high": speedup.high,
        "share_of_cost_table": decoding / predicted,
        "tau": tau,
        "tokens_per_second": timing.speed("speculative"),
    }


def refuse(size: Bench) -> None:
    """Raise ValueError, naming the key, for sizes that cannot be measured."""
    if not size.depths or min(size.depths) < 1:
        raise ValueError(f"bench.depths: {list(size.depths)} must be draft lengths of at least 1")
    if not size.minutes >= 0:
        raise ValueError(f"bench.minutes: {size.minutes} must be minutes, or 0 to time bench.prompts and no more")
    if not size.interval > 0:
        raise ValueError(f"bench.interval: {size.interval} must be a share of the speed-up above 0, as .1")


def measure(plan: Plan, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """The full report: draft length from measured costs, speed with intervals, exactness, parity, greedy beside."""
    size = plan.bench
    refuse(size)
    budget = Budget(60 * size.minutes, time.perf_counter())
    print("bench: what rounds cost, and the draft length that this and the acceptance call for")
    given, plan = plan.tree, replace(plan, tree=None)
    plan, costs = settled(plan, budget.until(COSTS))
    texts = plain_texts(plan)
    chains = taus(plan, texts)
    length, costs = planned(plan, costs, chains.__getitem__, budget.until(COSTS))
    grown = best_tree(replace(plan, tree=given), length, chains, texts, budget.until(COSTS))
    served, line = decided(length, grown)
    choice, k = told(length, grown, served, plan.verify), served.tree.depth if served else length.drafting
    plan = replace(plan, tree=served.tree) if served else plan
    if choice["plain_is_faster"]:
        best = served.speedup if served else length.speedups[k]
        print(f"bench: plain decoding is expected to be faster here, {best:.2f}x with drafts at best")
    print(f"bench: {line}; {size.prompts} prompts in turn: speculative, plain, transformers")
    engine = plan.engine(k)
    timing, reached = _timed(plan, engine, plan.sampling, budget.until(TIMING))
    print("bench: exactness on these prompts, and parity on more tokens")
    verdict = check(engine, timing.texts("speculative"), plan.sampling, size.new_tokens, size.seed, BATCH)
    said = advice(length, timing.ratio("speculative", "plain"), served)
    found = choice | {
        "kind": plan.kind,
        "target_quantisation": quantisation_of(plan.target.config),
        "costs": asdict(costs.costs),
        "costs_alone": asdict(costs.alone),
        "rounds": {str(at): asdict(one) for at, one in sorted(costs.rounds.items())},
        "compiled": plan.compiled._asdict(),
        "advice": said,
        "timing": asdict(reached),
        "said": [*([said] if said else []), *([line] if grown else []), *adaptive.lines(reached)],
        "prompts": plan.prompts.source,
        "parity": parity(plan, k, budget.until(PARITY), verdict.text.explained),
        "greedy": greedy(plan, k),
        "plain_over_transformers": timing.ratio("plain", "transformers")._asdict(),
    }
    target, draft = plan.names
    return build(
        timing, engine, "speculative", "plain", sampling=plan.sampling, max_new_tokens=size.new_tokens,
        target=target, draft=draft, verdict=verdict, extra=found | (extra or {}),
    )  # fmt: skip


def _timed(plan: Plan, engine: Engine, sampling: Sampling, until: float) -> tuple[Timing, Reached]:
    size = plan.bench
    arms = [
        engine_arm("speculative", engine, sampling, size.new_tokens),
        engine_arm("plain", plan.plain(), sampling, size.new_tokens),
        transformers_arm("transformers", plan.target, sampling, size.new_tokens),
    ]
    batches = -(-size.prompts // size.rows)
    more = until < inf
    wanted = Wanted(batches, size.interval if more else inf, until)
    prompts = plan.prompts.final if more else plan.prompts.final[: size.prompts]
    with TimingDisplay(batches, until) as display:
        timing, reached = until_known(
            arms,
            prompts,
            size.rows,
            ("speculative", "plain"),
            wanted,
            size.seed,
            say=display.known,
            turned=display.turned,
        )
    print("bench: " + "; ".join(adaptive.lines(reached)))
    return timing, reached


def parity(plan: Plan, k: int, until: float = inf, noise: float = 0.0) -> dict[str, Any] | None:
    """Target calls predicted and measured on at least `parity_tokens` tokens, or as many as time allows; final prompts,
    those not timed before first, with other noise. until: when time is over, on the clock; noise: of score gaps, as the
    verdict found it.

    None for the coupled rule, whose calls cannot be predicted from the text.
    """
    size = plan.bench
    count = -(-size.parity_tokens // size.new_tokens)
    if plan.tree:
        until = time.perf_counter() + (until - time.perf_counter()) / FORCED
    arm = engine_arm("speculative", plan.engine(k, BATCH), plan.sampling, size.new_tokens)
    parts: list[Emitted] = []
    with Display("bench: parity", count, "texts") as display:
        for done in range(0, count, BATCH):
            prompts = plan.final(size.prompts + done, min(BATCH, count - done))
            parts.append(interleave([arm], prompts, BATCH, size.seed + 1 + done, warmup=0).texts("speculative"))
            display.to(done + len(prompts))
            if time.perf_counter() > until:
                break
    texts = together(parts)
    calls = check_calls(counted(plan, texts, k, noise), texts, plan.tree.rule if plan.tree else plan.verify)
    if calls is None:
        return None
    measured = calls.tokens / calls.measured
    return asdict(calls) | {
        "tau_measured": measured, "tau_predicted": calls.tau, "z": calls.z, "relative": calls.tau / measured - 1,
        "passed": calls.passed, "line": calls.line(),
    }  # fmt: skip


def greedy(plan: Plan, k: int) -> dict[str, Any]:
    """Temperature 0: speculative and n-gram look-up beside plain decoding; small models loop there."""
    size, sampling = plan.bench, Sampling(temperature=0)
    arms = [
        engine_arm("speculative", plan.engine(k), sampling, size.new_tokens),
        engine_arm("ngram", plan.engine(k, proposer=NGram()), sampling, size.new_tokens),
        engine_arm("plain", plan.plain(), sampling, size.new_tokens),
    ]
    prompts = plan.final(0, max(size.prompts // 2, 2))
    timing = interleave(arms, prompts, size.rows, size.seed)
    found: dict[str, Any] = {"prompts": len(prompts)}
    for arm in ("speculative", "ngram"):
        stats = timing.stats(arm)
        found[arm] = {"speedup": timing.ratio(arm, "plain")._asdict(), "tau": stats.tau if stats else None}
    return found
