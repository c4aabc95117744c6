"""Prompts of several rows, stored in slots."""

from collections.abc import Sequence

import torch

from inference.models.lm import LM
from inference.models.passes import Layers, States


def padded(rows: Sequence[list[int]]) -> list[list[int]]:
    """Rows of one length, each padded on the right with its own last id: no row reads an id that is not its own."""
    width = max(map(len, rows))
    return [row + row[-1:] * (width - len(row)) for row in rows]


def store_prompts(lm: LM, low: int, prompts: Sequence[list[int]], chunk: int = 512, *, states: Layers = ()) -> States:
    """Store all but the last token of each prompt in slots low, low + 1, ..., `chunk` positions a pass.

    Returns the states (A, n, D) of the layers `states`: column j is of a prompt's token j; those past its own are of no
    token.
    """
    parts = [lm.no_states(len(prompts), states)]
    for start in range(0, max(map(len, prompts)) - 1, chunk):
        tails = [prompt[:-1][start : start + chunk] or prompt[:1] for prompt in prompts]
        ids = torch.tensor(padded(tails), device=lm.device)
        parts.append(lm.store(ids, [start] * len(prompts), low, states=states))
    return {layer: torch.cat([part[layer] for part in parts], 1) for layer in states}
