"""Children of the nodes of a tree of drafts, of rows with settings of their own.

A rows, n nodes, m children of each, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from inference.batched.distributions import Regimes
from inference.proposers.topology import likeliest, sampled
from inference.sampling import one_hot


def children(
    regimes: Regimes, scores: Tensor, m: int, noise: Callable[[], Tensor], certain: bool
) -> tuple[Tensor, Tensor]:
    """Children (A, n, m) of nodes with logits scores (A, n, V), and the distributions (A, n, m, V) they were drawn
    from.

    Sampled without replacement from each row's distribution with Gumbel noise (A, n or 1, V); the likeliest, with
    one-hot distributions, in rows of temperature 0, or in all where `certain`. A distribution is NaN where there is
    none.
    """
    probs = regimes.probs(scores)  # (A, n, V)
    shape = *probs.shape[:2], m, probs.shape[-1]
    if certain or regimes.sure:
        return _likeliest(scores, probs, m)
    ids, distributions = sampled(probs, noise(), m), probs.unsqueeze(2).expand(shape)
    if not regimes.some_greedy:
        return ids, distributions
    best, sure = _likeliest(scores, probs, m)
    greedy = regimes.greedy.view(-1, 1, 1)
    return torch.where(greedy, best, ids), torch.where(greedy.unsqueeze(-1), sure, distributions)


def _likeliest(scores: Tensor, probs: Tensor, m: int) -> tuple[Tensor, Tensor]:
    ids = likeliest(scores, m)
    none = (probs[..., :1] - probs[..., :1]).unsqueeze(2)  # 0, or NaN
    return ids, one_hot(ids, probs.unsqueeze(2).expand(*ids.shape, -1)) + none
