"""A planner for the tree to serve. It chooses the tree, the rule, and likeliest or sampled children, by the exact
expected target calls on texts of the target.

If the proposer has a `language_model`, the distributions of target and draft come from one teacher-forced pass of each.
For any other proposer they come from forced rounds of chains. B texts, T tokens of the longest, K depths, C children, V
vocabulary.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.engine import Engine
from inference.exactness.forced import Along, rounds_along
from inference.exactness.teacher_forced import teacher_forced
from inference.measure.tree_shapes import (
    Parents,
    Paths,
    Seconds,
    calls_of,
    climbed,
    every,
    grow,
    grown_trees,
    products,
    union,
)
from inference.models.lm import LM
from inference.output import Emitted
from inference.policy import Fixed
from inference.proposers.base import Proposer
from inference.proposers.trees import StaticTrees
from inference.sampling import Sampling, probs, up_to
from inference.verify.predict_tree import (
    SAMPLES,
    by_draw,
    by_rank,
    chances_traversal,
    rank_of,
    reach_traversal,
    reach_tree,
)
from inference.verify.tree import chain, from_paths, paths_of

SMALL = 5  # every tree of up to so many nodes is rated
SHRUNK = 0.3  # probabilities of likeliest children, 0 or 1, move by this share towards their mean over the texts
WIDE = 4  # levels in which nodes may have more than two children, if the draft's distributions depend on the depth


class Distributions(NamedTuple):
    """The distributions of target and draft at every token of the texts.

    p (B, T, V): the target's. q (B, T, V): the draft's. x (B, T): the tokens, 0 past a text's end. lengths (B,): number
    of tokens of each text. rank (B, T): number of tokens that are likelier than x under the draft. If the draft's
    distribution depends on the start of its round, q is (B, T, K, V) and rank (B, T, K): entry (t, j) is for token t as
    draft j (0-based) of the round that starts at t - j.
    """

    p: Tensor
    q: Tensor
    x: Tensor
    lengths: Tensor
    rank: Tensor


@dataclass(frozen=True)
class RatedTree:
    """A tree with its predicted speed. parents: the parent of each node, -1 for the text; () for no drafts. rule:
    "tree" or "traversal". likeliest: whether the children are the likeliest tokens; otherwise they are sampled without
    replacement. tau: tokens per target call on the given texts. seconds: wall seconds per token."""

    parents: Parents
    rule: str
    likeliest: bool
    tau: float
    seconds: float


def distributions_of(target: LM, draft: LM, texts: Emitted, sampling: Sampling) -> Distributions:
    """Return the distributions of target and draft at every token of the texts. draft: the draft as an LM. texts:
    emitted by the target. sampling: the settings of these texts; a draft's q has them too."""
    lengths = texts.lengths
    (p, _), (q, rank) = (_distributions(lm, texts, sampling, int(lengths.max())) for lm in (target, draft))
    x = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts.tokens], batch_first=True)
    return Distributions(p, q, x, lengths, rank)


def _distributions(lm: LM, texts: Emitted, sampling: Sampling, T: int) -> tuple[Tensor, Tensor]:
    """Return an LM's distributions (B, T, V) of the texts' tokens, and the tokens' ranks (B, T). At temperature 0
    distributions are one-hot, but ranks still order all tokens."""
    distributions = torch.zeros(len(texts.tokens), T, lm.vocabulary)
    rank = torch.zeros(len(texts.tokens), T, dtype=torch.int64)
    for block in teacher_forced(lm, texts.prompts, texts.tokens, sampling):
        columns = slice(block.start, block.start + block.x.shape[1])
        part = probs(block.logits, sampling).float().cpu()
        distributions[block.rows, columns] = torch.where(block.valid.cpu().unsqueeze(-1), part, 0.0)
        rank[block.rows, columns] = rank_of(block.logits, block.x).cpu()
    return distributions, rank


