"""The results of a model's pass, and the extra inputs of a pass over a tree of drafts.

A rows, n ids per row, D width, V vocabulary, N nodes of a tree.
"""

from collections.abc import Mapping
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor

Layers = tuple[int, ...]
States = Mapping[int, Tensor]  # of layers, each (A, n, D)
# a lock around every use of models: engines share models with their hooks, slots and CUDA graphs
ALONE = RLock()
LAST = -1  # layer number of the states that the head reads, after the final norm


class ChainDraws(NamedTuple):
    """What an operator needs to draw the drafts of chains, where nothing else decides about them. u (A, k): uniforms.
    temperature (A,): above 0; empty where all drafts are the likeliest tokens. tails (A,): 1 - top-p; empty for
    none."""

    u: Tensor
    temperature: Tensor
    tails: Tensor


class Pass(NamedTuple):
    """The result of a pass. logits (A, n, V), or (A, 1, V) if only one id of each row was requested. states: for each
    requested layer, by its number, (A, n, D).

    Layers are numbered as in transformers' `hidden_states`: 0 is the embeddings, i the residual stream after i decoder
    layers, `LAST` the input of the head.
    """

    logits: Tensor
    states: States = {}


class Branches(NamedTuple):
    """The inputs of a pass over n columns of a tree of N nodes, in addition to positions. anchor (A, 1): the slot of
    each text's last token (the anchor). slots (A, n): the slots that the columns' keys and values are written to. seen
    (A, n), int64: for each column, bit c is set if it attends to column c (column 0 is the anchor, column i + 1 node
    i). depths (A, N + 1): each column's depth, 0 for the anchor; None for a pass without sliding windows or chunks."""

    anchor: Tensor
    slots: Tensor
    seen: Tensor
    depths: Tensor | None = None


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all launched work, so that a clock measures the work and not only its launch."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
