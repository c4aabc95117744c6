"""The time that training has taken, in checkpoints too."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from cotrain.training.progress import Progress

NEVER = sys.maxsize  # batches between validations, where progress decides when they are due


class Clock(Callback):
    """Counts the seconds of training into `progress`, without validations. With a budget of minutes it ends training
    with these, and asks for a validation whenever another share 1 / validations of the training is done."""

    def __init__(self, progress: Progress, validations: int) -> None:
        self.progress, self.validations = progress, validations
        self.since, self.shares = 0.0, 0

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.since = time.monotonic()
        self.shares = self._shares(trainer)
        self._scheduled(trainer)

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, _: Any, batch: Any, __: int) -> None:
        now = time.monotonic()
        self.progress.elapsed += now - self.since
        self.since = now
        index, number = batch.get("group", (0, 1))
        if self.progress.minutes and index + 1 == number:
            self._agree(trainer)
            self._due(trainer)

    def on_validation_end(self, *_: Any) -> None:
        self.since = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens within, behind this callback's turn, is no training."""
        yield
        self.since = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return self.progress.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.progress.resume(state_dict)

    def _agree(self, trainer: lightning.Trainer) -> None:
        """One time for all processes, which must end at one step."""
        if trainer.world_size > 1:
            mine = torch.tensor(self.progress.elapsed, device=trainer.strategy.root_device)
            self.progress.elapsed = float(trainer.strategy.reduce(mine, reduce_op="mean"))

    def _due(self, trainer: lightning.Trainer) -> None:
        shares, self.shares = self.shares, self._shares(trainer)
        batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        trainer.val_check_batch = batches if self.shares > shares else NEVER
        if self.progress.at(trainer.global_step) >= 1:
            trainer.should_stop = True  # which validates

    def _shares(self, trainer: lightning.Trainer) -> int:
        return int(self.progress.at(trainer.global_step) * self.validations)

    def _scheduled(self, trainer: lightning.Trainer) -> None:
        """The rate of the next step: a checkpoint's is of the training's length when it was kept."""
        for config in trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            rates = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            for group, base, factor in rates:
                group["lr"] = base * factor(scheduler.last_epoch)
