"""What a student sees of the target."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Seen:
    """The target's states of a batch of texts, by layer: 0 the embeddings, i the residual stream behind i decoder
    layers, LAST. states: layer -> (B, T, D)."""

    states: Mapping[int, Tensor]
