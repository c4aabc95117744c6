"""Which tree to serve, with which rule and children: rated exactly on texts of the target, from two passes over these.

B texts, T tokens of the longest, C children, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.exactness.teacher_forced import teacher_forced
from inference.measure.shapes import Parents, Seconds, Shape, grow, grown
from inference.measure.timing import Emitted
from inference.measure.tree_rates import Paths, calls_of, climbed, every, products, union
from inference.models.lm import LM
from inference.proposers.branching import Branching
from inference.proposers.topology import chain, from_paths, paths_of
from inference.sampling import Sampling, probs
from inference.verify.traversal_prediction import chances_traversal, reach_traversal
from inference.verify.tree_prediction import SAMPLES, by_draw, by_rank, rank_of, reach_tree

SMALL = 5  # nodes of trees that are all considered
SHRUNK = 0.3  # how far chances of likeliest children, 0 or 1 given a text, are drawn to their mean over the texts
WIDE = 4  # levels in which a node may have more than two children, of drafts whose distributions hang on the depth


class Distributions(NamedTuple):
    """Distributions p, q (B, T, V) of the texts' tokens x (B, T), which is 0 past their lengths (B,); rank (B, T): how
    many tokens the draft holds likelier than x. Where a draft's distribution hangs on where its round began, q (B, T,
    K, V) and rank (B, T, K), by depth (see `tree_distributions`)."""

    p: Tensor
    q: Tensor
    x: Tensor
    lengths: Tensor
    rank: Tensor


@dataclass(frozen=True)
class TreePlan:
    """shape: of what to draft, () for nothing; rule: tree or traversal; likeliest: whether its children are the
    likeliest tokens, or sampled without replacement."""

    shape: Shape
    rule: str
    likeliest: bool


def distributions_of(target: LM, draft: LM, texts: Emitted, sampling: Sampling) -> Distributions:
    """The distributions of a target and of a draft that is a language model at every token of texts."""
    lengths = torch.tensor([len(text) for text in texts.tokens])
    (p, _), (q, rank) = (_distributions(lm, texts, sampling, int(lengths.max())) for lm in (target, draft))
    x = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts.tokens], batch_first=True)
    return Distributions(p, q, x, lengths, rank)


def _distributions(lm: LM, texts: Emitted, sampling: Sampling, T: int) -> tuple[Tensor, Tensor]:
    """Distributions (B, T, V) and ranks (B, T); at temperature 0 distributions are one-hot, and ranks still those of
    all tokens."""
    found = torch.zeros(len(texts.tokens), T, lm.vocabulary)
    rank = torch.zeros(len(texts.tokens), T, dtype=torch.int64)
    for block in teacher_forced(lm, texts.prompts, texts.tokens, sampling):
        columns = slice(block.start, block.start + block.x.shape[1])
        distribution = probs(block.logits, sampling).float().cpu()
        found[block.rows, columns] = torch.where(block.valid.cpu().unsqueeze(-1), distribution, 0.0)
        rank[block.rows, columns] = rank_of(block.logits, block.x).cpu()
    return found, rank


def accept_of(
    distributions: Distributions, children: int, likeliest: bool, levels: int | None = None, samples: int = SAMPLES
) -> Tensor:
    """Chances (B, T, C), or (B, T, K, C), of the texts' tokens as each of a node's children, see `tree_prediction`. At
    temperature 0 drafts serve the likeliest children. levels: below these, two children at most, which are in closed
    form; samples: of the refused children before a third one."""
    if likeliest:
        return by_rank(distributions.rank, children)
    if distributions.q.ndim == 3:
        return by_draw(distributions.p, distributions.q, distributions.x, children, samples=samples)
    high, low = (
        distributions.q[:, :, part] for part in (slice(0, levels), slice(levels or distributions.q.shape[2], None))
    )
    places = [distributions.x.unsqueeze(-1).expand(q.shape[:3]) for q in (high, low)]
    whole = by_draw(distributions.p.unsqueeze(2), high, places[0], children, samples=samples)
    pair = by_draw(distributions.p.unsqueeze(2), low, places[1], min(children, 2))
    return torch.cat((whole, F.pad(pair, (0, children - pair.shape[-1]))), 2)


def towards_mean(accept: Tensor, share: float, lengths: Tensor) -> Tensor:
    """Chances a share of the way to their means over the texts, of each child and, where there is that axis, depth."""
    inside = torch.arange(accept.shape[1], device=accept.device) < lengths.to(accept.device).unsqueeze(1)
    mean = accept[inside].mean(0)
    return (1 - share) * accept + share * mean


def reach_under(distributions: Distributions, parents: Parents, rule: str, likeliest: bool) -> Tensor:
    """P(a round that starts at t accepts at least n nodes | the text) -> (B, T, D+1), of engines that draft no level
    which the text's end leaves no room for."""
    if rule == "traversal" and not likeliest:
        shape, T = Branching(parents), distributions.x.shape[1]
        nodes = torch.tensor(
            [shape.nodes([max(0, end - t - 1) for t in range(T)]) for end in distributions.lengths.tolist()]
        )
        return reach_traversal(
            distributions.p, distributions.q, distributions.x, shape.parents, distributions.lengths, nodes
        )
    return reach_tree(
        accept_of(distributions, max(map(parents.count, parents)), likeliest), parents, distributions.lengths
    )


