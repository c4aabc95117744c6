"""The best tree of a draft beside its recommended chain (`bench.trees=`), on the same texts."""

from dataclasses import dataclass

from cotrain.bench.forecast import Forecast, error_of_sum
from cotrain.bench.plan import Plan
from cotrain.bench.planner import CANDIDATES, candidates, rounds_in_turn, tree_seconds
from inference.drafts.draft_folder import PlannedTree
from inference.measure.tree_plan import Distributions, Search, reach_under
from inference.verify import predict_chain


@dataclass(frozen=True)
class TreeForecast:
    """The forecast of a tree in full batches. tau: expected tokens per target call. seconds: of a round, all rows
    together. speedup: over plain decoding. gain: over the recommended chain, or over plain decoding if that is
    recommended, as a share of its speed; error: the standard error of the gain that the texts leave."""

    tree: PlannedTree
    tau: float
    seconds: float
    speedup: float
    gain: float
    error: float

    @property
    def recommended(self) -> bool:
        """Return whether the texts can tell that the tree is faster. Otherwise the chain, which is simpler, is
        recommended."""
        return self.gain > self.error


def tree_forecast(plan: Plan, chain: Forecast, distributions: Distributions, search: Search) -> TreeForecast | None:
    """Return the forecast of the fastest tree of at most bench.trees nodes. Return None if there is no tree that
    branches. chain: the forecast of chains at the plan's temperature and rows. distributions: on the first of its
    texts. search: of trees, on the same distributions.

    The rounds of the best trees are timed in turn with plain decoding and the chain."""
    trees = candidates(search, tree_seconds(plan))[:CANDIDATES]
    if not trees:
        return None
    rounds = rounds_in_turn(plan, list(dict.fromkeys([0, chain.k, *trees])))
    scale = chain.seconds[chain.k] / rounds[chain.k].seconds  # the chain's seconds come from other rounds
    rated = [_rated(tree, rounds[tree].seconds * scale, chain, distributions) for tree in trees]
    return max(rated, key=lambda one: one.speedup)


def _rated(tree: PlannedTree, seconds: float, chain: Forecast, distributions: Distributions) -> TreeForecast:
    count, lengths = len(distributions.lengths), distributions.lengths.double()
    reach = reach_under(distributions, tuple(tree.parents), tree.rule, tree.likeliest)
    calls = predict_chain.calls_from(reach, distributions.lengths)
    with_tree, with_chain = seconds * calls, chain.seconds[chain.k] * chain.calls.calls[chain.k, :count]
    total = float(with_tree.sum())
    faster = float(with_chain.sum()) / total
    return TreeForecast(
        tree, float(lengths.sum() / calls.sum()), seconds, chain.seconds[0] * float(lengths.sum()) / total, faster - 1,
        error_of_sum(with_chain - faster * with_tree) / total,
    )  # fmt: skip
