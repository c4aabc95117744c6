"""The progress of a training in steps and in time. This module has the clock, the budget of minutes, and the
display."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar

from cotrain.config.settings import TrainConfig, judged, learnt
from cotrain.console import Display

NEVER = sys.maxsize  # batches between validations, if a budget of time decides when they are due
# shares of the run's minutes (minutes=)
LEAST = 0.15  # training gets at least this share, even if the rest of the run takes too long
SAMPLING = {"train": 0.17, "held_out": 0.07}  # sampling gets at most this share, for all temperatures together
PROMPTS = 0.06  # sampling prompts of the target itself gets at most this share
JUDGING = 0.2  # validations and the evaluation of the exported checkpoint get at most this share
ONCE = 1 / 6  # one evaluation of the held-out texts gets at most this part of JUDGING
# durations of the end of a run
AFTER = 2.0  # seconds of evaluating the exported checkpoint with profiles, in units of one evaluation
MEASURING = 5.0  # the least seconds of the full measurement, in units of the measurement of a checkpoint
REFRESH, SHOWN = 5, ("loss", "acceptance")  # steps between updates of the display, and the figures that it shows


@dataclass
class Progress:
    """The steps and the time of a training. It ends after its steps or its minutes, whichever comes first, and its
    learning-rate schedule ends with it.

    steps: number of steps. minutes: budget of the training, or None without a limit. elapsed: seconds of training so
    far, without sampling, validations and measurements; it is saved in checkpoints. whole: minutes of the run. left:
    how many of these remain for training, see `left_of`. texts: number of held-out texts per temperature in an
    evaluation; None means that all are used, or that the number is not known yet.
    """

    steps: int
    minutes: float | None = None
    elapsed: float = 0.0
    whole: float | None = None
    left: float = inf
    texts: int | None = None

    @property
    def judging(self) -> float | None:
        """Return the seconds that one evaluation of the held-out texts may take, or None without a budget of the
        run."""
        return 60 * self.whole * JUDGING * ONCE if self.whole else None

    def at(self, step: int) -> float:
        """Return the share of the training that is done after `step` steps, in [0, 1]."""
        spent = self.elapsed / (60 * self.minutes) if self.minutes else 0.0
        return min(max(step / max(self.steps, 1), spent), 1.0)

    def state(self) -> dict[str, Any]:
        """Return the values that a checkpoint stores."""
        return {"elapsed": self.elapsed, "whole": self.whole, "left": self.left, "texts": self.texts}

    def leave(self, minutes: float) -> None:
        """Set the minutes that the run leaves for training. A smaller budget of the training itself still applies."""
        self.left = minutes
        self.minutes = min(minutes, self.minutes or inf)

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's values. If minutes= has grown since, training gets the difference."""
        self.elapsed, self.texts = state["elapsed"], state.get("texts")
        if self.whole and state["whole"]:
            self.leave(state["left"] + self.whole - state["whole"])

    def expected(self, step: int) -> int:
        """Return the number of steps of the training, as expected from its speed so far."""
        return min(self.steps, max(round(step / self.at(step)), step)) if step else self.steps


def time_limited(cfg: TrainConfig) -> bool:
    """Return whether a budget of time may end the training before its last step."""
    return bool(cfg.trainer.minutes or cfg.minutes)


@dataclass(frozen=True)
class Validation:
    """The seconds that a validation takes for evaluating the held-out texts and for measuring the checkpoint."""

    judging: float
    measuring: float = 0.0

    @property
    def seconds(self) -> float:
        return self.judging + self.measuring


def left_of(cfg: TrainConfig, spent: float, first: Validation) -> float:
    """Return how many minutes of the run's budget remain for training, at least the share LEAST of the budget.

    spent: seconds of the run before its first step. first: the first validation. Later ones are assumed to take as
    long. After the last one, the exported checkpoint is evaluated and measured in full.
    """
    assert cfg.minutes
    rest = spent + first.seconds * validations(cfg, first)
    if cfg.measure:
        rest += AFTER * first.judging + max(60 * cfg.bench.minutes, MEASURING * first.measuring)
    return max(cfg.minutes - rest / 60, LEAST * cfg.minutes)


def sampling_seconds(cfg: TrainConfig) -> dict[str, float]:
    """Return the seconds that sampling the texts of one temperature may take, by split. Return {} without a budget."""
    if not cfg.minutes:
        return {}
    sets = {"train": len(learnt(cfg)), "held_out": len(judged(cfg))}
    return {split: 60 * cfg.minutes * share / sets[split] for split, share in SAMPLING.items()}


def prompt_seconds(cfg: TrainConfig) -> float | None:
    """Return the seconds that sampling prompts (data=self) may take; None without a budget."""
    return 60 * cfg.minutes * PROMPTS if cfg.minutes else None


def validations(cfg: TrainConfig, first: Validation) -> int:
    """Return the number of validations that a run has time for after the first one. It is from 1 to
    trainer.validations."""
    most = cfg.trainer.validations
    if not cfg.minutes or not first.seconds:
        return most
    after = AFTER * first.judging * cfg.measure
    return max(min(most, int((JUDGING * 60 * cfg.minutes - after) / first.seconds) - 1), 1)


class Clock(Callback):
    """Callback that counts the seconds of training in `progress`, without validations. With a budget of minutes it ends
    the training when they are spent, and schedules a validation after each 1 / validations of the training."""

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
        index, number = batch.get("group", (0, 1))
        if self.progress.minutes and index + 1 == number:
            self._agree(trainer)
            self._schedule_validation(trainer)

    def on_validation_end(self, *_: Any) -> None:
        self.since = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop counting the time within the block. Callbacks that come after this one use it."""
        yield
        self.since = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return self.progress.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.progress.resume(state_dict)

    def _agree(self, trainer: lightning.Trainer) -> None:
        """Set one time for all processes, since all must end at the same step."""
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
        """Set the learning rate of the next step. The rate in a checkpoint was for the training's expected length at
        that time."""
        for config in trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            rates = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            for group, base, factor in rates:
                group["lr"] = base * factor(scheduler.last_epoch)


class Bar(ProgressBar):
    """The display of the whole training in steps, with the time left. It starts at the step of a resumed run.
    Validations have no display."""

    def __init__(self, progress: Progress | None = None) -> None:
        super().__init__()
        self.progress, self.hidden = progress, False
        self.display: Display | None = None

    def disable(self) -> None:
        """Hide the display. It is called on all processes except the first."""
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
        self._close()

    def on_exception(self, *_: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self.display:
            self.display.close()
        self.display = None

    def _note(self, trainer: Any, module: Any) -> str:
        figures = {name: value for name, value in self.get_metrics(trainer, module).items() if name != "v_num"}
        figures |= {name: value for name, value in getattr(module, "step_figures", {}).items() if name in SHOWN}
        return ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if isinstance(value, float))
