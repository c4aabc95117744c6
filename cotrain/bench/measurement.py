"""Measurement of a target and a draft with the bundled engine. Each checkpoint is measured briefly, and the exported
draft in full."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import inf, nan
from statistics import median
from typing import Any

from cotrain.board import tags
from cotrain.console import Display, working
from cotrain.planning.plan import Plan
from cotrain.planning.planner import (
    BATCH,
    advice,
    choice_line,
    measured_costs,
    plain_texts,
    plan_draft,
    plan_entries,
    rounds_of,
    served_tree,
    text_figures,
)
from cotrain.students.base import Trials, student_class
from inference import Engine, Sampling
from inference.drafts import moved_target
from inference.exactness.figures import check_calls
from inference.exactness.verdict import check
from inference.measure import adaptive
from inference.measure.adaptive import Reached, Wanted, until_known
from inference.measure.arms import transformers_arm
from inference.measure.floor import read_seconds
from inference.measure.timing import Timing, interleave, together
from inference.models.pretrained import quantisation_of
from inference.output import Emitted, pieces
from inference.proposers import NGram
from inference.proposers.base import Proposer
from inference.report.build import build
from inference.report.replay import Recorder

# shares of bench.minutes at which the costs of rounds, the timing, and parity end; greedy decoding has the rest
COSTS, TIMING, PARITY = 0.25, 0.65, 0.85
FEW = 8  # number of texts in a part of the measurement whose time is already over when it begins
FORCED = 6  # time to predict the calls of a text with a tree, a round at every token, over its decoding time
SAMPLE_TOKENS = 64  # length of the text that TensorBoard shows
REPLAY_ROWS, REPLAY_TOKENS = 4, 64


# --- at a checkpoint


def quick(plan: Plan, k: int) -> dict[str, float]:
    """Time speculative decoding at draft length k and plain decoding, batch by batch in turn, on bench.quick_prompts
    prompts. Return these figures by name:

    speedup with the ends of its 95 % interval (low, high; NaN for few batches), tau, tokens_per_second, and
    share_of_cost_table, the measured decoding speed-up divided by the predicted one. The prediction uses tau and the
    seconds of rounds, which are timed separately at the first call and stored in `plan.known`, in place.
    """
    arms = plan.arms({"speculative": plan.engine(k), "plain": plan.plain()})
    timing = interleave(arms, plan.ranking(0, plan.bench.quick_prompts), plan.bench.rows, plan.bench.seed)
    stats, speedup = timing.stats("speculative"), timing.ratio("speculative", "plain")
    tau, decoding = stats.tau if stats else nan, timing.ratio("speculative", "plain", decode=True).value
    k = min(k, plan.proposer().depths or k)
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


def sample_text(plan: Plan, k: int) -> str:
    """Return a text in Markdown for TensorBoard: the first ranking prompt, continued at draft length k. Each new token
    is marked as drafted, corrected or bonus. The random numbers are the same at every checkpoint."""
    decode: Any = plan.tokenizer.decode
    (prompt,) = plan.ranking(0, 1)
    engine, tokens = plan.engine(k, 1), min(SAMPLE_TOKENS, plan.bench.new_tokens)
    events = list(engine.stream(prompt, max_new_tokens=tokens, sampling=plan.sampling, seed=plan.bench.seed))
    new = sum(len(event.ids) for event in events)
    return tags.marked_text(decode(prompt), pieces(events, decode), new, len(events))


# --- in full


def prepare(plan: Plan) -> None:
    """Calibrate a draft if its kind needs it, and store the result in the network's config, in place. Only ranking
    prompts are used, since these are not timed later."""
    if not student_class(plan.kind).calibrated:
        return
    size = plan.bench

    def drafting(proposer: Proposer) -> Engine:
        return plan.engine(max(size.depths), proposer=proposer)

    prompts = plan.ranking(0, max(4 * size.quick_prompts, size.rows))
    trials = Trials(drafting, plan.plain, prompts, plan.sampling, size.new_tokens, size.seed)
    settings = plan.student(plan.draft).calibrate(plan.proposer(), trials)
    for network in (plan.draft, plan.served, plan.running):
        network.config.update(settings)


@dataclass(frozen=True)
class Budget:
    """The time limit of a measurement: `seconds` from `start`, a value of time.perf_counter(). 0 seconds means no
    limit."""

    seconds: float
    start: float

    def until(self, share: float) -> float:
        """Return the value of time.perf_counter() at which `share` (0 to 1) of the time is over; inf without a
        limit."""
        return self.start + share * self.seconds if self.seconds else inf

    def over(self, share: float) -> bool:
        """Return whether `share` (0 to 1) of the time is over. Always False without a limit."""
        return time.perf_counter() > self.until(share)


def measure(plan: Plan, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """Measure the draft in full, and return the report. The report has the chosen draft length or tree, the speed-up
    with its interval, the exactness verdict, the parity figures and greedy decoding. extra: further entries for the
    report's `extra`; None for none."""
    size = plan.bench
    budget = Budget(60 * size.minutes, time.perf_counter())
    given, plan = plan.tree, replace(plan, draft=plan.served, tree=None)
    with working("bench: costs of rounds"):
        costs = measured_costs(plan, budget.until(COSTS))
    with working("bench: acceptance on texts of the target"):
        texts = plain_texts(plan, FEW if budget.over(COSTS) else BATCH)
        plan, costs, chosen = plan_draft(replace(plan, tree=given), costs, texts, budget.until(COSTS))
    k, choice, line = chosen.length, plan_entries(chosen, plan.verify), choice_line(chosen)
    if choice["plain_is_faster"]:
        print(f"bench: plain decoding is expected to be faster here: with these drafts {chosen.speedup:.2f}x")
    timed = min(max(size.prompts, adaptive.FEWEST * size.rows), len(plan.prompts.final))
    print(f"bench: {line}; {timed} prompts are timed with each engine in turn: speculative, plain, transformers")
    engine = plan.engine(k)
    timing, reached, read = _timed(plan, engine, budget.until(TIMING))
    floor = plain_floor(engine.rows, timing, read)
    with working("bench: exactness on these prompts"):
        verdict = check(engine, timing.texts("speculative"), plan.sampling, size.new_tokens, size.seed, BATCH)
    target, draft = plan.names
    moved = moved_target.movement_of(target, plan.adapter)
    sentence = advice(chosen, timing.ratio("speculative", "plain"))
    counted = parity(plan, k, budget.until(PARITY), verdict.text.explained)
    with working("bench: greedy decoding"):
        greedy = measure_greedy(plan, k, budget.over(1.0))
    entries = choice | {
        "kind": plan.kind,
        "target_quantisation": quantisation_of(plan.target.config),
        "costs": asdict(costs.costs),
        "costs_alone": asdict(costs.alone),
        "rounds": {str(at): asdict(one) for at, one in sorted(costs.rounds.items())},
        "advice": sentence,
        "timing": asdict(reached),
        "plain_step": floor,
        "moved": moved,
        "said": [
            *filter(
                None, (moved and moved_target.said(moved), sentence, floor and floor_line(floor), chosen.tree and line)
            ),
            *adaptive.reached_lines(reached),
        ],
        "prompts": plan.prompts.source,
        "parity": counted,
        "greedy": greedy,
        "plain_over_transformers": timing.ratio("plain", "transformers")._asdict(),
    }
    return build(
        timing,
        engine,
        "speculative",
        "plain",
        sampling=plan.sampling,
        max_new_tokens=size.new_tokens,
        target=target,
        draft=draft,
        verdict=verdict,
        extra=entries | (extra or {}),
    )


