"""The time that training has taken, in checkpoints too, and the bar that shows what is left of it."""

import sys
import time
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

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

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed": self.progress.elapsed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.progress.elapsed = state_dict["elapsed"]

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


class Bar(TQDMProgressBar):
    """One bar for the whole training in steps, with time left; a resumed one begins where the run does. Validations,
    which are one call each, have none."""

    def __init__(self, progress: Progress | None = None) -> None:
        super().__init__(refresh_rate=5)
        self.progress = progress

    def total(self, trainer: Any) -> int:
        """Steps that there will be."""
        return self.progress.expected(trainer.global_step) if self.progress else trainer.max_steps

    def init_validation_tqdm(self) -> Any:
        return Tqdm(disable=True)

    def init_train_tqdm(self) -> Any:
        bar = super().init_train_tqdm()
        bar.bar_format = "{desc}{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}"
        return bar

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        super().on_train_start(trainer, *_)
        self._begin(trainer)  # a run that goes on begins no epoch

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        super().on_train_epoch_start(trainer)
        self._begin(trainer)

    def _begin(self, trainer: Any) -> None:
        bar = self.train_progress_bar
        bar.set_description("training", refresh=False)
        bar.initial = bar.n = trainer.global_step
        bar.total = self.total(trainer)
        bar.refresh()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        bar, step = self.train_progress_bar, trainer.global_step
        if step == bar.n or (step % self.refresh_rate and step < trainer.max_steps):
            return
        bar.n, bar.total = step, self.total(trainer)
        bar.set_postfix(self.get_metrics(trainer, module))

    def get_metrics(self, *arguments: Any) -> dict[str, Any]:
        found = super().get_metrics(*arguments)
        return {name: value for name, value in found.items() if name != "v_num"}
