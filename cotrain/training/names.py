"""What reports and comparisons call a run's loss and draft."""

from cotrain.config.groups import Loss
from cotrain.config.settings import TrainConfig
from cotrain.students.base import UNTRAINED


def of_loss(loss: Loss) -> str:
    """As `kl`, or `kl_then_tv` where another loss follows."""
    return f"{loss.first}_then_{loss.then}" if loss.then else loss.first


def of_draft(cfg: TrainConfig) -> str:
    """As `medusa, scratch, kl_then_tv`; the kind alone where nothing is learnt."""
    kind = cfg.draft.kind
    return kind if kind in UNTRAINED else f"{kind}, {cfg.init.kind}, {of_loss(cfg.loss)}"
