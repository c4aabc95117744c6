"""A confidence head: the probability that the next draft is accepted, from the draft's own state (DSpark, 2607.05147).

It reads what the draft's head reads at that depth and, of a draft with a Markov head, the row of the token drafted
before. It reads nothing of the token that it decides about. So a policy that ends a round by it changes no
distribution that a draft is drawn from, and verification stays exact. Names and shapes are those that engines load.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inference.proposers.markov import ZeroLinear
from inference.sampling import wide


class ConfidenceHead(nn.Module):
    """One linear map of what it reads, `width` numbers, to a logit. Its weights are not trained with the draft's: they
    are fitted to the finished draft (`cotrain.evaluation.confidence`), and stay float32 when the network is cast.
    Before that all probabilities are 1/2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = ZeroLinear(width, 1, dtype=torch.float32).requires_grad_(False)

    @property
    def width(self) -> int:
        return self.proj.in_features

    def forward(self, read: Tensor) -> Tensor:
        """What it reads (..., width) -> probabilities (...), in float32 at least."""
        read = wide(read)
        weight, bias = self.proj.weight.to(read), self.proj.bias.to(read)
        return torch.sigmoid(F.linear(read, weight, bias).squeeze(-1))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Of a cast and a move, only the move."""

        def moved(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return new if tensor.is_meta or new.is_meta else tensor.to(new.device)

        return super()._apply(moved, recurse)
