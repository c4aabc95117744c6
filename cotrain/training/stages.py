"""Losses one after the other, and what else leads a training at first."""

from collections.abc import Sequence
from dataclasses import dataclass

from cotrain.losses.spec import MERGED, LossSpec


@dataclass(frozen=True)
class Stage:
    """A loss that is used until this fraction of the steps is done."""

    until: float
    loss: LossSpec


def current(stages: Sequence[Stage], progress: float) -> LossSpec:
    """The loss at a progress in [0, 1]: the first stage that has not ended, else the last."""
    return next((stage.loss for stage in stages if progress < stage.until), stages[-1].loss)


def leading(weight: float, stages: Sequence[Stage], done: float) -> float:
    """The cosine's weight: it leads early on, and falls in a line to 0 where the first stage ends."""
    return weight * max(0.0, 1 - done / stages[0].until) if stages[0].until else 0.0


def refuse_merged(stages: Sequence[Stage], cosine: float) -> None:
    """Raise ValueError for what merged distributions do not have: some losses, and hidden states to compare."""
    if not all(stage.loss.merged for stage in stages):
        raise ValueError(
            f"trainer.top: the loss is not one of {', '.join((*MERGED, 'mix'))}, which kept distributions have"
        )
    if cosine:
        raise ValueError("trainer.top: distributions are kept, not hidden states: init.cosine=0")