@torch.inference_mode()
def distributions_of_rounds(
    engine: Engine, proposer: Proposer, depths: int, texts: Emitted, sampling: Sampling, max_new_tokens: int
) -> Distributions:
    """Return the distributions of a draft of any kind, by depth. All trees can be rated from these without running
    them.

    The distribution at depth j of a round that starts at token t may depend on t, on j and on the tokens between. Entry
    (t, j) of q (B, T, K, V) and rank (B, T, K) is for token t as draft j (0-based) of the round that starts at t - j.
    If this round has no draft j, q is zero and the rank is V. proposer: must draft chains for the engine's target.
    depths: the largest number of drafts per round. max_new_tokens: the limit of the run that made the texts; rounds
    draft no tokens past it.

    This runs a target pass over K + 1 ids for every token, in the engine's slots. sampling: the settings of the texts.
    Raises ValueError if the proposer drafts trees, or does not draw its drafts from distributions.
    """
    with_proposer, V = copy.copy(engine), engine.target.vocabulary
    with_proposer.proposer, with_proposer.policy = proposer, Fixed(min(depths, proposer.depths or depths))
    lengths = texts.lengths
    B, T, K = len(texts.tokens), int(lengths.max()), with_proposer.policy.k
    p, q = torch.zeros(B, T, V), torch.zeros(B, T + K, K, V)
    rank = torch.full((B, T + K, K), V)
    for low in range(0, B, engine.rows):
        for t, one in enumerate(rounds_along(with_proposer, texts, sampling, max_new_tokens, low)):
            p[one.rows, t] = one.p[:, 0].float().cpu()
            for j in range(max(one.proposal.k)):
                q[one.rows, t + j, j], rank[one.rows, t + j, j] = _at_depth(one, j, V)
    x = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts.tokens], batch_first=True)
    return Distributions(p, q[:, :T], x, lengths, rank[:, :T])


def _at_depth(one: Along, j: int, V: int) -> tuple[Tensor, Tensor]:
    """Return the distributions (A, V) and the ranks (A,) of a round's drafts at depth j (0-based). Rows without a draft
    at this depth have zeros and rank V. Raises ValueError if the round drafted a tree, or drew nothing at this depth.
    """
    round, proposal = one.round, one.proposal
    if proposal.tree is not None or j not in round.drawn or j not in round.scored:
        raise ValueError("distributions by depth need chains that a model drafts: give a proposer without a shape")
    drafts = torch.tensor([k > j for k in proposal.k])
    q, rank = round.drawn[j].float().cpu(), rank_of(round.scored[j], round.follows[:, j]).cpu()
    return torch.where(drafts.unsqueeze(1), q, 0.0), torch.where(drafts, rank, V)


def accept_of(
    distributions: Distributions, children: int, likeliest: bool, levels: int | None = None, samples: int = SAMPLES
) -> Tensor:
    """Return accept, (B, T, C): P(the text's token t is accepted as child c of a node | the children of its parent are
    tried). It is (B, T, K, C) if the distributions depend on the depth: entry (t, j) is for token t as draft j
    (0-based) of the round that starts at t - j.

    children: C. likeliest: whether children are the likeliest tokens, as they are at temperature 0; else they are
    sampled. levels: number of levels for which all children are computed; below them only the first two are, by a
    closed form. None for all levels. samples: how often rejected children are drawn for third and later children.
    """
    if likeliest:
        return by_rank(distributions.rank, children)
    if distributions.q.ndim == 3:
        return by_draw(distributions.p, distributions.q, distributions.x, children, samples=samples)
    high, low = (
        distributions.q[:, :, part] for part in (slice(0, levels), slice(levels or distributions.q.shape[2], None))
    )
    x_high, x_low = (distributions.x.unsqueeze(-1).expand(q.shape[:3]) for q in (high, low))
    whole = by_draw(distributions.p.unsqueeze(2), high, x_high, children, samples=samples)
    pair = by_draw(distributions.p.unsqueeze(2), low, x_low, min(children, 2))
    return torch.cat((whole, F.pad(pair, (0, children - pair.shape[-1]))), 2)


def towards_mean(accept: Tensor, share: float, lengths: Tensor) -> Tensor:
    """Return (1 - share) * accept + share * (its mean over the texts' tokens), in the shape of `accept`, (B, T, C) or
    (B, T, K, C). Each child, and each depth if there are depths, has its own mean. lengths (B,): number of tokens of
    each text."""
    inside = up_to(lengths.to(accept.device), accept.shape[1])
    return (1 - share) * accept + share * accept[inside].mean(0)


def reach_under(distributions: Distributions, parents: Parents, rule: str, likeliest: bool) -> Tensor:
    """Return the reach (B, T, D+1) of a tree with these parents under this rule: P(a round that starts at t accepts at
    least n nodes | the text). likeliest: whether children are the likeliest tokens. As in the engine, no level past the
    text's end is drafted. distributions: of target and draft on the texts. rule: "tree" or "traversal"."""
    if rule == "traversal" and not likeliest:
        shape, T = StaticTrees(parents), distributions.x.shape[1]
        nodes = torch.tensor(
            [shape.nodes([max(0, end - t - 1) for t in range(T)]) for end in distributions.lengths.tolist()]
        )
        return reach_traversal(
            distributions.p, distributions.q, distributions.x, shape.parents, distributions.lengths, nodes
        )
    return reach_tree(
        accept_of(distributions, max(map(parents.count, parents)), likeliest), parents, distributions.lengths
    )


