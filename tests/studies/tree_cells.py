"""What each shape is worth, exactly, on texts that nothing was fitted on: the plan beside the best that brute force
finds, Sequoia's tree, chains, and trees of as many nodes as may be drafted.

B texts; a choice is a shape, its rule and whether its children are the likeliest.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from inference.measure.costs import Costs
from inference.measure.shapes import Parents, Seconds, positional, round_seconds, sequoia
from inference.measure.tree_plan import Laws, Search, TreePlan, rate
from inference.measure.tree_rates import every
from inference.proposers.topology import chain, from_paths, full, paths_of
from inference.verify.tree import depths_of

MOST, CHILDREN, LONGEST = 16, 4, 8
LEVELS = (1, 2, 3, 4, 5, 6, 8)  # of grown trees
FULL = [full(widths) for widths in ((2, 2), (2, 2, 2), (3, 2), (3, 3), (4, 2), (4, 3), (4, 2, 1), (4, 1, 1), (3, 2, 1),
                                    (2, 1, 1, 1), (2, 2, 1, 1), (3, 1, 1, 1, 1))]  # fmt: skip
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


class Exact:
    """Expected calls of every shape on the held texts, and plans made on the fitted ones. by: calls (B,) by choice."""

    def __init__(self, fitted: Laws, held: Laws, temperature: float, most: int, small: int) -> None:
        self.held, self.temperature, self.most = held, temperature, most
        self.depth = min(LONGEST, held.q.shape[2] if held.q.ndim == 4 else LONGEST)
        levels = [level for level in LEVELS if level <= self.depth]
        sorts = sorted({likeliest for _, likeliest in settings(temperature)})
        self.fitted, self.search = (Search(laws, most, CHILDREN, levels, self.depth, sorts) for laws in (fitted, held))
        self.sequoias = {sort: self._sequoias(sort) for sort in sorts}
        self.by: dict[Choice, Tensor] = {}
        for rule, sort in settings(temperature):
            shapes = self._all(sort, small)
            table = rate(held, shapes, rule, sort, self.search.accept[sort], samples=2)
            self.by |= {(shape, rule, sort): calls for shape, calls in table.items()}

    def _all(self, sort: bool, small: int) -> list[Parents]:
        """Shapes that brute force looks at: all small ones, full trees, Sequoia's, and all that searches on either
        texts find, chains among them."""
        trees = [*self.search.calls[sort], *self.fitted.calls[sort], *self.sequoias[sort], *FULL,
                 *every(min(small, self.most), CHILDREN, self.depth)]  # fmt: skip
        fit = [tree for tree in trees if len(tree) <= self.most and max(depths_of(tree), default=0) <= self.depth]
        return list(dict.fromkeys(from_paths(paths_of(tree)) for tree in fit))

    def _sequoias(self, sort: bool) -> dict[Parents, float]:
        """Its trees of every size and depth, and the tokens that positional acceptance says a call gives."""
        chances = positional(self.fitted.accept[sort], self.fitted.laws.lengths)
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
        """The fastest choice of all, or of chains."""
        found = [choice for choice in self.by if not chains or choice[0] == chain(len(choice[0]))]
        return min(found, key=lambda choice: seconds(choice[0]) / self.tau(choice))

    def sequoia(self, seconds: Seconds) -> Choice:
        """Its tree of the size and depth that are best by its own estimate under these costs, verified as it is
        there."""
        rates = {(tree, "tree", likeliest): seconds(tree) / tau
                 for likeliest in self.sorts for tree, tau in self.sequoias[likeliest].items()}  # fmt: skip
        return min(rates, key=rates.__getitem__)

    def largest(self, rule: str | None = None) -> Choice:
        """Of the trees that save the most calls of the fitted texts within `most` nodes, which saves most of the held
        ones' too; under one rule, with sampled children where there are any."""
        found = [(self._saving(sort), own, sort) for own, sort in settings(self.temperature)
                 if rule is None or (own == rule and sort == (self.temperature == 0))]  # fmt: skip
        return max(found, key=self.tau)

    def _saving(self, sort: bool) -> Parents:
        """The tree that saves the most calls of the fitted texts."""
        calls = self.fitted.calls[sort]
        return min((own for own in calls if own != chain(len(own))), key=lambda own: float(calls[own].sum()))

    def chain(self) -> Choice:
        """The chain with the most tokens a call."""
        return max((choice for choice in self.by if choice[0] == chain(len(choice[0]))), key=self.tau)


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
    planned, on_held = (search.plan(speeds.seconds) for search in (exact.fitted, exact.search))
    named = {"planned": _of(planned), "planned on held": _of(on_held), "best": exact.best(speeds.seconds),
             "sequoia": exact.sequoia(speeds.seconds), "fastest chain": exact.best(speeds.seconds, chains=True),
             "best chain": exact.chain(), "largest tree": exact.largest()}  # fmt: skip
    told = {name: speeds.told(choice) for name, choice in named.items()}
    of_best = {name: told[name]["speed"] / max(one["speed"] for one in told.values()) for name in told}
    passes = {"pass_over_16": costs.target[exact.most] / costs.target[0], "draft_step": costs.draft / costs.target[0]}
    over = told["planned"]["speed"] / told["sequoia"]["speed"]
    return {"choices": told, "of_best": of_best, "over_sequoia": over} | passes


def _of(plan: TreePlan) -> Choice:
    return plan.shape.parents, plan.rule, plan.likeliest


def orders(exact: Exact) -> dict[str, Any]:
    """Tokens a call of the largest tree under both rules and of the best chain, as ratios with standard errors."""
    largest, line = exact.largest(), exact.chain()
    found = {"largest": largest, "best_chain": line, "gain": ratio(exact.calls(largest), exact.calls(line))}
    if exact.temperature:
        both = [exact.calls(exact.largest(rule)) for rule in ("traversal", "tree")]
        found["traversal_over_tree"] = ratio(*both)
        chains = [choice for choice in exact.by if choice[0] == chain(len(choice[0])) and choice[1:] == ("tree", False)]
        found["tree_over_chain"] = ratio(both[1], exact.calls(max(chains, key=exact.tau)))
    else:
        found["tree_over_chain"] = found["gain"]
    return found
