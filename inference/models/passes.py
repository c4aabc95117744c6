"""What a pass of a model leaves."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

Layers = tuple[int, ...]
States = Mapping[int, Tensor]  # of layers, each (A, n, D)
LAST = -1  # the states that the head reads, behind the final norm


class Pass(NamedTuple):
    """logits (A, n, V), or (A, 1, V) where one id of each row was asked for; states (A, n, D) by layer, of the layers
    asked for alone.

    Layers are numbered as transformers' `hidden_states`: 0 are the embeddings, i the residual stream behind i decoder
    layers, `LAST` what the head reads.
    """

    logits: Tensor
    states: States = {}
