"""Where curves go: to TensorBoard always, and to Weights & Biases for those who ask for it."""

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import lightning
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from omegaconf import OmegaConf

from cotrain.board.tags import CURVES
from cotrain.config.settings import TrainConfig
from cotrain.errors import UserError
from cotrain.ranks import rank
from inference.drafts.atomic import write_atomic

WANDB = "wandb"
RUN_ID = "wandb_run.txt"  # in the run's folder: the same command goes on with the same curves


def log(trainer: lightning.Trainer, figures: Mapping[str, float], step: int) -> None:
    """To every logger of the trainer, at x = steps done."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(figures), step)


def tensorboard(folder: Path, again: int | None = None) -> TensorBoardLogger:
    """Of a run's folder, under its name, which is what TensorBoard shows; again: the step from which curves are made
    anew."""
    return TensorBoardLogger(folder / CURVES, name="", version=folder.resolve().name, purge_step=again)


@contextmanager
def others(cfg: TrainConfig, folder: Path) -> Iterator[list[Logger]]:
    """The loggers that trainer.logger= asks for beside TensorBoard's, with the run's settings; ended with the run. None
    in processes but the first.

    Raises UserError where Weights & Biases refuses the run, as without a login.
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
    """The project is WANDB_PROJECT of the environment, or cotrain."""
    import wandb

    project, file = os.environ.get("WANDB_PROJECT", "cotrain"), folder / RUN_ID
    found = file.read_text(encoding="utf-8") if file.exists() else uuid.uuid4().hex[:8]
    logger = WandbLogger(cfg.label or folder.name, save_dir=folder, project=project, id=found)
    try:
        logger.log_hyperparams(cast(dict[str, Any], OmegaConf.to_container(cast(Any, cfg), resolve=True)))
    except wandb.Error as error:
        said, mend = " ".join(str(error).split()).rstrip("."), "log in with `wandb login`, or set WANDB_MODE=offline"
        raise UserError(f"trainer.logger=wandb: {said}; {mend}") from error
    write_atomic(file, found)
    return logger
