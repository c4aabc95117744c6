"""Loggers of a run. A run always logs to TensorBoard. With trainer.logger=wandb it also logs to Weights & Biases.

Loggers receive curves during training, and the final figures and the settings at the end.
"""

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from cotrain.board import tags
from cotrain.config.settings import TrainConfig, flat
from cotrain.errors import UserError
from cotrain.ranks import rank
from inference.drafts.atomic import write_atomic

WANDB = "wandb"
RUN_ID = "wandb_run.txt"  # the file with the id of the run at Weights & Biases, so that a resumed run continues it

# the settings in TensorBoard's table of hyperparameters: those in which runs usually differ
SHOWN = (
    "label",
    "target.path",
    "quantisation.kind",
    "draft.kind",
    "draft.layers",
    "draft.width",
    "draft.quantisation",
    "init.kind",
    "init.layers",
    "loss.first",
    "loss.then",
    "loss.switch",
    "optimizer.lr",
    "optimizer.weight_decay",
    "trainer.steps",
    "trainer.minutes",
    "minutes",
    "trainer.batch",
    "trainer.accumulate",
    "trainer.seed",
    "rollout.texts",
    "regime.temperature",
    "regime.top_k",
    "regime.top_p",
    "objective",
    "verify",
    "policy.k",
)


def tensorboard(folder: Path, again: int | None = None) -> TensorBoardLogger:
    """Return the TensorBoard logger of a run. folder: the run's folder; TensorBoard shows the run under its name.
    again: the first step of a resumed run, from which on older curves are replaced; None for a new run."""
    return TensorBoardLogger(folder / tags.CURVES, name="", version=folder.resolve().name, purge_step=again)


@contextmanager
def other_loggers(cfg: TrainConfig, folder: Path) -> Iterator[list[Logger]]:
    """Yield the loggers that trainer.logger= adds to TensorBoard, and close them when the block ends. The list is empty
    without trainer.logger=wandb, and in all processes except the first.

    Raises UserError if Weights & Biases rejects the run, for example because the user is not logged in.
    """
    if cfg.trainer.logger != WANDB or rank():
        yield []
        return
    logger = _wandb(cfg, folder)
    try:
        yield [logger]
    except BaseException:
        logger.experiment.finish(exit_code=1)
        raise
    logger.experiment.finish()


def _wandb(cfg: TrainConfig, folder: Path) -> WandbLogger:
    """Return the logger for Weights & Biases. The project is the environment variable WANDB_PROJECT, or "cotrain". The
    id of the logged run is read from the run's folder or written there."""
    import wandb

    project, file = os.environ.get("WANDB_PROJECT", "cotrain"), folder / RUN_ID
    run_id = file.read_text(encoding="utf-8") if file.exists() else uuid.uuid4().hex[:8]
    logger = WandbLogger(cfg.label or folder.name, save_dir=folder, project=project, id=run_id)
    try:
        logger.log_hyperparams(cfg.model_dump())
    except wandb.Error as error:
        message, mend = " ".join(str(error).split()).rstrip("."), "log in with `wandb login`, or set WANDB_MODE=offline"
        raise UserError(f"trainer.logger=wandb: {message}; {mend}") from error
    write_atomic(file, run_id)
    return logger


def log(trainer: lightning.Trainer, figures: Mapping[str, float], step: int) -> None:
    """Write figures to every logger of the trainer. step: the number of completed optimiser steps."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(figures), step)


def final_figures(alpha: float, tau: float, report: Mapping[str, Any]) -> dict[str, float]:
    """Return the final figures of a run by name. alpha, tau: the acceptance and the tokens per target call on all
    held-out texts in the regime. report: the measurement's report, which adds the speed-up with its interval, the timed
    tau, and exactness as 1 or 0; {} if nothing was measured."""
    held_out = {"acceptance": alpha, "tau": tau}
    if not report:
        return held_out
    speed = report["speedup"]["whole"]
    ends = {f"speedup{end}": speed[key] for key, end in (("value", ""), ("low", "_low"), ("high", "_high"))}
    known = {name: value for name, value in ends.items() if value is not None}
    timed = {"tau_timed": report["acceptance"]["tau"]["measured"], "exact": float(report["exactness"]["passed"])}
    return held_out | known | timed


def write_final(cfg: TrainConfig, loggers: Sequence[Logger], step: int, figures: Mapping[str, float]) -> None:
    """Write final figures to each logger, and finalize it. step: the last step. In TensorBoard, the figures and the
    settings `SHOWN` also become a row of the table of hyperparameters."""
    settings = dict(flat(cfg.model_dump()))
    named = {f"{tags.FINAL}/{name}": value for name, value in figures.items()}
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams({name: settings.get(name) for name in SHOWN}, named, step)
        else:
            logger.log_metrics(named, step)
        logger.finalize("success")
