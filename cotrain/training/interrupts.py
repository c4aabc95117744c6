"""Signals that end a run, and checkpoints from which the same command resumes it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from types import FrameType
from typing import Any
from zipfile import BadZipFile, ZipFile

import lightning
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback

from cotrain.errors import Interrupted, UserError, first_line
from cotrain.training.distributed import ends_step
from inference.drafts.atomic import new_file

ENDING = (signal.SIGINT, signal.SIGTERM)
CURSOR = b"\x1b[?25h"  # shows the cursor again, which a display hides
TIME = 1  # the result of `Keeper._agreed` if a checkpoint is due; numbers of signals are larger


class Signals:
    """Handler of SIGINT and SIGTERM. The first signal ends the run by raising Interrupted: at once, or after the
    current step while `deferring` is set, that is, during training. A second signal ends the process at once."""

    def __init__(self) -> None:
        self.received, self.deferring = 0, False

    def __call__(self, number: int, _: FrameType | None = None) -> None:
        if self.received:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), CURSOR)
            os._exit(128 + number)
        self.received = number
        if not self.deferring:
            self.check()
        print("\nstopping after this step; a second signal ends at once", file=sys.stderr, flush=True)

    def check(self, message: str = "interrupted; the same command resumes") -> None:
        """Raise Interrupted with `message` if a signal was received."""
        if self.received:
            raise Interrupted(self.received, message)

    def listen(self) -> None:
        """Make this object the handler of both signals. Outside the main thread, where Python allows no handlers,
        nothing is done."""
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                signal.signal(number, self)


@contextmanager
def listening() -> Iterator[Signals]:
    """Yield a handler that makes SIGINT and SIGTERM end the block by raising Interrupted (`Signals`). The earlier
    handlers are restored afterwards."""
    before = {number: signal.getsignal(number) for number in ENDING}
    signals = Signals()
    signals.listen()
    try:
        yield signals
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


class Checkpoints(TorchCheckpointIO):
    """Writes checkpoints. A checkpoint is written next to the old one and then renamed, so that one of the two is
    always whole. Lightning's own class writes to the temporary directory, and copies over the old checkpoint if that is
    on another file system."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        with new_file(Path(path)) as new:
            torch.save(checkpoint, new)


def read_saved(path: Path) -> dict[str, Any]:
    """Return the dictionary that torch saved in a file, with tensors on the CPU. The file is a zip archive, whose
    checksums torch does not compare. Raises UserError, which names the file and the remedy, if the file is damaged or
    has no dictionary."""
    try:
        with ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged} is wrong")
        saved = torch.load(path, weights_only=True, map_location="cpu")
        if isinstance(saved, dict):
            return saved
        reason = f"it holds a {type(saved).__name__}"
    except (RuntimeError, EOFError, ValueError, LookupError, UnpicklingError, OSError, BadZipFile) as error:
        if "allocate" in str(error):  # out of memory: the file is not damaged
            raise
        reason = first_line(error)
    raise UserError(f"{path} cannot be read ({reason}): delete it, and the same command writes it again from the start")


class Keeper(Callback):
    """Callback that saves a checkpoint every `minutes`, and when a signal ends the run. It must come after the
    callbacks whose state is saved.

    After a step with a validation it saves none, since the validation saves a checkpoint with its figures.
    """

    def __init__(self, path: Path, minutes: float, signals: Signals) -> None:
        self.path, self.seconds, self.signals = path, 60 * minutes, signals
        self.saved, self.validated = 0.0, -1

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.saved = time.monotonic()
        self.signals.listen()  # the trainer has replaced the handler of SIGTERM by one that may end within a step
        self.signals.deferring = True

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self.validated == trainer.global_step and self._agreed(trainer) > TIME:
            self._end(trainer.global_step)

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, _: Any, batch: Any, __: int) -> None:
        if not ends_step(batch) or validates(trainer):
            return
        if reason := self._agreed(trainer):
            trainer.save_checkpoint(self.path)
            self.saved = time.monotonic()
        if reason > TIME:
            self._end(trainer.global_step)

    def on_validation_end(self, trainer: lightning.Trainer, module: Any) -> None:
        self.validated, self.saved = trainer.global_step, time.monotonic()

    def on_train_end(self, *_: Any) -> None:
        self.signals.deferring = False

    def on_exception(self, *_: Any) -> None:
        self.signals.deferring = False

    def _end(self, step: int) -> None:
        self.signals.received = self.signals.received or signal.SIGTERM  # another process received it
        self.signals.check(f"interrupted at step {step}, which is saved; the same command resumes")

    def _agreed(self, trainer: lightning.Trainer) -> int:
        """Return the largest value over all processes: the number of a received signal, TIME if a checkpoint is due, or
        0."""
        mine = self.signals.received or TIME * (time.monotonic() - self.saved >= self.seconds)
        if trainer.world_size == 1:
            return mine
        reason = torch.tensor(float(mine), device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(reason, reduce_op="max"))


def validates(trainer: lightning.Trainer) -> bool:
    """Return whether the trainer runs a validation after the current batch."""
    batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
    every = trainer.val_check_batch
    return bool(trainer.should_stop) or (every is not None and batches % every == 0)
