"""Which tree to serve, with which rule and children: rated exactly on texts of the target, from two passes over these.

B texts, T tokens of the longest, C children, V vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.exactness.teacher_forced import teacher_forced
from inference.measure.shapes import Parents, Seconds, Shape, grown
from inference.measure.timing import Emitted
from inference.measure.tree_rates import Paths, calls_of, every, products, union
from inference.models.lm import LM
from inference.proposers.branching import Branching
from inference.proposers.topology import chain, from_paths, paths_of
from inference.sampling import Sampling, probs
from inference.verify.traversal_prediction import chances_traversal, reach_traversal
from inference.verify.tree_prediction import by_draw, by_rank, rank_of, reach_tree

SMALL = 5  # nodes of trees that are all considered
FEW = 8  # shapes that are rated under traversal too


class Laws(NamedTuple):
    """Laws p, q (B, T, V) of the texts' tokens x (B, T), which is 0 past their lengths (B,); rank (B, T): how many
    tokens the draft holds likelier than x. Where a draft's law hangs on where its round began, q (B, T, K, V) and rank
    (B, T, K), by depth (see `tree_laws`)."""

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


def laws_of(target: LM, draft: LM, texts: Emitted, sampling: Sampling) -> Laws:
    """The laws of a target and of a draft that is a language model at every token of texts."""
    lengths = torch.tensor([len(text) for text in texts.tokens])
    (p, _), (q, rank) = (_laws(lm, texts, sampling, int(lengths.max())) for lm in (target, draft))
    x = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts.tokens], batch_first=True)
    return Laws(p, q, x, lengths, rank)


def _laws(lm: LM, texts: Emitted, sampling: Sampling, T: int) -> tuple[Tensor, Tensor]:
    """Laws (B, T, V) and ranks (B, T); at temperature 0 laws are one-hot, and ranks still those of all tokens."""
    found = torch.zeros(len(texts.tokens), T, lm.vocabulary)
    rank = torch.zeros(len(texts.tokens), T, dtype=torch.int64)
    for block in teacher_forced(lm, texts.prompts, texts.tokens, sampling):
        columns = slice(block.start, block.start + block.x.shape[1])
        law = probs(block.logits, sampling).float().cpu()
        found[block.rows, columns] = torch.where(block.valid.cpu().unsqueeze(-1), law, 0.0)
        rank[block.rows, columns] = rank_of(block.logits, block.x).cpu()
    return found, rank


def accept_of(laws: Laws, children: int, likeliest: bool, levels: int | None = None) -> Tensor:
    """Chances (B, T, C), or (B, T, K, C), of the texts' tokens as each of a node's children, see `tree_prediction`. At
    temperature 0 drafts serve the likeliest children. levels: below these, first children alone, which costs less."""
    if likeliest:
        return by_rank(laws.rank, children)
    if laws.q.ndim == 4:  # (B, T, K, V)
        high, low = slice(0, levels), slice(laws.q.shape[2] if levels is None else levels, None)
        whole, first = _drawn(laws, high, children), _drawn(laws, low, 1)
        return torch.cat((whole, F.pad(first, (0, children - 1))), 2)
    return by_draw(laws.p, laws.q, laws.x, children)


def _drawn(laws: Laws, depths: slice, children: int) -> Tensor:
    """(B, T, K, C) of some depths."""
    q = laws.q[:, :, depths]
    return by_draw(laws.p.unsqueeze(2), q, laws.x.unsqueeze(-1).expand(q.shape[:3]), children)


def reach_under(laws: Laws, parents: Parents, rule: str, likeliest: bool) -> Tensor:
    """P(a round that starts at t accepts at least n nodes | the text) -> (B, T, D+1), of engines that draft no level
    which the text's end leaves no room for."""
    if rule == "traversal" and not likeliest:
        shape, T = Branching(parents), laws.x.shape[1]
        nodes = torch.tensor([shape.nodes([max(0, end - t - 1) for t in range(T)]) for end in laws.lengths.tolist()])
        return reach_traversal(laws.p, laws.q, laws.x, shape.parents, laws.lengths, nodes)
    return reach_tree(accept_of(laws, max(map(parents.count, parents)), likeliest), parents, laws.lengths)


