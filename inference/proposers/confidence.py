"""A confidence head. It predicts whether the next draft is accepted if all drafts before it were (DSpark, 2607.05147).

It reads what the draft's head reads at that depth, and four numbers of the draft's distribution q, see `measures`. If
the draft has a Markov head, it also reads the row of the token drafted before. It reads nothing of the token that it
decides about. A policy that uses it to end a round therefore changes no distribution that a draft is drawn from, and
verification stays exact.
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
    """Return four numbers (..., 4) of log q (..., V): entropy of q (nats), probability of the likeliest token, its
    logarithm, and its margin over the second likeliest token."""
    log_probs = wide(log_probs)
    first, second = log_probs.topk(2).values.unbind(-1)
    # a third of the time of torch.special.entr; a clamped logarithm keeps 0 log 0 from being NaN
    entropy = -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)
    return torch.stack((entropy, first.exp(), first, first.exp() - second.exp()), -1)


class ConfidenceHead(nn.Module):
    """Two linear maps to a logit, each usable alone. `proj` reads `width` numbers of the draft's state; its name and
    shape are those that engines load. `with_q` reads the measures of q too.

    The weights are not trained with the draft's. They are fitted to the finished draft
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
        """Return probabilities (...) for the draft's states (..., width), in float32 at least. log_probs (..., V): log
        q at the row's temperature, before any cut. If it is None, the probabilities follow from the states alone."""
        read, by = wide(read), self.proj
        if log_probs is not None:
            read, by = torch.cat((read, measures(log_probs).to(read)), -1), self.with_q
        return torch.sigmoid(F.linear(read, by.weight.to(read), by.bias.to(read)).squeeze(-1))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply moves to a device, but no casts."""

        def moved(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return new if tensor.is_meta or new.is_meta else tensor.to(new.device)

        return super()._apply(moved, recurse)
