"""Which tree to serve, with which rule and children: rated exactly on texts of the target, from two passes over these.

B texts, T tokens of the longest, C children, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inference.exactness.teacher_forced import teacher_forced
from inference.measure.shapes import Parents, Seconds, Shape, best_shape, tokens_of
from inference.measure.timing import Emitted
from inference.models.lm import LM
from inference.proposers.branching import Branching
from inference.sampling import Sampling, probs
from inference.verify.prediction import calls_from
from inference.verify.tree_prediction import by_draw, by_rank, rank_of, reach_traversal, reach_tree


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


def accept_of(laws: Laws, children: int, likeliest: bool) -> Tensor:
    """Chances (B, T, C), or (B, T, K, C), of the texts' tokens as each of a node's children, see `tree_prediction`. At
    temperature 0 drafts serve the likeliest children."""
    if likeliest:
        return by_rank(laws.rank, children)
    if laws.q.ndim == 4:  # (B, T, K, V)
        return by_draw(laws.p.unsqueeze(2), laws.q, laws.x.unsqueeze(-1).expand(laws.rank.shape), children)
    return by_draw(laws.p, laws.q, laws.x, children)


def reach_under(laws: Laws, parents: Parents, rule: str, likeliest: bool) -> Tensor:
    """P(a round that starts at t accepts at least n nodes | the text) -> (B, T, D+1), of engines that draft no level
    which the text's end leaves no room for."""
    if rule == "traversal" and not likeliest:
        shape, T = Branching(parents), laws.x.shape[1]
        nodes = torch.tensor([shape.nodes([max(0, end - t - 1) for t in range(T)]) for end in laws.lengths.tolist()])
        return reach_traversal(laws.p, laws.q, laws.x, shape.parents, laws.lengths, nodes)
    return reach_tree(accept_of(laws, max(map(parents.count, parents)), likeliest), parents, laws.lengths)


def plan(laws: Laws, seconds: Seconds, most: int, children: int, depths: Iterable[int]) -> TreePlan:
    """The shape of least seconds a token of at most `most` nodes: chains and trees, of sampled and of likeliest
    children, grown by exact calls under `tree` and then rated under `traversal` too, whose calls may be fewer."""
    depths, plans = list(depths), []
    for likeliest in (False, True):
        accept = accept_of(laws, children, likeliest)
        best = best_shape(accept, seconds, most, depths, laws.lengths)
        plans.append(TreePlan(best, "tree", likeliest))
        if best.parents and not likeliest:
            calls = calls_from(reach_under(laws, best.parents, "traversal", likeliest), laws.lengths).sum()
            tau = tokens_of(accept, laws.lengths) / float(calls)
            plans.append(TreePlan(Shape(best.parents, tau, seconds(best.parents) / tau), "traversal", likeliest))
    return min(plans, key=lambda found: found.shape.seconds)