def plain_floor(rows: int, timing: Timing, read: float) -> dict[str, float] | None:
    """Return the seconds of a plain step of the timed batches of so many rows, those of reading the target's weights
    once, and the latter's share; None if `read` is 0."""
    step = rows / timing.speed("plain", decode=True)
    return {"seconds": step, "read_seconds": read, "share": read / step} if read else None


def floor_line(floor: Mapping[str, float]) -> str:
    """Return what `plain_floor` found as a line for the user."""
    return (
        f"a plain step takes {1000 * floor['seconds']:.1f} ms; reading the target's weights once takes "
        f"{1000 * floor['read_seconds']:.1f} ms here, {floor['share']:.0%} of it"
    )


def _timed(plan: Plan, engine: Engine, until: float) -> tuple[Timing, Reached, float]:
    """Return the timing, what it reached, and the median seconds of reading the target's weights once, after each
    batch."""
    size, reads = plan.bench, list[float]()
    arms = plan.arms({"speculative": engine, "plain": plan.plain()})
    arms.append(transformers_arm("transformers", plan.target, plan.sampling, size.new_tokens))
    batches = -(-size.prompts // size.rows)
    more = until < inf
    prompts = plan.final(0, len(plan.prompts.final))[: None if more else size.prompts]
    with TimingDisplay(adaptive.FEWEST if time.perf_counter() > until else batches, until) as display:

        def turned(done: int) -> None:
            display.turned(done)
            reads.append(read_seconds(engine.target))

        timing, reached = until_known(
            arms,
            prompts,
            size.rows,
            ("speculative", "plain"),
            Wanted(batches, size.interval if more else inf, until, adaptive.FEWEST),
            size.seed,
            say=display.known,
            turned=turned,
        )
    print("bench: " + "; ".join(adaptive.reached_lines(reached)))
    return timing, reached, median(reads)


class TimingDisplay(Display):
    """The progress of a timing. batches: how many batches are timed at least. until: the deadline, a value of
    time.perf_counter(), or inf for none. With a deadline, the display counts seconds instead of batches."""

    def __init__(self, batches: int, until: float) -> None:
        self.near, self.first = "no interval yet", time.perf_counter()
        self.seconds, self.limited = until - self.first, self.first < until < inf
        total, unit = (self.seconds, "s at most") if self.limited else (batches, "batches")
        super().__init__("bench: timing", total, unit)

    @property
    def left(self) -> float | None:
        return super().left if time.perf_counter() - self.first <= self.seconds else None

    def known(self, _: int, within: float) -> None:
        """Store the width of the interval for the next line. within: the larger distance of an end of the interval from
        the speed-up, as a share of the speed-up; inf if there is no interval yet."""
        if within < inf:
            self.near = f"interval within {100 * within:.0f} % of the speed-up"

    def turned(self, done: int) -> None:
        """Show that `done` batches were timed so far."""
        spent, note = time.perf_counter() - self.first, self.near
        if spent > self.seconds:
            note += "; the time is over, but an interval needs more batches"
        if self.limited:
            self.to(min(spent, self.seconds), f"{done} batches, {note}")
        else:
            self.to(done, note)


def parity(plan: Plan, k: int, until: float = inf, noise: float = 0.0) -> dict[str, Any] | None:
    """Compare the predicted and the measured number of target calls on at least `parity_tokens` tokens, and return the
    figures by name. If the time is over, fewer tokens are used, but at least FEW texts.

    The prompts are final ones that were not timed, and the random numbers are new. k: the draft length. until: the
    deadline, a value of time.perf_counter(). noise: the numerical noise of differences between the target's logits.
    Returns None for the coupled rule, because its calls cannot be predicted from the text.
    """
    size = plan.bench
    count = -(-size.parity_tokens // size.new_tokens)
    if time.perf_counter() > until:
        count = min(count, FEW)
    if plan.tree:
        until = time.perf_counter() + (until - time.perf_counter()) / FORCED
    arms = plan.arms({"speculative": plan.engine(k, BATCH)})
    parts: list[Emitted] = []
    with Display("bench: parity", count, "texts") as display:
        for done in range(0, count, BATCH):
            prompts = plan.final(size.prompts + done, min(BATCH, count - done))
            parts.append(interleave(arms, prompts, BATCH, size.seed + 1 + done, warmup=0).texts("speculative"))
            display.to(done + len(prompts))
            if time.perf_counter() > until:
                break
    texts = together(parts)
    with working("bench: predicted calls of these texts"):
        calls = check_calls(text_figures(plan, texts, k, noise), texts, plan.rule)
    if calls is None:
        return None
    measured = calls.tokens / calls.measured
    return asdict(calls) | {
        "tau_measured": measured,
        "tau_predicted": calls.tau,
        "z": calls.z,
        "relative": calls.tau / measured - 1,
        "passed": calls.passed,
        "line": calls.line(),
    }


def measure_greedy(plan: Plan, k: int, late: bool = False) -> dict[str, Any]:
    """Time greedy decoding (temperature 0), at which small models repeat themselves. Return the number of prompts, and
    for the draft ("speculative") and n-gram look-up ("ngram") the speed-up over plain decoding and tau. k: the draft
    length. late: whether the time is over; then only two prompts are used."""
    size = plan.bench
    engines = {"speculative": plan.engine(k), "ngram": plan.engine(k, proposer=NGram()), "plain": plan.plain()}
    arms = plan.arms(engines, Sampling(temperature=0))
    prompts = plan.final(0, 2 if late else max(size.prompts // 2, 2))
    timing = interleave(arms, prompts, size.rows, size.seed)
    report: dict[str, Any] = {"prompts": len(prompts)}
    for arm in ("speculative", "ngram"):
        stats = timing.stats(arm)
        report[arm] = {"speedup": timing.ratio(arm, "plain")._asdict(), "tau": stats.tau if stats else None}
    return report


# --- for the page


def recorded(plan: Plan, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Decode a few final prompts, and return the record of their rounds, from which the page replays the generation.
    extra: the entry `extra` of the report, which has the draft length or the tree."""
    tree = served_tree(extra)
    engine = replace(plan, tree=tree).engine(tree.depth if tree else extra["planned_k"], REPLAY_ROWS)
    engine.record = Recorder()
    tokens = min(REPLAY_TOKENS, plan.bench.new_tokens)
    engine.generate(plan.final(0, REPLAY_ROWS), max_new_tokens=tokens, sampling=plan.sampling, seed=plan.bench.seed)
    return engine.record.replay(plan.tokenizer)
