"""The total variation between target and draft: how much of it a few positions contribute, and the worst positions as
text."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cotrain.console import Counter
from cotrain.evaluation.held_out import HeldOut
from cotrain.evaluation.profile import positions, served_log_probs
from cotrain.losses import divergences
from cotrain.students.base import Student
from cotrain.teacher.target_model import Head

WORST, LIKELIEST, SHOWN = 12, 3, 48  # numbers of positions, of tokens per distribution, and of tokens before a position
PARTS = 20  # number of steps of the Lorenz curve
Decode = Callable[[list[int]], str]


@torch.no_grad()
def divergence(
    held: HeldOut, student: Student, head_target: Head, decode: Decode, read: Counter | None = None
) -> dict[str, Any]:
    """Return figures of the total variation 1 - sum_v min(p, q) on held-out texts. Both distributions have the
    temperature of these texts. If the draft's distribution depends on the depth, the figures are for the first drafted
    token of a round.

    head_target: the target's head, states (n, D) -> logits (n, V). decode: token ids -> text. read: a function that is
    called after each batch with its number of texts.

    The result has these entries. positions: their number. mean: the mean total variation. lorenz[i]: the share of the
    whole sum that the worst i / 20 of all positions contribute. worst: the worst positions, at most one per text, each
    with the text before it, the next token, and p and q of both models' most probable tokens.
    """
    distances: list[float] = []
    worst: dict[int, dict[str, Any]] = {}
    for theirs, guess, contexts, rows in positions(held, student, read):
        p, q = (
            served_log_probs(logits, held.temperature, held)
            for logits in (head_target(theirs), guess.head(guess.states))
        )
        variations = (1 - divergences.alpha(p, q)).clamp(min=0).tolist()
        for n, (row, context) in enumerate(zip(rows.tolist(), contexts.tolist(), strict=True)):
            if variations[n] > worst.get(row, {"tv": -1.0})["tv"]:
                worst[row] = {"tv": variations[n], "at": context, **_likeliest(p[n], q[n])}
        distances += variations
    most = sorted(worst.items(), key=lambda one: -one[1]["tv"])[:WORST]
    return {
        "positions": len(distances),
        "mean": sum(distances) / max(len(distances), 1),
        "lorenz": lorenz(distances),
        "worst": [_as_text(held, row, position, decode) for row, position in most],
    }


def lorenz(values: Sequence[float], parts: int = PARTS) -> list[float]:
    """Return, for i = 0 .. parts, the share of the sum that the largest i / parts of the values contribute (Lorenz
    1905, largest first).

    If i / parts is not a whole number of values, the next value counts in part. Without values, or if all are zero, the
    shares are i / parts.
    """
    whole = sum(values)
    if not whole:
        return [i / parts for i in range(parts + 1)]
    sums = torch.cumsum(torch.tensor([0.0, *sorted(values, reverse=True)], dtype=torch.float64), 0)
    at = torch.arange(parts + 1, dtype=torch.float64) * len(values) / parts
    low = at.long().clamp(max=len(values) - 1)
    return ((sums[low] + (at - low) * (sums[low + 1] - sums[low])) / whole).clamp(max=1).tolist()


def _likeliest(p: Tensor, q: Tensor) -> dict[str, list[tuple[int, float, float]]]:
    """Return (id, p, q) for the most probable tokens under the target ("target") and the draft ("draft"). p, q (V,):
    log probabilities."""
    tops = {"target": p.topk(LIKELIEST).indices, "draft": q.topk(LIKELIEST).indices}
    return {name: [(int(i), float(p[i].exp()), float(q[i].exp())) for i in ids] for name, ids in tops.items()}


def _as_text(held: HeldOut, row: int, position: dict[str, Any], decode: Decode) -> dict[str, Any]:
    """Return a position as an entry of the report, with its tokens decoded. row: the text's index. position: an entry
    of `worst` in `divergence`; its "at" is the number of tokens before it."""
    ids, at = held.texts.ids[row].tolist(), position["at"]  # number of tokens before it
    return {
        "tv": position["tv"],
        "domain": held.texts.domain[row],
        "before": decode(ids[max(at - SHOWN, 0) : at]),
        "next": decode([ids[at]]),
        **{
            side: [{"text": decode([token]), "p": p, "q": q} for token, p, q in position[side]]
            for side in ("target", "draft")
        },
    }
