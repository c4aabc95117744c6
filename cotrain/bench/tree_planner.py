"""Whether a tree of drafts is faster than the best chain, and which: expected calls on ranking texts, measured costs.

Every candidate is rated by its expected calls, see `tree_prediction`, and by costs fitted to rounds with a few trees
that were run; the best ones are then run themselves, as a chain is, and compared with the chain by what their own
rounds took.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from cotrain.bench.planner import BATCH, Length, costs_of
from inference import Engine
from inference.drafts.planned_tree import PlannedTree
from inference.loading import takes_shape
from inference.measure.real_costs import RealRound, measure_drafting
from inference.measure.shapes import Seconds, tokens_of
from inference.measure.timing import Emitted
from inference.measure.tree_costs import fitted, probes
from inference.measure.tree_distributions import distributions_of_rounds
from inference.measure.tree_plan import Distributions, Search, distributions_of, reach_under
from inference.models.lm import LM
from inference.proposers.topology import chain
from inference.verify.prediction import calls_from

if TYPE_CHECKING:
    from cotrain.bench.measurement import Plan

# of trees, what a chain's rule becomes: a tree has its own; coupled and match are asked for by name
RULES = {"token": "tree", "block": "traversal", "tree": "tree", "traversal": "traversal"}
CHILDREN = 4  # of a node, at most
ENTRIES = 2**27  # of a distribution's table of the texts that shapes are rated on: of large vocabularies, fewer texts
RUN = 2  # candidates that are run


@dataclass(frozen=True)
class Grown:
    """A tree that was run in turn with plain decoding and the best chain. tau: tokens per target call, expected on
    the ranking texts; round: what it took; speedup, chain: predicted from such rounds, over plain decoding, of the tree
    and of the best chain."""

    tree: PlannedTree
    tau: float
    round: RealRound
    speedup: float
    chain: float

    def words(self) -> str:
        """What is drafted, in words."""
        tree, kind = self.tree, "likeliest" if self.tree.likeliest else "sampled"
        return f"a tree of {len(tree.parents)} nodes in {tree.depth} levels, {kind} children, {tree.rule}"


def best_tree(
    plan: "Plan", length: Length, chains: Mapping[int, float], texts: Emitted, until: float = inf
) -> Grown | None:
    """The tree of at most bench.trees nodes that is fastest by rounds of its own, or the plan's own tree; None where
    there is none, as for kinds that draft no trees. length: of the best chain; chains: tau by draft length; texts:
    decoded plainly, which these are of. Rules that a tree's own may replace: `RULES`."""
    given, plan = plan.tree, replace(plan, tree=None)
    if plan.verify not in RULES or not plan.bench.trees and given is None:
        return None
    if given is not None and _certain(plan):
        given = replace(given, likeliest=True)
    distributions = plain_distributions(plan, texts, given.depth if given else 0)
    if distributions is None:
        print(f"bench: {plan.kind} drafts are planned as chains: they draft no trees")
        return None
    found = candidates(plan, distributions, tree_seconds(plan, until))[:RUN] if plan.bench.trees else []
    found += [given] if given is not None and given not in found else []
    if not found:
        return None
    k = length.drafting
    rounds = run(plan, [0, k, *found], until)
    plain, taus = rounds[0].seconds, {tree: tau_of(distributions, tree) for tree in found}
    whole = len(distributions.lengths) == len(texts.tokens)  # else of the texts that trees are rated on
    tau = (
        chains[k]
        if whole
        else tau_of(distributions, PlannedTree(chain(k), RULES[plan.verify], plan.objective == "greedy"))
    )
    chained = plain * tau / rounds[k].seconds
    speeds = {tree: plain * taus[tree] / rounds[tree].seconds for tree in found}
    tree = max(found, key=speeds.__getitem__)
    return Grown(tree, taus[tree], rounds[tree], speeds[tree], chained)


def plain_distributions(plan: "Plan", texts: Emitted, levels: int = 0) -> Distributions | None:
    """Of both models at the texts, as many as `ENTRIES` hold; None for drafts that cannot branch. Of those that are no
    language model, by depth, from forced rounds of chains: of bench.depths, and of at least so many levels."""
    if not takes_shape(plan.student(plan.running).proposer):
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


def tree_seconds(plan: "Plan", until: float) -> Seconds:
    """Costs of rounds that draft trees of up to bench.trees nodes, at the level of some that are run."""
    most, likeliest = plan.bench.trees, plan.objective == "greedy"
    trees = [PlannedTree(parents, "tree", likeliest) for parents in probes(most, max(plan.depths))]
    ran = run(plan, trees, until)
    return fitted(costs_of(plan, most), {tuple(tree.parents): ran[tree] for tree in trees})


def run(plan: "Plan", drafted: Sequence[PlannedTree | int], until: float) -> dict[PlannedTree | int, RealRound]:
    """Rounds, in turn, of the engines that would serve these trees and chains, 0 being plain decoding, on prompts that
    rank."""
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


def candidates(plan: "Plan", distributions: Distributions, seconds: Seconds) -> list[PlannedTree]:
    """The best tree under each rule and with each sort of children, in the order of seconds a token. A draft that was
    made for greedy drafting drafts its likeliest tokens; at temperature 0 all children are."""
    most, sorts = plan.bench.trees, (True,) if _certain(plan) else (False, True)
    search = Search(distributions, most, min(CHILDREN, most, distributions.p.shape[-1]), {1, *plan.depths}, sorts=sorts)
    found = search.ranked(seconds, branching=True)
    return [PlannedTree(one.shape.parents, one.rule, one.likeliest) for one in found]


def _certain(plan: "Plan") -> bool:
    """Whether all children are the likeliest tokens, whatever was planned."""
    return plan.objective == "greedy" or plan.sampling.temperature == 0


def tau_of(distributions: Distributions, tree: PlannedTree) -> float:
    """Tokens per target call expected on the texts, see `reach_under`."""
    reach = reach_under(distributions, tuple(tree.parents), tree.rule, tree.likeliest)
    return tokens_of(distributions.p, distributions.lengths) / float(calls_from(reach, distributions.lengths).sum())


def decided(length: Length, grown: Grown | None) -> tuple[Grown | None, str]:
    """The tree where it is expected to be faster than the best chain, and that in words; None for the chain."""
    k = length.drafting
    if grown is None:
        return None, f"draft length {k}"
    if grown.speedup > grown.chain:
        return grown, f"{grown.words()}: it would give {grown.speedup:.2f}x, the chain of {k} {grown.chain:.2f}x"
    return None, f"draft length {k}: trees would give {grown.speedup:.2f}x, the chain {grown.chain:.2f}x"


def told(length: Length, found: Grown | None, served: Grown | None, rule: str) -> dict[str, Any]:
    """What a report says of the plan: the chain's length, and what is drafted in its place. found: the best tree, which
    may not be served; rule: of chains."""
    tree = served.tree if served else None
    speedups = {"chain": found.chain, "tree": found.speedup} if found else None
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
    """What a report's `extra` says is drafted, None where that are chains."""
    if not extra.get("planned_shape"):
        return None
    return PlannedTree(extra["planned_shape"], extra["planned_rule"], extra["planned_likeliest"])
