"""Users' own processors: called row by row and place by place, with ids that were read from the device.

They cost reads and copies at every place, which no other setting does.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from inference.request import Request


def processed(
    logits: Tensor,
    rows: Sequence[Request],
    own: Sequence[int],
    x: Tensor,
    k: Sequence[int],
    first: int,
    messages: dict[int, str],
) -> Tensor:
    """Logits (A, n, V) of the places after first, first + 1, ... drafted ids x (A, K), own processors applied in rows
    `own`; a new tensor.

    None is asked about a text that cannot be: behind a row's own k, behind an end, or behind a draft without mass. What
    one raises is kept in `messages` by row, and leaves no token there.
    """
    logits, drafts = logits.clone(), x.tolist()
    for a in own:
        for place in range(logits.shape[1]):
            draft = drafts[a][: first + place]
            if len(draft) > k[a] or not rows[a].ends.isdisjoint(draft):
                break
            if place and not bool(logits[a, place - 1, draft[-1]] > -math.inf):
                break
            if not _apply(logits[a, place : place + 1], rows[a], draft, a, messages):
                break
    return logits


def _apply(place: Tensor, row: Request, draft: list[int], a: int, messages: dict[int, str]) -> bool:
    """Whether the processors of one row answered; they overwrite `place` (1, V)."""
    ids = torch.tensor([row.text + draft], dtype=torch.int64, device=place.device)
    scores = place.clone()
    try:
        for processor in row.sampling.processors:
            scores = processor(ids, scores)
        place.copy_(scores)
    except Exception as error:  # whatever a user's code raises ends its own row alone
        messages.setdefault(a, f"Sampling.processors: {type(error).__name__}: {error}")
        place.fill_(-math.inf)
        return False
    return True
