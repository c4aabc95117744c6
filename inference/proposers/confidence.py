"""A confidence head: the probability that the next draft is accepted if all drafts before it were (DSpark, 2607.05147).

It reads what the draft's head reads at that depth, the row of the token drafted before if the draft has a Markov head,
and four numbers of the draft's distribution q, see `measures`. It reads nothing of the token that it decides about. So
a policy that ends a round by it changes no distribution that a draft is drawn from, and verification stays exact.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inference.models.markov import FromZero
from inference.sampling import wide

MEASURES = 4


def measures(log_probs: Tensor) -> Tensor:
    """log q (..., V) -> (..., 4): entropy of q (nats), probability of the likeliest token, its logarithm, and its
    margin over the second likeliest token."""
    log_probs = wide(log_probs)
    first, second = log_probs.topk(2).values.unbind(-1)
    entropy = torch.special.entr(log_probs.exp()).sum(-1)
    return torch.stack((entropy, first.exp(), first, first.exp() - second.exp()), -1)


class ConfidenceHead(nn.Module):
    """Two linear maps to a logit, each usable alone. `proj` reads `width` numbers of the draft's state; its name
    and shape are those that engines load. `with_q` reads the measures of q too.

    The weights are not trained with the draft's: they are fitted to the finished draft
    (`cotrain.evaluation.confidence`), and stay float32 when the network is cast. Before that all probabilities are 1/2.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = FromZero(width, 1, dtype=torch.float32)
        self.with_q = FromZero(width + MEASURES, 1, dtype=torch.float32)
        self.requires_grad_(False)

    @property
    def width(self) -> int:
        return self.proj.in_features

    def forward(self, read: Tensor, log_probs: Tensor | None = None) -> Tensor:
        """The draft's state (..., width) -> probabilities (...), in float32 at least. log_probs (..., V): log q at the
        row's temperature, before any cut; None: the probability by the state alone."""
        read, by = wide(read), self.proj
        if log_probs is not None:
            read, by = torch.cat((read, measures(log_probs).to(read)), -1), self.with_q
        return torch.sigmoid(F.linear(read, by.weight.to(read), by.bias.to(read)).squeeze(-1))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply moves to a device but no casts."""

        def moved(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return new if tensor.is_meta or new.is_meta else tensor.to(new.device)

        return super()._apply(moved, recurse)
