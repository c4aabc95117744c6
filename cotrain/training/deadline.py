"""The time limit of a run (minutes=), and how much of it each part of the run may take."""

import time
from dataclasses import dataclass, field
from math import inf

from cotrain.config.settings import TrainConfig, judged, learnt

# shares of the run's minutes
LEAST = 0.15  # training gets at least this share, even if the rest of the run takes too long
SAMPLING = {"train": 0.3, "held_out": 0.05}  # sampling gets at most this share, for all temperatures together
PROMPTS = 0.15  # sampling prompts of the target itself gets at most this share
JUDGING = 0.2  # validations and the evaluation of the exported checkpoint get at most this share
ONCE = 1 / 6  # one evaluation of the held-out texts gets at most this part of JUDGING
# durations of the end of a run
AFTER = 2.0  # seconds of evaluating the exported checkpoint with profiles, in units of one evaluation
MEASURING = 5.0  # the least seconds of the full measurement, in units of the measurement of a checkpoint


@dataclass
class Deadline:
    """The time limit of a run, and how much of it each part of the run may take.

    minutes: of the whole run; None: no limit.
    start: when the run began, a value of time.monotonic().
    left: the minutes for training, as the method `training` computed them; saved in checkpoints.
    """

    minutes: float | None = None
    start: float = field(default_factory=time.monotonic, compare=False)
    left: float = inf

    def seconds(self, share: float) -> float | None:
        """Return the seconds that are a share of the run's time limit; None without a limit. share: in [0, 1]."""
        return 60 * self.minutes * share if self.minutes else None

    def sampling(self, cfg: TrainConfig) -> dict[str, float]:
        """Return the most seconds for sampling the texts of one temperature, keyed by split ("train", "held_out"); {}
        without a limit."""
        sets = {"train": len(learnt(cfg)), "held_out": len(judged(cfg))}
        return {split: 60 * self.minutes * share / sets[split] for split, share in SAMPLING.items() if self.minutes}

    def validations(self, cfg: TrainConfig, judging: float, measuring: float = 0.0) -> int:
        """Return for how many validations the run has time after the first one: from 1 to trainer.validations. judging,
        measuring: the seconds that the first validation took to evaluate the held-out texts, and to measure the
        checkpoint."""
        most, each = cfg.trainer.validations, judging + measuring
        if not self.minutes or not each:
            return most
        after = AFTER * judging * cfg.measure
        return max(min(most, int((JUDGING * 60 * self.minutes - after) / each) - 1), 1)

    def training(self, cfg: TrainConfig, spent: float, judging: float, measuring: float = 0.0) -> float:
        """Return the minutes that remain for training, at least the share LEAST of the run's minutes. There must be a
        limit.

        spent: seconds of the run before its first training step. judging, measuring: the seconds that the first
        validation took to evaluate the held-out texts, and to measure the checkpoint. Every validation is assumed to
        last as long. After the last one, the exported checkpoint is evaluated and measured in full.
        """
        assert self.minutes
        rest = spent + (judging + measuring) * self.validations(cfg, judging, measuring)
        if cfg.measure:
            rest += AFTER * judging + max(60 * cfg.bench.minutes, MEASURING * measuring)
        return max(self.minutes - rest / 60, LEAST * self.minutes)


def time_limited(cfg: TrainConfig) -> bool:
    """Return whether a time limit may end the training before its last step."""
    return bool(cfg.trainer.minutes or cfg.minutes)
