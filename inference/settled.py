"""A round's outcome in one tensor, which the CPU reads once: of chains and of trees of drafts.

A rows, N drafts, D drafts of the longest path (N of a chain), V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inference.models.lm import LM
from inference.models.passes import States, Tree
from inference.proposers.base import Proposal

COLUMNS = 6  # of a table before its drafts


class Settled(NamedTuple):
    """table (A, COLUMNS + D): drafts accepted, the token after them, how deep the drafts go that had distributions,
    whether there was no distribution for that token (it is then no token), or at any place that the target's pass
    wrote, whether a draft was refused where the accepted ones end, and the drafts, of a tree those of the accepted
    path.
    path (A, D): its nodes, -1 past the last; None for a chain."""

    table: Tensor
    path: Tensor | None = None


def settled(p: Tensor, proposal: Proposal, verdict: Any, last: Tensor, length: Tensor, asked: Tensor) -> Settled:
    """p (A, N+1, V); verdict: of the rule, with a `path` where the proposal is a tree; last (A,): the token after the
    accepted drafts; length (A,): drafts that had distributions, of those `asked` for."""
    missing, accepted = without_probs(p), verdict.accepted.unsqueeze(1)  # (A, N+1), (A, 1)
    stains = missing.any(1, keepdim=True)
    if proposal.tree is None:
        k = length.unsqueeze(1)
        columns = accepted, last.unsqueeze(1), k, missing.gather(1, accepted), stains, accepted < k
        return Settled(torch.cat((*columns, proposal.x), 1))
    path, end = verdict.path, (verdict.path + 1).amax(1, keepdim=True)  # a node comes after those it hangs on
    used = torch.arange(p.shape[1], device=p.device) <= length.unsqueeze(1)
    depth = (proposal.tree.on(p.device).depths * used).amax(1, keepdim=True)
    stains = stains | (length < asked).unsqueeze(1)
    refused = (used[:, 1:] & (proposal.tree.on(p.device).parents + 1 == end)).any(1, keepdim=True)
    columns = accepted, last.unsqueeze(1), depth, missing.gather(1, end), stains, refused
    return Settled(torch.cat((*columns, proposal.x.gather(1, path.clamp(min=0))), 1), path)


def sound(p: Tensor, q: Tensor | None, k: Tensor, tree: Tree | None = None) -> Tensor:
    """Draft lengths (A,), cut where a distribution is missing: a draft needs its own distribution, and the target's
    before it.

    Depends on the drafts before the cut alone, as a stop rule may: p (A, N+1, V), q (A, N, V), k (A,).
    """
    missing = without_probs(p)
    if tree is None:
        missing = missing[:, :-1]
    else:
        before = tree.on(p.device).parents.view(-1, p.shape[1] - 1) + 1
        missing = missing.gather(1, before.expand(len(p), -1))
    if q is not None and q.shape[1]:
        missing = missing | without_probs(q)
    return torch.minimum(k, (~missing).to(torch.int64).cumprod(1).sum(1))


def without_probs(probs: Tensor) -> Tensor:
    """Distributions (..., V) -> (...): whether it is none, see `sampling.probs`."""
    return probs[..., 0].isnan()


def column_of(path: Tensor | None, slot: int, n: int) -> int:
    """The column of the pass where row `slot`'s n accepted drafts end; reads from the device where they are a path."""
    return n if path is None else int(path[slot].amax()) + 1


def paths_of(tree: Tree) -> list[list[int]]:
    """The nodes from the anchor down to each node, of a tree that all rows share."""
    assert tree.shape is not None
    paths: list[list[int]] = []
    for node, parent in enumerate(tree.shape):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


def kept(lm: LM, texts: Sequence[list[int]], at: Tensor, states: States, path: Tensor | None) -> States:
    """A tree's accepted path, whose keys and values become those of a text after the anchors at `at` (A,); states along
    it. A chain is a text already."""
    if path is None:
        return states
    found = {layer: along(part, path) for layer, part in states.items()}  # first: what follows may overwrite states
    lm.keep([len(text) - 1 for text in texts], path, at=at)
    return found


def along(states: Tensor, path: Tensor) -> Tensor:
    """States (A, N+1, D) of the anchor and the nodes -> (A, m+1, D) of the anchor and of the nodes path (A, m)."""
    columns = torch.nn.functional.pad(path.clamp(min=0) + 1, (1, 0))
    return states.gather(1, columns.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
