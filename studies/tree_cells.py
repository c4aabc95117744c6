"""What each shape is worth, exactly, on texts that nothing was fitted on: the plan beside the best that brute force
finds, Sequoia's tree, chains, and trees of as many nodes as may be drafted.

B texts; a choice is a shape, its rule and whether its children are the likeliest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor

from inference.measure.costs import Costs
from inference.measure.tree_plan import Distributions, Search, table_of
from inference.measure.tree_shapes import Parents, Seconds, calls_of, every
from inference.verify.predict_tree import of_rounds
from inference.verify.tree import chain, depths_of, from_paths, full, paths_of

MOST, CHILDREN, LONGEST = 16, 4, 8  # nodes, children of one, drafts of the chains that trees are compared with
LEVELS = (1, 2, 3, 4, 5, 6, 8, 10, 12)  # of grown trees; drafts that read their own states are rated to LONGEST
FULL = [
    full(widths)
    for widths in (
        (2, 2),
        (2, 2, 2),
        (3, 2),
        (3, 3),
        (4, 2),
        (4, 3),
        (4, 2, 1),
        (4, 1, 1),
        (3, 2, 1),
        (2, 1, 1, 1),
        (2, 2, 1, 1),
        (3, 1, 1, 1, 1),
    )
]
Choice = tuple[Parents, str, bool]


def flat(costs: Costs) -> Costs:
    """The shape of a GPU's table: a pass over up to 17 ids costs what one over one does, a draft step the share of it
    that it has here."""
    share = costs.draft / costs.target[0]
    return replace(costs, target=(1.0,) * len(costs.target), draft=share, rest=(0.0,) * len(costs.rest), first=0.0)


def settings(temperature: float) -> list[tuple[str, bool]]:
    """Rules and sorts of children; of likeliest ones both rules accept the same."""
    return [("tree", True)] if temperature == 0 else [("tree", False), ("traversal", False), ("tree", True)]


def ratio(calls: Tensor, over: Tensor) -> tuple[float, float]:
    """tau of one over tau of the other on the same texts, calls (B,) each, and its standard error."""
    value = float(over.sum() / calls.sum())
    spread = (over - value * calls).square().sum() * len(calls) / max(1, len(calls) - 1)
    return value, float(spread.sqrt() / calls.sum())


def positional(accept: Tensor, lengths: Tensor) -> tuple[float, ...]:
    """Chance that a node's child number c is accepted, c = 0 .. C-1, without context: the mean over tokens, at the
    first level if accept has a depth axis."""
    first = of_rounds(accept, 0, lengths)
    return tuple((first.sum((0, 1)) / int(lengths.sum())).tolist())


def sequoia(chances: Sequence[float], nodes: int, depth: int) -> Parents:
    """The tree of at most `nodes` nodes and `depth` levels with the most accepted tokens if acceptance depended on the
    child's number alone (Chen et al. 2024, 2402.12374): F(n, d) = max over splits of n - 1 nodes among children of
    1 + sum_c chances[c] F(n_c, d - 1)."""

    @cache
    def subtree(n: int, d: int) -> tuple[float, tuple[tuple[int, ...], ...]]:
        """Value and paths of n nodes, their top one included, with at most d levels below it."""
        value, paths = shared(n - 1, 0, d)
        return 1 + value, paths

    @cache
    def shared(n: int, child: int, d: int) -> tuple[float, tuple[tuple[int, ...], ...]]:
        """Value and paths of n nodes among children number child, child + 1, ..."""
        if n == 0 or d == 0 or child == len(chances):
            return 0.0, ()
        best: tuple[float, tuple[tuple[int, ...], ...]] = (-1.0, ())
        for own in range(1, n + 1):
            (here, inside), (there, others) = subtree(own, d - 1), shared(n - own, child + 1, d)
            if chances[child] * here + there > best[0] + 1e-15:
                below = ((child,), *((child, *path) for path in inside))
                best = chances[child] * here + there, below + others
        return best

    return from_paths(shared(nodes, 0, depth)[1])


class Exact:
    """Expected calls of every shape on the held texts, and plans made on the fitted ones. by: calls (B,) by choice."""

    def __init__(self, fitted: Distributions, held: Distributions, temperature: float, most: int, small: int) -> None:
        self.held, self.temperature, self.most = held, temperature, most
        self.depth = held.q.shape[2] if held.q.ndim == 4 else LEVELS[-1]
        self.deepest = longest = self.depth if held.q.ndim == 4 else most
        levels = [level for level in LEVELS if level <= self.depth]
        sorts = sorted({likeliest for _, likeliest in settings(temperature)})
        self.fitted = Search(fitted, most, CHILDREN, levels, longest, sorts)
        self.sequoias = {sort: self._sequoias(sort) for sort in sorts}
        self.found = Search(held, most, CHILDREN, levels, longest, sorts, self._others(small), shrunk=0)
        self.by = {
            (shape, rule, sort): calls
            for (rule, sort), table in self.found.calls.items()
            for shape, calls in table.items()
        }

    def _others(self, small: int) -> list[Parents]:
        """What brute force looks at beside what a search on the held texts themselves does: all small shapes, full
        trees, Sequoia's, and what the search on the fitted texts found."""
        trees = [*FULL, *every(min(small, self.most), CHILDREN, self.depth)]
        trees += [tree for own in (self.sequoias, self.fitted.calls) for table in own.values() for tree in table]
        fit = [tree for tree in trees if len(tree) <= self.most and max(depths_of(tree), default=0) <= self.deepest]
        return list(dict.fromkeys(from_paths(paths_of(tree)) for tree in fit))

    def _sequoias(self, sort: bool) -> dict[Parents, float]:
        """Its trees of every size and depth, and the tokens that positional acceptance says a call gives."""
        chances = positional(self.fitted.accept[sort], self.fitted.distributions.lengths)
        trees = {sequoia(chances, n, depth) for n in range(1, self.most + 1) for depth in range(1, self.depth + 1)}
        return {tree: 1 + sum(math.prod(chances[rank] for rank in path) for path in paths_of(tree)) for tree in trees}

    @property
    def tokens(self) -> int:
        return int(self.held.lengths.sum())

    def calls(self, choice: Choice) -> Tensor:
        """Expected calls (B,) with a choice, made sure of where brute force has not looked at it."""
        shape, rule, likeliest = from_paths(paths_of(choice[0])), choice[1], choice[2]
        if (shape, rule, likeliest) not in self.by:
            rule = "tree" if likeliest else rule
            self.by[shape, rule, likeliest] = rate(self.held, [shape], rule, likeliest)[shape]
        return self.by[shape, rule, likeliest]

    def tau(self, choice: Choice) -> float:
        return self.tokens / float(self.calls(choice).sum())

    def best(self, seconds: Seconds, chains: bool = False) -> Choice:
        """The fastest choice of all, or of chains of up to `LONGEST`."""
        found = self.chains(LONGEST) if chains else list(self.by)
        return min(found, key=lambda choice: seconds(choice[0]) / self.tau(choice))

    def chains(self, longest: int) -> list[Choice]:
        """Of up to so many drafts, under each rule."""
        return [choice for choice in self.by if choice[0] == chain(len(choice[0])) and len(choice[0]) <= longest]

    def sequoia(self, seconds: Seconds) -> Choice:
        """Its tree of the size and depth that are best by its own estimate under these costs, verified as it is
        there."""
        rates = {
            (tree, "tree", likeliest): seconds(tree) / tau
            for likeliest in self.sequoias
            for tree, tau in self.sequoias[likeliest].items()
        }
        return min(rates, key=rates.__getitem__)

    def largest(self, rule: str | None = None) -> Choice:
        """Of the trees that save the most calls of the fitted texts, under each rule with each sort of children, the
        one that saves most there; under one rule, with sampled children where there are any."""
        found: dict[Choice, float] = {}
        for (own, sort), table in self.fitted.calls.items():
            if rule is None or (own == rule and sort == (self.temperature == 0)):
                trees = {tree: float(calls.sum()) for tree, calls in table.items() if tree != chain(len(tree))}
                tree = min(trees, key=trees.__getitem__)
                found[tree, own, sort] = trees[tree]
        return min(found, key=found.__getitem__)

    def chain(self, longest: int = LONGEST) -> Choice:
        """The chain with the most tokens a call."""
        return max(self.chains(longest), key=self.tau)


