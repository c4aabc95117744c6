"""What a run was made with and what came of it: a row of TensorBoard's table of hyperparameters."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from omegaconf import OmegaConf

from cotrain.board import tags
from cotrain.config.overrides import flat
from cotrain.config.settings import TrainConfig

# settings that tell runs of one user apart
SHOWN = ("label", "target.path", "quantisation.kind", "draft.kind", "draft.layers", "draft.width", "draft.quantisation",
         "init.kind", "init.layers", "init.cosine", "loss.first", "loss.then", "loss.switch", "optimizer.lr",
         "optimizer.weight_decay", "trainer.steps", "trainer.minutes", "minutes", "trainer.batch", "trainer.accumulate",
         "trainer.ema", "trainer.seed", "rollout.texts", "rollout.rounds", "regime.temperature", "regime.top_k",
         "regime.top_p", "objective", "verify", "policy.k")  # fmt: skip


def write(cfg: TrainConfig, loggers: Sequence[Logger], step: int, figures: Mapping[str, float]) -> None:
    """To each logger, at the last step; to TensorBoard with the settings that make a row of its table."""
    settings = dict(flat(OmegaConf.to_container(cast(Any, cfg), resolve=True)))
    found = {f"{tags.FINAL}/{name}": value for name, value in figures.items()}
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams({name: settings[name] for name in SHOWN}, found, step)
        else:
            logger.log_metrics(found, step)
        logger.finalize("success")


def figures(alpha: float, tau: float, report: Mapping[str, Any]) -> dict[str, float]:
    """Of the draft that is exported, or the last one: acceptance and tau of all held-out texts in the regime; where it
    was measured (report is empty without), the speed-up with its interval, tau as timed, and whether it is exact, 1 or
    0."""
    found = {"acceptance": alpha, "tau": tau}
    if not report:
        return found
    speed = report["speedup"]["whole"]
    ends = {f"speedup{end}": speed[key] for key, end in (("value", ""), ("low", "_low"), ("high", "_high"))}
    known = {name: value for name, value in ends.items() if value is not None}
    timed = {"tau_timed": report["acceptance"]["tau"]["measured"], "exact": float(report["exactness"]["passed"])}
    return found | known | timed
