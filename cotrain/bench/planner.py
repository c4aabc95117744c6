"""Which parts run compiled, what rounds then cost, and the draft length that this and the acceptance call for."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from inference.exactness.side_by_side import Figures, pair_figures, reach_of
from inference.measure.costs import Costs, best_k, joined, measure_costs, spans_of
from inference.measure.real_costs import RealRound, calibrated, measure_rounds
from inference.measure.timing import Emitted, Interval, engine_arm, interleave
from inference.verify import prediction

if TYPE_CHECKING:
    from cotrain.bench.measurement import Plan
    from cotrain.bench.tree_planner import Grown

BATCH = 32  # rows where only counts matter, not clocks
ALWAYS = (0, 1)  # draft lengths that are considered whatever bench.depths names
SHAPE = 5  # repeats of each part alone: its level comes from real rounds
TRIES = 3  # at a length that was chosen before it was run


class Compiled(NamedTuple):
    """What runs compiled: plain decoding's target, the target of rounds, the draft."""

    plain: bool = False
    target: bool = False
    draft: bool = False


@dataclass(frozen=True)
class Measured:
    """Costs at the level of real rounds, those of each part alone and warm, and the real rounds by draft length."""

    costs: Costs
    alone: Costs
    rounds: dict[int, RealRound]

    def at(self, rounds: dict[int, RealRound]) -> "Measured":
        """With more rounds that were run."""
        together = self.rounds | rounds
        return Measured(calibrated(self.alone, together), self.alone, together)


@dataclass(frozen=True)
class Length:
    """k: the draft length that pays best, 0 where plain decoding does; drafting: the best of at least 1, which is what
    is measured and exported; speedups[k]: predicted, over plain decoding, k = 0..K."""

    k: int
    drafting: int
    speedups: tuple[float, ...]


