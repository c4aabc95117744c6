"""`minutes=`: a budget of time for a whole run, of which training gets what the rest of it leaves."""

from cotrain.config.settings import TrainConfig

BEHIND = 2.5  # validations' time that the last evaluation, its profiles and what bench.minutes does not bound take
LEAST = 0.2  # of the run's minutes: training has them, however slow the rest


def timed(cfg: TrainConfig) -> bool:
    """Whether time may end the training before its steps do."""
    return bool(cfg.trainer.minutes or cfg.minutes)


def of_training(cfg: TrainConfig, spent: float, validation: float) -> float | None:
    """Minutes of the training: trainer.minutes, or what is left of the run's where that is less; None without either.

    spent: seconds of the run before its first step. validation: seconds of the one before it, as each later one takes.
    """
    asked = cfg.trainer.minutes
    if not cfg.minutes:
        return asked
    rest = spent + validation * (cfg.trainer.validations + BEHIND * cfg.measure)
    left = max(cfg.minutes - rest / 60 - cfg.bench.minutes * cfg.measure, LEAST * cfg.minutes)
    return min(left, asked) if asked else left


def refuse(cfg: TrainConfig) -> None:
    """Raise ValueError, naming the key, for minutes that are none, or that rounds, which end at steps, cannot have."""
    for key, minutes in (("trainer.minutes", cfg.trainer.minutes), ("minutes", cfg.minutes)):
        if minutes is not None and (minutes <= 0 or cfg.rollout.rounds > 1):
            raise ValueError(f"{key}: above 0, with rollout.rounds=1 (rounds end at steps), or null")
