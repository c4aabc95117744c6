"""The losses that loss.first= and loss.then= may name. This module does not import torch, so that settings can be
listed at once.

To add a loss, write its function in `divergences` (per position) or `sequence` (per text), and add its row here. If it
is per position, add the closed form of its gradient to `tests/cotrain/losses/test_divergences.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class LossDefinition:
    """How a loss is used.

    function: the name of its function; None if the function has the loss's own name.
    sequence: whether it is a loss of whole texts (module `sequence`). Otherwise its function (module `divergences`)
    maps log p and log q (..., V) at positions to a loss (...).
    weighted: whether each position is weighted by the target calls that acceptance there saves.
    argmax: whether it reads the target's most probable token. A pruned vocabulary must then not hide this token.
    """

    function: str | None = None
    sequence: bool = False
    weighted: bool = False
    argmax: bool = False


LOSSES = {
    "kl": LossDefinition(),
    "tv": LossDefinition(),
    "nla": LossDefinition(),
    "lk": LossDefinition(),
    "greedy": LossDefinition(argmax=True),
    "greedy_draft": LossDefinition(),
    "calls": LossDefinition(sequence=True),
    "calls_block": LossDefinition(sequence=True),
    # weighted by `acceptance.call_weights`: the gradient of `calls` with less variance
    "calls_tv": LossDefinition("tv", weighted=True),
}
REMOVED_LOSSES = {
    "rkl": "kl",
    "jsd": "lk",
    "match": "greedy_draft",
    "length": "calls",
    "length_block": "calls_block",
}  # with what to use instead