def plan(laws: Laws, seconds: Seconds, most: int, children: int, depths: Iterable[int]) -> TreePlan:
    """The shape of least seconds a token of at most `most` nodes, see `plans`."""
    return plans(laws, [seconds], most, children, depths)[0]


def plans(
    laws: Laws, tables: Sequence[Seconds], most: int, children: int, depths: Iterable[int], longest: int = 0,
    sorts: Sequence[bool] = (False, True),
) -> list[TreePlan]:  # fmt: skip
    """Under each table of costs the shape of least seconds a token: nothing, chains of up to `longest` drafts or the
    largest of `depths`, and trees of at most `most` nodes within `depths` levels (`considered`); of each
    of `sorts` of children (whether they are the likeliest), under `tree` and, of sampled ones, the `FEW` fastest under
    `traversal` too."""
    levels, found = sorted(set(depths)), [list[TreePlan]() for _ in tables]
    for likeliest in sorts:
        accept = accept_of(laws, children, likeliest, max(levels))
        shapes = considered(accept, most, levels, longest, laws.lengths)
        rated = rate(laws, shapes, "tree", likeliest, accept)
        for own, seconds in zip(found, tables, strict=True):
            own.append(_fastest(rated, seconds, "tree", likeliest, laws)[0])
        if not likeliest:
            few = [[plan.shape.parents for plan in _fastest(rated, seconds, "tree", likeliest, laws)[:FEW]]
                   for seconds in tables]  # fmt: skip
            again = rate(laws, list(dict.fromkeys(sum(few, []))), "traversal", likeliest)
            for own, seconds in zip(found, tables, strict=True):
                own.append(_fastest(again, seconds, "traversal", likeliest, laws)[0])
    return [min(own, key=lambda plan: plan.shape.seconds) for own in found]


def considered(
    accept: Tensor, most: int, levels: Sequence[int], longest: int, lengths: Tensor | None = None
) -> list[Parents]:
    """Nothing, chains, all trees of up to `SMALL` nodes, and those grown to every size within each of `levels`."""
    chains = [chain(n) for n in range(min(max(longest, *levels), most) + 1)]
    small = every(min(SMALL, most), accept.shape[-1], max(levels))
    return list(dict.fromkeys([*chains, *small, *(from_paths(paths_of(tree)) for tree in grown(accept, most, levels, lengths))]))


def rate(
    laws: Laws, shapes: Sequence[Parents], rule: str, likeliest: bool, accept: Tensor | None = None, samples: int = 4
) -> dict[Parents, Tensor]:
    """Expected calls (B,) of each text with each shape. accept: as of `accept_of`, where it is at hand; samples: of the
    refused children under `traversal`."""
    whole = union(shapes)
    if not whole:
        return {shape: laws.lengths.double() for shape in shapes}
    if rule == "traversal" and not likeliest:
        chances = chances_traversal(laws.p, laws.q, laws.x, whole, laws.lengths, samples=samples)
    else:
        accept = accept_of(laws, max(map(whole.count, whole)), likeliest) if accept is None else accept
        chances = products(accept, whole, laws.lengths)
    paths = Paths({path: n for n, path in enumerate(paths_of(whole))}, chances, laws.lengths)
    return dict(zip(shapes, calls_of(paths, shapes), strict=True))


def _fastest(
    calls: Mapping[Parents, Tensor], seconds: Seconds, rule: str, likeliest: bool, laws: Laws
) -> list[TreePlan]:
    """Shapes in the order of seconds a token."""
    tokens = int(laws.lengths.sum())
    found = []
    for parents, own in calls.items():
        tau = tokens / float(own.sum())
        found.append(TreePlan(Shape(parents, tau, seconds(parents) / tau), rule, likeliest))
    return sorted(found, key=lambda plan: plan.shape.seconds)
