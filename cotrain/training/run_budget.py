"""`minutes=`: a budget of time for a whole run. Sampling and validations get shares of it, training the rest."""

from cotrain.config.regimes import judged, learnt
from cotrain.config.settings import TrainConfig

BEHIND = 2.5  # validations' time that the last evaluation, its profiles and what bench.minutes does not bound take
LEAST = 0.2  # of the run's minutes: training has them, however slow the rest
SAMPLING = {"train": 0.3, "held_out": 0.1}  # of the run's minutes, at most: of all temperatures together
JUDGING = 0.25  # of the run's minutes, at most: all validations


def timed(cfg: TrainConfig) -> bool:
    """Whether time may end the training before its steps do."""
    return bool(cfg.trainer.minutes or cfg.minutes)


def left_of(cfg: TrainConfig, spent: float, validation: float) -> float:
    """Minutes that the rest of a run with minutes= leaves for training, a fifth of them at least.

    spent: seconds of the run before its first step. validation: seconds of the one before it, as each later one takes.
    """
    assert cfg.minutes
    rest = spent + validation * (validations(cfg, validation) + BEHIND * cfg.measure)
    return max(cfg.minutes - rest / 60 - cfg.bench.minutes * cfg.measure, LEAST * cfg.minutes)


def sampling_seconds(cfg: TrainConfig) -> dict[str, float]:
    """Seconds that sampling one set of texts may take, by split; empty without a budget."""
    if not cfg.minutes:
        return {}
    sets = {"train": len(learnt(cfg)), "held_out": len(judged(cfg))}
    return {split: 60 * cfg.minutes * share / sets[split] for split, share in SAMPLING.items()}


def validations(cfg: TrainConfig, seconds: float) -> int:
    """How many validations of so many seconds a run affords, one at least and those asked for at most."""
    asked = cfg.trainer.validations
    if not cfg.minutes or not seconds:
        return asked
    return max(min(asked, int(JUDGING * 60 * cfg.minutes / seconds - BEHIND * cfg.measure)), 1)


def refuse(cfg: TrainConfig) -> None:
    """Raise ValueError, naming the key, for minutes that are none, or that rounds, which end at steps, cannot have."""
    for key, minutes in (("trainer.minutes", cfg.trainer.minutes), ("minutes", cfg.minutes)):
        if minutes is not None and (minutes <= 0 or cfg.rollout.rounds > 1):
            raise ValueError(f"{key}: above 0, with rollout.rounds=1 (rounds end at steps), or null")
    if cfg.minutes and cfg.measure and cfg.bench.minutes > (1 - LEAST) * cfg.minutes:
        raise ValueError(f"minutes: {cfg.minutes:g}, of which bench.minutes={cfg.bench.minutes:g} leaves training less "
                         "than a fifth: raise minutes= or lower bench.minutes=")  # fmt: skip
