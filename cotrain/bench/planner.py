"""What is drafted, from measured costs and expected acceptance: compiled parts, draft length, chain or tree.

Trees are rated by their expected calls (`inference.measure.tree_plan`) and by costs fitted to rounds with a few trees
that were run. The best ones are then run themselves, and compared with the best chain by what their own rounds took.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from cotrain.bench.plan import CompiledParts, Plan
from inference import Engine
from inference.drafts.draft_folder import PlannedTree
from inference.exactness.figures import Figures, reach_of
from inference.exactness.side_by_side import pair_figures
from inference.measure.costs import (
    Costs,
    RealRound,
    best_k,
    calibrated,
    joined,
    measure_costs,
    measure_drafting,
    measure_rounds,
    spans_of,
)
from inference.measure.timing import Interval, engine_arm, interleave
from inference.measure.tree_plan import Distributions, Search, distributions_of, distributions_of_rounds, reach_under
from inference.measure.tree_shapes import Seconds, fitted, probes, tokens_of
from inference.models.lm import LM
from inference.output import Emitted
from inference.proposers import kind_of
from inference.verify import predict_chain
from inference.verify.tree import chain

BATCH = 32  # rows of decoding that counts tokens and reads no clock
ALWAYS = (0, 1)  # draft lengths that are considered whatever bench.depths names
SHAPE = 5  # repeats of each part alone: its level comes from real rounds
TRIES = 3  # at a length that was chosen before it was run

# a chain's rule -> the rule of trees that may replace it; coupled and match are used only when named
RULES = {"token": "tree", "block": "traversal", "tree": "tree", "traversal": "traversal"}
CHILDREN = 4  # of a node, at most
ENTRIES = 2**27  # entries of the distributions that rate trees: the larger the vocabulary, the fewer texts
CANDIDATES = 2  # trees that are run


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs at the level of real rounds, those of each part alone and warm, and the real rounds by draft length."""

    costs: Costs
    alone: Costs
    rounds: dict[int, RealRound]

    def at(self, rounds: dict[int, RealRound]) -> "MeasuredCosts":
        """The costs with more rounds."""
        together = self.rounds | rounds
        return MeasuredCosts(calibrated(self.alone, together), self.alone, together)


@dataclass(frozen=True)
class DraftLength:
    """k: the draft length that pays best, 0 if plain decoding does; drafting: the best of at least 1, which is measured
    and exported; speedups[k]: predicted, over plain decoding, k = 0..K."""

    k: int
    drafting: int
    speedups: tuple[float, ...]


@dataclass(frozen=True)
class MeasuredTree:
    """A tree that was run in turn with plain decoding and the best chain. tau: tokens per target call, expected on
    the ranking texts; round: its phases' times; speedup, chain: of the tree and of the best chain over plain decoding,
    predicted from such rounds."""

    tree: PlannedTree
    tau: float
    round: RealRound
    speedup: float
    chain: float

    def words(self) -> str:
        """What is drafted, in words."""
        tree, kind = self.tree, "likeliest" if self.tree.likeliest else "sampled"
        return f"a tree of {len(tree.parents)} nodes in {tree.depth} levels, {kind} children, {tree.rule}"


# --- costs