def rate(distributions: Distributions, shapes: Sequence[Parents], rule: str, likeliest: bool) -> dict[Parents, Tensor]:
    """Return the expected calls (B,) of each text with each shape."""
    table = table_of(distributions, shapes, rule, likeliest)
    return dict(zip(shapes, calls_of(table, shapes), strict=True))


def round_seconds(costs: Costs) -> Seconds:
    """Return a function that gives the seconds of a round, from a measured table. It adds one draft step per level, a
    target pass over the anchor and all nodes, and the rest. A draft pass over a whole level counts like one over one
    id."""

    def seconds(parents: Parents) -> float:
        n = len(parents)
        if n >= len(costs.target):
            raise ValueError(f"costs of rounds are measured up to {len(costs.target) - 1} drafts, a tree has {n} nodes")
        return costs.drafting(max(depths_of(parents), default=0)) + costs.target[n] + costs.rest[n]

    return seconds


@dataclass(frozen=True)
class Speeds:
    """Speeds over plain decoding of choices on the held texts, under one table of costs."""

    exact: Exact
    costs: Costs

    @property
    def seconds(self) -> Seconds:
        return round_seconds(self.costs)

    def told(self, choice: Choice) -> dict[str, Any]:
        """A choice with its speed and tau."""
        tau = self.exact.tau(choice)
        speed = self.costs.round(0) * tau / self.seconds(choice[0])
        return {"parents": choice[0], "rule": choice[1], "likeliest": choice[2], "tau": tau, "speed": speed}


