"""The progress of a training in steps and in time, its clock and its progress bar."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar

from cotrain.console import Display
from cotrain.training.deadline import Deadline
from cotrain.training.distributed import ends_step

NEVER = sys.maxsize  # batches between validations, if a budget of time decides when they are due
REFRESH, SHOWN = 5, ("loss", "acceptance")  # steps between updates of the display, and the figures that it shows


@dataclass
class Progress:
    """The progress of a training, which ends after its steps or its minutes, whichever comes first. The learning-rate
    schedule ends with it.

    steps: number of steps. limit: the minutes trainer.minutes=, or None.
    elapsed: seconds of training so far, without sampling, validations and measurements; saved in checkpoints.
    texts: number of held-out texts per temperature in an evaluation; None: all, or not known yet.
    deadline: the run's time limit.
    """

    steps: int
    limit: float | None = None
    elapsed: float = 0.0
    texts: int | None = None
    deadline: Deadline = field(default_factory=Deadline)

    @property
    def minutes(self) -> float | None:
        """Return the training's time limit in minutes: trainer.minutes=, or the minutes that minutes= leaves for
        training, whichever is less. None: no limit."""
        least = min(self.limit or inf, self.deadline.left)
        return None if least == inf else least

    def at(self, step: int) -> float:
        """Return which share of the training is done after `step` steps, in [0, 1]."""
        spent = self.elapsed / (60 * self.minutes) if self.minutes else 0.0
        return min(max(step / max(self.steps, 1), spent), 1.0)

    def state(self) -> dict[str, Any]:
        """Return the values that a checkpoint stores, for `resume`."""
        whole, left = self.deadline.minutes, self.deadline.left
        return {"elapsed": self.elapsed, "whole": whole, "left": left, "texts": self.texts}

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from the values that a checkpoint stored. If minutes= has been raised since, training gets the
        difference. state: the result of `state` at that time."""
        self.elapsed, self.texts = state["elapsed"], state.get("texts")
        if self.deadline.minutes and state["whole"]:
            self.deadline.left = state["left"] + self.deadline.minutes - state["whole"]

    def expected(self, step: int) -> int:
        """Return the expected number of steps in the training, by its speed over the first `step` steps."""
        return min(self.steps, max(round(step / self.at(step)), step)) if step else self.steps


class Clock(Callback):
    """Callback that counts the seconds of training in `progress`, without validations. With a time limit, it ends the
    training when the time is over, and starts a validation after each 1 / `validations` of the training."""

    def __init__(self, progress: Progress, validations: int) -> None:
        self.progress, self.validations = progress, validations
        self.since, self.shares = 0.0, 0

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.since = time.monotonic()
        self.shares = self._shares(trainer)
        self._schedule_rates(trainer)

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, _: Any, batch: Any, __: int) -> None:
        now = time.monotonic()
        self.progress.elapsed += now - self.since
        self.since = now
        if self.progress.minutes and ends_step(batch):
            self._agree(trainer)
            self._schedule_validation(trainer)

    def on_validation_end(self, *_: Any) -> None:
        self.since = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of the `with` block as training. Only for callbacks that stand after the `Clock` in the
        trainer's list, since for them the `Clock` has already counted the step."""
        yield
        self.since = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return self.progress.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.progress.resume(state_dict)

    def _agree(self, trainer: lightning.Trainer) -> None:
        """Set the elapsed time of all processes to its mean over processes, since all must end at the same step."""
        if trainer.world_size > 1:
            mine = torch.tensor(self.progress.elapsed, device=trainer.strategy.root_device)
            self.progress.elapsed = float(trainer.strategy.reduce(mine, reduce_op="mean"))

    def _schedule_validation(self, trainer: lightning.Trainer) -> None:
        shares, self.shares = self.shares, self._shares(trainer)
        batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        trainer.val_check_batch = batches if self.shares > shares else NEVER
        if self.progress.at(trainer.global_step) >= 1:
            trainer.should_stop = True  # a last validation follows, see `interrupts.validates`

    def _shares(self, trainer: lightning.Trainer) -> int:
        return int(self.progress.at(trainer.global_step) * self.validations)

    def _schedule_rates(self, trainer: lightning.Trainer) -> None:
        """Set the learning rate of the next step. The rate in a checkpoint was computed for the training's expected
        length when it was saved, which may have changed."""
        for config in trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            rates = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            for group, base, factor in rates:
                group["lr"] = base * factor(scheduler.last_epoch)


class Bar(ProgressBar):
    """The progress bar of the whole training, in steps, with the time left. It begins at the step of a resumed run.
    Validations have no bar."""

    def __init__(self, progress: Progress | None = None) -> None:
        super().__init__()
        self.progress, self.hidden = progress, False
        self.display: Display | None = None

    def disable(self) -> None:
        """Hide the bar. Lightning calls this on all processes except the first."""
        self.hidden = True

    def enable(self) -> None:
        self.hidden = False

    def total(self, trainer: Any) -> int:
        """Return the expected number of steps."""
        return self.progress.expected(trainer.global_step) if self.progress else trainer.max_steps

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.display = Display("training", self.total(trainer), "steps", trainer.global_step, hidden=self.hidden)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        step, display = trainer.global_step, self.display
        if display and step > display.done and (step % REFRESH == 0 or step >= trainer.max_steps):
            display.to(step, self._note(trainer, module), self.total(trainer))

    def on_train_end(self, *_: Any) -> None:
        if self.display:
            self.display.close()
        self.display = None

    def on_exception(self, *_: Any) -> None:
        self.on_train_end()

    def _note(self, trainer: Any, module: Any) -> str:
        figures = {name: value for name, value in self.get_metrics(trainer, module).items() if name != "v_num"}
        figures |= {name: value for name, value in getattr(module, "step_figures", {}).items() if name in SHOWN}
        return ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if isinstance(value, float))