def choose_compiled(plan: Plan, until: float = inf) -> tuple[Plan, MeasuredCosts]:
    """Compile each part if real rounds are faster with it (tried with bench.compile, or on a GPU); the plan with these
    parts, and its costs. until: the deadline on the clock; nothing is compiled without time to measure it."""
    plan, began = replace(plan, compiled=CompiledParts()), time.perf_counter()
    eager, now = measured(plan, until), time.perf_counter()
    if not plan.bench.compile and plan.target.device.type != "cuda":
        return plan, eager
    if now + (now - began) > until:  # the same measurement again, compiled
        print("bench: nothing is compiled, for want of time: more bench.minutes= would try it")
        return plan, eager
    both = eager, measured(replace(plan, compiled=CompiledParts(True, True, True)), until)
    k = sorted(plan.depths)[len(plan.depths) // 2]
    parts: tuple[Callable[[Costs], float], ...] = (
        lambda costs: costs.target[0], lambda costs: costs.target[k], lambda costs: costs.drafting(k),
    )  # fmt: skip
    faster = CompiledParts(*(part(both[1].costs) < part(both[0].costs) for part in parts))
    plan = replace(plan, compiled=faster)
    if len(set(faster)) == 1:
        return plan, both[faster.plain]
    mixed = MeasuredCosts(both[0].costs, joined(*(both[on].alone for on in faster)), {})  # another engine than either
    return plan, mixed.at(rounds_of(plan, (0, *spans_of(plan.proposer())), until))


def measured(plan: Plan, until: float = inf) -> MeasuredCosts:
    """Costs of the parts, at the level of real rounds of the plan's engines."""
    table = costs_of(plan)
    return MeasuredCosts(table, table, {}).at(rounds_of(plan, (0, *spans_of(plan.proposer())), until))


def costs_of(plan: Plan, most: int | None = None) -> Costs:
    """Costs of each part alone, in the middle of a text of the bench's length; most: drafts of a round, by default the
    longest of the plan's depths."""
    size, prompts = plan.bench, plan.prompts.ranking
    context = sum(map(len, prompts)) // len(prompts) + size.new_tokens // 2
    target = plan.engine(1).target  # as rounds run it: other slots would be another graph
    K = most or max(plan.depths)
    return measure_costs(target, plan.proposer(), K, context=context, sampling=plan.sampling, repeats=SHAPE)


def rounds_of(plan: Plan, lengths: tuple[int, ...], until: float = inf) -> dict[int, RealRound]:
    """Real rounds on ranking prompts at these draft lengths; length 0 is the plain engine."""
    size = plan.bench
    drafting = plan.engine(max(1, *lengths)) if any(lengths) else None
    engines = {k: plan.plain() if not k or drafting is None else drafting for k in lengths}
    prompts = plan.ranking(0, max(size.quick_prompts, size.rows))
    return measure_rounds(
        engines, prompts, sampling=plan.sampling, max_new_tokens=size.new_tokens, seed=size.seed, until=until
    )


# --- acceptance


def plain_texts(plan: Plan, count: int = BATCH) -> Emitted:
    """Texts decoded plainly from ranking prompts; predictions are made on them, and they are never timed."""
    size = plan.bench
    prompts = plan.ranking(size.quick_prompts, count)
    arm = engine_arm("plain", plan.plain(BATCH), plan.sampling, size.new_tokens)
    return interleave([arm], prompts, BATCH, size.seed, warmup=0).texts("plain")


def text_figures(plan: Plan, texts: Emitted, k: int, noise: float = 0.0) -> Figures:
    """Probabilities of both models on texts, at draft length k, in large batches. noise: of score gaps, from a
    verdict."""
    engine, proposer = plan.engine(k, BATCH), plan.proposer(counted=True)
    return pair_figures(engine, proposer, texts, plan.sampling, plan.bench.new_tokens, noise)


def tau_of(figures: Figures, verify: str, k: int) -> float:
    """Predicted tokens per target call at draft length k; by the token rule's acceptance for a rule whose own depends
    on the noise that made the text."""
    reach = reach_of(figures, verify, k)
    reach = reach_of(figures, "token", k) if reach is None else reach
    assert reach is not None
    return float(predict_chain.tau_from(reach, figures.lengths))


def taus(plan: Plan, texts: Emitted | None = None) -> dict[int, float]:
    """Predicted tau by draft length, on `texts` or on new `plain_texts`."""
    longest = max(plan.depths)
    figures = text_figures(plan, texts or plain_texts(plan), longest)
    return {k: tau_of(figures, plan.verify, k) for k in range(1, longest + 1)}


# --- the draft length of a chain


def plan_length(
    plan: Plan, costs: MeasuredCosts, tau: Callable[[int], float], until: float = inf
) -> tuple[DraftLength, MeasuredCosts]:
    """The draft length that pays best among 0, 1 and bench.depths. A chosen length without real rounds is run, and the
    choice made again with its costs."""
    for _ in range(TRIES):
        length = choose(costs.costs, tau, plan.depths)
        if length.drafting in costs.rounds:
            break
        costs = costs.at(rounds_of(plan, (length.drafting,), until))
    return choose(costs.costs, tau, plan.depths), costs


def choose(costs: Costs, tau: Callable[[int], float], depths: Any) -> DraftLength:
    """The lengths of least seconds a token (`measure.costs.best_k`); drafting nothing is considered too."""
    speedups = best_k(costs, tau).speedups
    allowed = sorted({*ALWAYS, *depths})
    best, drafting = (max(lengths, key=speedups.__getitem__) for lengths in (allowed, allowed[1:]))
    return DraftLength(best, drafting, speedups)


# --- trees


def best_tree(
    plan: Plan, length: DraftLength, chains: Mapping[int, float], texts: Emitted, until: float = inf
) -> MeasuredTree | None:
    """The tree of at most bench.trees nodes that is fastest by rounds of its own, or the plan's own tree; None if there
    is none, as for kinds that draft no trees or rules that no tree may replace (`RULES`). length: of the best chain;
    chains: tau by draft length; texts: decoded plainly, on which both are rated."""
    given, plan = plan.tree, replace(plan, tree=None)
    if plan.verify not in RULES or not plan.bench.trees and given is None:
        return None
    if given is not None and _likeliest_only(plan):
        given = replace(given, likeliest=True)
    distributions = plain_distributions(plan, texts, given.depth if given else 0)
    if distributions is None:
        print(f"bench: {plan.kind} drafts are planned as chains: they draft no trees")
        return None
    trees = candidates(plan, distributions, tree_seconds(plan, until))[:CANDIDATES] if plan.bench.trees else []
    trees += [given] if given is not None and given not in trees else []
    if not trees:
        return None
    k = length.drafting
    rounds = rounds_in_turn(plan, [0, k, *trees], until)
    plain, expected = rounds[0].seconds, {tree: tree_tau(distributions, tree) for tree in trees}
    all_texts = len(distributions.lengths) == len(texts.tokens)  # else trees were rated on fewer texts than chains
    tau = (
        chains[k]
        if all_texts
        else tree_tau(distributions, PlannedTree(chain(k), RULES[plan.verify], plan.objective == "greedy"))
    )
    chained = plain * tau / rounds[k].seconds
    speeds = {tree: plain * expected[tree] / rounds[tree].seconds for tree in trees}
    best = max(trees, key=speeds.__getitem__)
    return MeasuredTree(best, expected[best], rounds[best], speeds[best], chained)


def plain_distributions(plan: Plan, texts: Emitted, levels: int = 0) -> Distributions | None:
    """Distributions of both models at the texts, as many as `ENTRIES` holds; None for drafts that cannot branch. Drafts
    that are no language model have one a depth, from forced rounds of chains: as deep as bench.depths, and at least
    `levels`."""
    if not kind_of(plan.kind).drafts_trees:
        return None
    vocabulary, new = plan.plain(1).target.vocabulary, plan.bench.new_tokens
    chains = replace(plan, tree=None).proposer(counted=True)
    by_depth = chains.language_model(1, vocabulary) is None
    depths = max(*plan.depths, levels) if by_depth else 1
    size = max(1, ENTRIES // (vocabulary * new * depths))
    some = Emitted(texts.prompts[:size], texts.ids[:size], texts.tokens[:size], texts.counts[:size])
    rows = min(BATCH, len(some.tokens))
    draft = chains.language_model(rows, vocabulary)
    if draft is None:
        return distributions_of_rounds(plan.engine(depths, rows, chains), chains, depths, some, plan.sampling, new)
    return distributions_of(LM(plan.target, rows, vocabulary), draft, some, plan.sampling)


def tree_seconds(plan: Plan, until: float) -> Seconds:
    """Costs of rounds that draft trees of up to bench.trees nodes, at the level of a few trees that are run."""
    most, likeliest = plan.bench.trees, plan.objective == "greedy"
    trees = [PlannedTree(parents, "tree", likeliest) for parents in probes(most, max(plan.depths))]
    rounds = rounds_in_turn(plan, trees, until)
    return fitted(costs_of(plan, most), {tuple(tree.parents): rounds[tree] for tree in trees})


def rounds_in_turn(
    plan: Plan, drafted: Sequence[PlannedTree | int], until: float
) -> dict[PlannedTree | int, RealRound]:
    """Rounds on ranking prompts of the engines that would serve these trees and chains, in turn; 0 is plain
    decoding."""
    size, engines = plan.bench, dict[PlannedTree | int, tuple[Engine, int]]()
    for one in drafted:
        if isinstance(one, PlannedTree):
            engines[one] = replace(plan, tree=one).engine(one.depth), one.depth
        else:
            engines[one] = plan.engine(one) if one else plan.plain(), one
    prompts = plan.ranking(0, max(size.quick_prompts, size.rows))
    return measure_drafting(
        engines, prompts, sampling=plan.sampling, max_new_tokens=size.new_tokens, seed=size.seed, until=until
    )


def candidates(plan: Plan, distributions: Distributions, seconds: Seconds) -> list[PlannedTree]:
    """The best tree under each rule and with each sort of children, in the order of seconds a token. A draft trained
    for greedy drafting drafts its likeliest tokens; at temperature 0 all children are."""
    most, sorts = plan.bench.trees, (True,) if _likeliest_only(plan) else (False, True)
    search = Search(distributions, most, min(CHILDREN, most, distributions.p.shape[-1]), {1, *plan.depths}, sorts=sorts)
    ranked = search.ranked(seconds, branching=True)
    return [PlannedTree(one.shape.parents, one.rule, one.likeliest) for one in ranked]


def _likeliest_only(plan: Plan) -> bool:
    """Whether all children are the likeliest tokens, whatever was planned."""
    return plan.objective == "greedy" or plan.sampling.temperature == 0


def tree_tau(distributions: Distributions, tree: PlannedTree) -> float:
    """Tokens per target call expected on the texts, see `reach_under`."""
    reach = reach_under(distributions, tuple(tree.parents), tree.rule, tree.likeliest)
    calls = predict_chain.calls_from(reach, distributions.lengths).sum()
    return tokens_of(distributions.p, distributions.lengths) / float(calls)


# --- the choice, in words and for the report


def chain_or_tree(length: DraftLength, tree: MeasuredTree | None) -> tuple[MeasuredTree | None, str]:
    """The tree if it is expected to be faster than the best chain, else None; and the choice in words."""
    k = length.drafting
    if tree is None:
        return None, f"draft length {k}"
    if tree.speedup > tree.chain:
        return tree, f"{tree.words()}: it would give {tree.speedup:.2f}x, the chain of {k} {tree.chain:.2f}x"
    return None, f"draft length {k}: trees would give {tree.speedup:.2f}x, the chain {tree.chain:.2f}x"


def plan_entries(
    length: DraftLength, best: MeasuredTree | None, served: MeasuredTree | None, rule: str
) -> dict[str, Any]:
    """A report's entries about the plan: the chain's length, and the tree that is drafted in its place. best: the best
    tree, which may not be served; rule: of chains."""
    tree = served.tree if served else None
    speedups = {"chain": best.chain, "tree": best.speedup} if best else None
    return {
        "planned_k": length.drafting,
        "planned_shape": list(tree.parents) if tree else None,
        "planned_rule": tree.rule if tree else rule,
        "planned_likeliest": tree.likeliest if tree else None,
        "planned_speedups": speedups,
        "plain_is_faster": (served.speedup <= 1) if served else length.k == 0,
        "predicted_speedups": list(length.speedups),
    }


def served_tree(extra: Mapping[str, Any]) -> PlannedTree | None:
    """The tree that a report's `extra` names as drafted, None for chains."""
    if not extra.get("planned_shape"):
        return None
    return PlannedTree(extra["planned_shape"], extra["planned_rule"], extra["planned_likeliest"])


def advice(length: DraftLength, speedup: Interval, tree: MeasuredTree | None = None) -> str | None:
    """A sentence for the user if drafting does not make decoding faster here, else None. speedup: measured over plain
    decoding at length.drafting, or with the tree that is served in its place."""
    drafted = f"{speedup.value:.2f}x " + (f"with {tree.words()}" if tree else f"at k = {length.drafting}")
    predicted = tree.speedup if tree else length.speedups[length.drafting]
    if speedup.faster is False:
        return (f"plain decoding is faster here: {drafted}, {predicted:.2f}x predicted, and no "
                "draft length does better; serve without this draft, or train a smaller or better one")  # fmt: skip
    if speedup.faster is None:
        better = ", or train a smaller or better draft" if predicted <= 1 else ""
        return (f"no speed-up is shown: {drafted}, {predicted:.2f}x predicted, and its interval holds 1; time more "
                f"prompts (bench.minutes=){better}")  # fmt: skip
    return None