def plan(distributions: Distributions, seconds: Seconds, most: int, children: int, depths: Iterable[int]) -> TreePlan:
    """The shape of least seconds a token of at most `most` nodes within so many levels: nothing, a chain or a tree, of
    sampled or of likeliest children, verified by `tree` or `traversal`."""
    return Search(distributions, most, children, depths).plan(seconds)


class Search:
    """Shapes and their expected calls on texts, under any costs: nothing, chains, all trees of up to `SMALL` nodes, and
    those grown to every size within each of `depths` levels, from nothing and from chains; under `traversal` those
    grown again from the same paths.

    longest: of chains, where that is more than `depths`; sorts: of children, whether they are the likeliest, of which
    both rules accept the same; beside: other shapes to rate. accept: by sort, see `accept_of`. calls: by rule and sort,
    (B,) of each shape; with `shrunk` above 0 those of likeliest children are no longer of these very texts, but what is
    chosen by them is better on others (few texts are learnt by heart).
    """

    def __init__(
        self, distributions: Distributions, most: int, children: int, depths: Iterable[int], longest: int = 0,
        sorts: Sequence[bool] = (False, True), beside: Iterable[Parents] = (), shrunk: float = SHRUNK,
    ) -> None:  # fmt: skip
        self.distributions, self.most, self.levels = distributions, most, sorted(set(depths))
        self.longest = min(max(longest, *self.levels), most)
        self.accept = {sort: accept_of(distributions, children, sort, WIDE, samples=4) for sort in sorts}
        if True in self.accept:
            self.accept[True] = towards_mean(self.accept[True], shrunk, distributions.lengths)
        self.calls: dict[tuple[str, bool], dict[Parents, Tensor]] = {}
        for sort, accept in self.accept.items():
            shapes = list(dict.fromkeys([*self._shapes(accept, children), *beside]))
            self.calls["tree", sort] = self._rated(table_of(distributions, shapes, "tree", sort, accept), shapes)
            if not sort:
                table = table_of(distributions, shapes, "traversal", sort, samples=2)
                again = [tree for level in self.levels for tree in climbed(table, most, level)]
                self.calls["traversal", sort] = self._rated(table, list(dict.fromkeys([*shapes, *again])))

    def _shapes(self, accept: Tensor, children: int) -> list[Parents]:
        lengths, deepest = self.distributions.lengths, self.levels[-1]
        starts = [chain(level) for level in self.levels if 2 < level < self.most]
        wholes = [grow(accept, self.most, deepest, lengths, start=start) for start in starts]
        trees = grown(accept, self.most, self.levels, lengths)
        trees += [whole[:n] for whole, start in zip(wholes, starts, strict=True)
                  for n in range(len(start), len(whole) + 1)]  # fmt: skip
        small = every(min(SMALL, self.most), children, deepest)
        chains = [chain(n) for n in range(self.longest + 1)]
        return list(dict.fromkeys([*chains, *small, *(from_paths(paths_of(tree)) for tree in trees)]))

    def _rated(self, table: Paths, shapes: Sequence[Parents]) -> dict[Parents, Tensor]:
        return dict(zip(shapes, calls_of(table, shapes), strict=True))

    def plan(self, seconds: Seconds) -> TreePlan:
        """The fastest of all."""
        return self.ranked(seconds)[0]

    def ranked(self, seconds: Seconds, branching: bool = False) -> list[TreePlan]:
        """The fastest shape under each rule with each sort of children, fastest first. branching: of trees that are no
        chain, of which there may be none."""
        tokens, found = int(self.distributions.lengths.sum()), []
        for (rule, sort), table in self.calls.items():
            taus = {own: tokens / float(calls.sum()) for own, calls in table.items()
                    if not branching or own != chain(len(own))}  # fmt: skip
            rated = [Shape(own, tau, seconds(own) / tau) for own, tau in taus.items()]
            if rated:
                found.append(TreePlan(min(rated, key=lambda shape: shape.seconds), rule, sort))
        return sorted(found, key=lambda plan: plan.shape.seconds)


def rate(
    distributions: Distributions, shapes: Sequence[Parents], rule: str, likeliest: bool, accept: Tensor | None = None,
    samples: int = SAMPLES,
) -> dict[Parents, Tensor]:  # fmt: skip
    """Expected calls (B,) of each text with each shape. accept: as of `accept_of`, where it is at hand; samples: of the
    refused children under `traversal`."""
    table = table_of(distributions, shapes, rule, likeliest, accept, samples)
    return dict(zip(shapes, calls_of(table, shapes), strict=True))


def table_of(
    distributions: Distributions, shapes: Sequence[Parents], rule: str, likeliest: bool, accept: Tensor | None = None,
    samples: int = SAMPLES,
) -> Paths:  # fmt: skip
    """Chances of all paths of these shapes, see `rate`."""
    whole = union(shapes)
    if not whole:
        chances = distributions.p.new_zeros(*distributions.x.shape, 0)
    elif rule == "traversal" and not likeliest:
        chances = chances_traversal(
            distributions.p, distributions.q, distributions.x, whole, distributions.lengths, samples=samples
        )
    else:
        accept = accept_of(distributions, max(map(whole.count, whole)), likeliest) if accept is None else accept
        chances = products(accept, whole, distributions.lengths)
    return Paths({path: n for n, path in enumerate(paths_of(whole))}, chances, distributions.lengths)