def settled(plan: "Plan", until: float = inf) -> tuple["Plan", Measured]:
    """Each part compiled where real rounds are faster with it (with bench.compile, or on a GPU), and what rounds cost.
    until: when time is over, on the clock; nothing is compiled where that would leave no time to measure it."""
    plan, began = replace(plan, compiled=Compiled()), time.perf_counter()
    eager, now = measured(plan, until), time.perf_counter()
    if not plan.bench.compile and plan.target.device.type != "cuda":
        return plan, eager
    if now + (now - began) > until:  # compiled, all of this is measured again
        print("bench: nothing is compiled, for want of time: more bench.minutes= would try it")
        return plan, eager
    both = eager, measured(replace(plan, compiled=Compiled(True, True, True)), until)
    k = sorted(plan.depths)[len(plan.depths) // 2]
    parts: tuple[Callable[[Costs], float], ...] = (
        lambda costs: costs.target[0], lambda costs: costs.target[k], lambda costs: costs.drafting(k),
    )  # fmt: skip
    faster = Compiled(*(part(both[1].costs) < part(both[0].costs) for part in parts))
    plan = replace(plan, compiled=faster)
    if len(set(faster)) == 1:
        return plan, both[faster.plain]
    mixed = Measured(both[0].costs, joined(*(both[on].alone for on in faster)), {})  # another engine than either
    return plan, mixed.at(rounds_of(plan, (0, *spans_of(plan.proposer())), until))


def measured(plan: "Plan", until: float = inf) -> Measured:
    """The table of parts, at the level of real rounds of the plan's engines."""
    table = costs_of(plan)
    return Measured(table, table, {}).at(rounds_of(plan, (0, *spans_of(plan.proposer())), until))


def rounds_of(plan: "Plan", lengths: tuple[int, ...], until: float = inf) -> dict[int, RealRound]:
    """Real rounds at these draft lengths, 0 by the plain engine, on prompts that rank."""
    size = plan.bench
    drafting = plan.engine(max(1, *lengths)) if any(lengths) else None
    engines = {k: plan.plain() if not k or drafting is None else drafting for k in lengths}
    prompts = plan.ranking(0, max(size.quick_prompts, size.rows))
    return measure_rounds(
        engines, prompts, sampling=plan.sampling, max_new_tokens=size.new_tokens, seed=size.seed, until=until
    )


def costs_of(plan: "Plan", most: int | None = None) -> Costs:
    """Costs of each part alone, in the middle of a text of the bench's length; most: drafts of a round, by default the
    longest of the plan's depths."""
    size, prompts = plan.bench, plan.prompts.ranking
    context = sum(map(len, prompts)) // len(prompts) + size.new_tokens // 2
    target = plan.engine(1).target  # as rounds run it: other slots would be another graph
    K = most or max(plan.depths)
    return measure_costs(target, plan.proposer(), K, context=context, sampling=plan.sampling, repeats=SHAPE)


def planned(plan: "Plan", found: Measured, tau: Callable[[int], float], until: float = inf) -> tuple[Length, Measured]:
    """The draft length that pays best among 0, 1 and bench.depths. One that real rounds were not run at is run, and the
    choice made again with what it then costs."""
    for _ in range(TRIES):
        length = choose(found.costs, tau, plan.depths)
        if length.drafting in found.rounds:
            break
        found = found.at(rounds_of(plan, (length.drafting,), until))
    return choose(found.costs, tau, plan.depths), found


def choose(costs: Costs, tau: Callable[[int], float], depths: Any) -> Length:
    """The lengths of least seconds a token, see `measure.costs.best_k`; drafting nothing is considered too."""
    speedups = best_k(costs, tau).speedups
    allowed = sorted({*ALWAYS, *depths})
    best, drafting = (max(lengths, key=speedups.__getitem__) for lengths in (allowed, allowed[1:]))
    return Length(best, drafting, speedups)


def advice(length: Length, measured: Interval, tree: "Grown | None" = None) -> str | None:
    """What to say, in words, where drafting does not make decoding faster here; None where it does. measured: the
    speed-up over plain decoding at length.drafting, or with the tree that is served in its place."""
    found = f"{measured.value:.2f}x " + (f"with {tree.words()}" if tree else f"at k = {length.drafting}")
    predicted = tree.speedup if tree else length.speedups[length.drafting]
    if measured.faster is False:
        return (f"plain decoding is faster here: {found}, {predicted:.2f}x predicted, and no "
                "draft length does better; serve without this draft, or train a smaller or better one")  # fmt: skip
    if measured.faster is None:
        better = ", or train a smaller or better draft" if predicted <= 1 else ""
        return (f"no speed-up is shown: {found}, {predicted:.2f}x predicted, and its interval holds 1; time more "
                f"prompts (bench.minutes=){better}")  # fmt: skip
    return None


def tau_of(figures: Figures, verify: str, k: int) -> float:
    """Predicted tokens per target call at draft length k; by the token rule's acceptance where a rule's own hangs on
    the noise that made the text."""
    reach = reach_of(figures, verify, k)
    reach = reach_of(figures, "token", k) if reach is None else reach
    assert reach is not None
    return float(prediction.tau_from(reach, figures.lengths))


def plain_texts(plan: "Plan") -> Emitted:
    """Texts decoded plainly that are not timed: what is predicted, is predicted from them."""
    size = plan.bench
    prompts = plan.ranking(size.quick_prompts, BATCH)
    arm = engine_arm("plain", plan.plain(BATCH), plan.sampling, size.new_tokens)
    return interleave([arm], prompts, BATCH, size.seed, warmup=0).texts("plain")


def counted(plan: "Plan", texts: Emitted, k: int, noise: float = 0.0) -> Figures:
    """What target and draft say of texts, at draft length k: no clock is looked at, many rows go together. noise: of
    score gaps, as a verdict found it."""
    engine, proposer = plan.engine(k, BATCH), plan.proposer(counted=True)
    return pair_figures(engine, proposer, texts, plan.sampling, plan.bench.new_tokens, noise)


def taus(plan: "Plan", texts: Emitted | None = None) -> dict[int, float]:
    """Predicted tau by draft length. texts: decoded plainly, by default here."""
    longest = max(plan.depths)
    figures = counted(plan, texts or plain_texts(plan), longest)
    return {k: tau_of(figures, plan.verify, k) for k in range(1, longest + 1)}