class Search:
    """A rating of trees by their expected target calls on texts. Once made, it ranks the trees for any costs of rounds.

    The trees are: no drafts; chains; all trees of up to `SMALL` nodes; and trees grown to every size within each of the
    `depths`, from nothing and from chains. Under `traversal`, trees are also grown by the calls under this rule, from
    the paths of the other trees.

    distributions: of target and draft on the texts. most: the largest number of nodes. children: the largest number of
    children of a node. depths: numbers of levels. sorts: the sorts of children to rate: True for the likeliest tokens
    (both rules then accept the same nodes), False for sampled ones. shrunk: the fraction by which probabilities of
    likeliest children are moved towards their means. If it is above 0, the calls of these children are not exact for
    these texts, but the choice is better on other texts: a choice from few texts overfits.

    Attributes: accept, by sort, the probabilities that `accept_of` returns; calls, by (rule, sort) and then by tree,
    the expected calls (B,).
    """

    def __init__(
        self,
        distributions: Distributions,
        most: int,
        children: int,
        depths: Iterable[int],
        sorts: Sequence[bool] = (False, True),
        shrunk: float = SHRUNK,
    ) -> None:
        self.distributions, self.most, self.levels = distributions, most, sorted(set(depths))
        self.accept = {sort: accept_of(distributions, children, sort, WIDE, samples=4) for sort in sorts}
        if True in self.accept:
            self.accept[True] = towards_mean(self.accept[True], shrunk, distributions.lengths)
        self.calls: dict[tuple[str, bool], dict[Parents, Tensor]] = {}
        for sort, accept in self.accept.items():
            shapes = self._shapes(accept, children)
            self.calls["tree", sort] = self._rated(table_of(distributions, shapes, accept), shapes)
            if not sort:
                table = table_of(distributions, shapes)
                again = [tree for level in self.levels for tree in climbed(table, most, level)]
                self.calls["traversal", sort] = self._rated(table, list(dict.fromkeys([*shapes, *again])))

    def _shapes(self, accept: Tensor, children: int) -> list[Parents]:
        lengths, deepest = self.distributions.lengths, self.levels[-1]
        starts = [chain(level) for level in self.levels if 2 < level < self.most]
        wholes = [grow(accept, self.most, deepest, lengths, start=start) for start in starts]
        trees = grown_trees(accept, self.most, self.levels, lengths)
        trees += [
            whole[:n] for whole, start in zip(wholes, starts, strict=True) for n in range(len(start), len(whole) + 1)
        ]
        small = every(min(SMALL, self.most), children, deepest)
        chains = [chain(n) for n in range(min(deepest, self.most) + 1)]
        return list(dict.fromkeys([*chains, *small, *(from_paths(paths_of(tree)) for tree in trees)]))

    def _rated(self, table: Paths, shapes: Sequence[Parents]) -> dict[Parents, Tensor]:
        return dict(zip(shapes, calls_of(table, shapes), strict=True))

    def ranked(self, seconds: Seconds, branching: bool = False) -> list[RatedTree]:
        """Return the fastest tree for each rule and sort of children, fastest first. seconds: returns the seconds of a
        round that drafts a tree. branching: whether to consider only trees that are not chains; the result may then be
        empty."""
        tokens, best = int(self.distributions.lengths.sum()), []
        for (rule, sort), table in self.calls.items():
            taus = {
                own: tokens / float(calls.sum())
                for own, calls in table.items()
                if not branching or own != chain(len(own))
            }
            rated = [RatedTree(own, rule, sort, tau, seconds(own) / tau) for own, tau in taus.items()]
            if rated:
                best.append(min(rated, key=lambda shape: shape.seconds))
        return sorted(best, key=lambda shape: shape.seconds)


def table_of(distributions: Distributions, shapes: Sequence[Parents], accept: Tensor | None = None) -> Paths:
    """Return the probabilities of all paths in these trees. distributions: of target and draft on the texts. shapes:
    the parents of each tree. accept: the result of `accept_of`, (B, T, C) or (B, T, K, C), for the rule `tree`; None
    for sampled children under `traversal`."""
    whole = union(shapes)
    if not whole:
        chances = distributions.p.new_zeros(*distributions.x.shape, 0)
    elif accept is None:
        chances = chances_traversal(
            distributions.p, distributions.q, distributions.x, whole, distributions.lengths, samples=2
        )
    else:
        chances = products(accept, whole, distributions.lengths)
    return Paths({path: n for n, path in enumerate(paths_of(whole))}, chances, distributions.lengths)
