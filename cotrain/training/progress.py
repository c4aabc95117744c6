"""Progress of a training in [0, 1], which drives warm-up, decay, the switch of losses and the cosine."""

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR


@dataclass
class Progress:
    """steps: of the whole training. minutes: its budget of time, None without one; elapsed: seconds of it that are
    spent, kept in checkpoints. Only training counts, not texts sampled before it, validations and measurements.
    whole: minutes of the run, left: what its other parts leave of them, see `run_budget`.

    Whichever of both is further decides: training ends after its steps or its minutes, and its schedule with it.
    """

    steps: int
    minutes: float | None = None
    elapsed: float = 0.0
    whole: float | None = None
    left: float = inf

    def at(self, step: int) -> float:
        """The share of the training that is done behind so many steps, in [0, 1]."""
        spent = self.elapsed / (60 * self.minutes) if self.minutes else 0.0
        return min(max(step / max(self.steps, 1), spent), 1.0)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"elapsed": self.elapsed, "whole": self.whole, "left": self.left}

    def leave(self, minutes: float) -> None:
        """So many minutes are left of the run; training has no more of them than its own budget."""
        self.left = minutes
        self.minutes = min(minutes, self.minutes or inf)

    def resume(self, kept: dict[str, Any]) -> None:
        """Go on from a checkpoint's state. Minutes that the run was given since are all the training's."""
        self.elapsed = kept["elapsed"]
        if self.whole and kept["whole"]:
            self.leave(kept["left"] + self.whole - kept["whole"])

    def expected(self, step: int) -> int:
        """Steps that there will be, at the speed so far."""
        return min(self.steps, max(round(step / self.at(step)), step)) if step else self.steps


def trapezoid(optimizer: torch.optim.Optimizer, progress: Progress, warmup: float, decay: float) -> LambdaLR:
    """Linear warm-up over the first fraction `warmup` of the training, a constant, then a linear decay to 0 over the
    last fraction `decay`. Where the training is made longer, a resumed one goes on at its new, smaller progress."""

    def factor(step: int) -> float:
        done = progress.at(step)
        rise = (done + 1 / max(progress.steps, 1)) / warmup if warmup else 1.0
        fall = (1 - done) / decay if decay else float(done < 1)
        return max(0.0, min(1.0, rise, fall))

    return LambdaLR(optimizer, factor)


def refuse(warmup: float, decay: float, steps: int) -> None:
    """Raise ValueError, naming the key, for what are no fractions of the training."""
    for key, value in (("warmup", warmup), ("decay", decay)):
        if not 0 <= value <= 1:
            said = f"; {value:g} of {steps} steps are optimizer.{key}={value / steps:.2g}" if 1 < value <= steps else ""
            raise ValueError(f"optimizer.{key}: a fraction of the training in [0, 1], not {value:g}{said}")
