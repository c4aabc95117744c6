"""The outcome of a round as one tensor, which the host reads once: for chains and for trees of drafts.

A rows, N drafts, D drafts of the longest path (N of a chain), V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from inference.proposers.base import Proposal
from inference.sampling.distributions import is_missing

COLUMNS = 6  # of a table before its drafts


class RoundResult(NamedTuple):
    """table (A, COLUMNS + D), whose columns are: drafts accepted; the token after them; depth of the drafts that have
    distributions; 1 if that token has no distribution (it is then no token); 1 if any position of the target's pass has
    none; 1 if a draft was rejected after the accepted ones; the drafts, of a tree those of the accepted path.
    path (A, D): its nodes, -1 past the last; None for a chain."""

    table: Tensor
    path: Tensor | None = None


def round_result(
    p: Tensor, proposal: Proposal, verification: Any, last: Tensor, length: Tensor, asked: Tensor
) -> RoundResult:
    """p (A, N+1, V); verification: of the rule, with a `path` if the proposal is a tree; last (A,): the token after the
    accepted drafts; length (A,): drafts that have distributions, out of the drafts `asked` for."""
    missing, accepted = is_missing(p), verification.accepted.unsqueeze(1)  # (A, N+1), (A, 1)
    stains = missing.any(1, keepdim=True)
    if proposal.tree is None:
        k = length.unsqueeze(1)
        columns = accepted, last.unsqueeze(1), k, missing.gather(1, accepted), stains, accepted < k
        return RoundResult(torch.cat((*columns, proposal.x), 1))
    path, end = verification.path, (verification.path + 1).amax(1, keepdim=True)  # a node comes after its ancestors
    used = torch.arange(p.shape[1], device=p.device) <= length.unsqueeze(1)
    depth = (proposal.tree.on(p.device).depths * used).amax(1, keepdim=True)
    stains = stains | (length < asked).unsqueeze(1)
    rejected = (used[:, 1:] & (proposal.tree.on(p.device).parents + 1 == end)).any(1, keepdim=True)
    columns = accepted, last.unsqueeze(1), depth, missing.gather(1, end), stains, rejected
    return RoundResult(torch.cat((*columns, proposal.x.gather(1, path.clamp(min=0))), 1), path)


def column_of(path: Tensor | None, slot: int, n: int) -> int:
    """The column of the pass at the last of row `slot`'s n accepted drafts; reads from the device if there is a
    path."""
    return n if path is None else int(path[slot].amax()) + 1