def cell(exact: Exact, costs: Costs) -> dict[str, Any]:
    """The plan beside the best there is, Sequoia's tree and the chains, under one table of costs."""
    speeds = Speeds(exact, costs)
    planned = exact.fitted.ranked(speeds.seconds)[0]
    named = {
        "planned": (planned.parents, planned.rule, planned.likeliest),
        "best": exact.best(speeds.seconds),
        "sequoia": exact.sequoia(speeds.seconds),
        "fastest chain": exact.best(speeds.seconds, chains=True),
        "best chain": exact.chain(),
        "largest tree": exact.largest(),
    }
    told = {name: speeds.told(choice) for name, choice in named.items()}
    of_best = {name: told[name]["speed"] / max(one["speed"] for one in told.values()) for name in told}
    passes = {"pass_over_16": costs.target[exact.most] / costs.target[0], "draft_step": costs.draft / costs.target[0]}
    over = told["planned"]["speed"] / told["sequoia"]["speed"]
    return {"choices": told, "of_best": of_best, "over_sequoia": over} | passes


def orders(exact: Exact) -> dict[str, Any]:
    """Tokens a call of the largest tree under both rules and of the best chain, as ratios with standard errors."""
    largest, line = exact.largest(), exact.chain()
    found: dict[str, Any] = {
        "largest": largest,
        "best_chain": line,
        "gain": ratio(exact.calls(largest), exact.calls(line)),
    }
    found["gain_over_any"] = ratio(exact.calls(largest), exact.calls(exact.chain(exact.most)))
    if exact.temperature:
        both = [exact.calls(exact.largest(rule)) for rule in ("traversal", "tree")]
        found["traversal_over_tree"] = ratio(*both)
        chains = [choice for choice in exact.chains(LONGEST) if choice[1:] == ("tree", False)]
        found["tree_over_chain"] = ratio(both[1], exact.calls(max(chains, key=exact.tau)))
        trees = [own[0] for own in exact.by if own[1] == "traversal" and len(own[0]) > 1]
        both_rules = [(own, exact.by[own, "traversal", False], exact.by.get((own, "tree", False))) for own in trees]
        same = [(ratio(calls, other), shape) for shape, calls, other in both_rules if other is not None]
        found["same_shape"] = {
            "shapes": len(same),
            "least": min(same),
            "below": sum(value < 1 - 1e-6 for (value, _), _ in same),
            "below_by_2_errors": sum(value + 2 * error < 1 for (value, error), _ in same),
        }
    else:
        found["tree_over_chain"] = found["gain"]
    return found
