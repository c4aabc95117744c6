"""Held-out acceptance often: a part of the texts between validations, for a small share of the training's time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from cotrain.acceptance import conditional
from cotrain.board import tags
from cotrain.board.loggers import log
from cotrain.evaluation.held_out import HeldOut, Scores
from cotrain.training.clock import Clock
from cotrain.training.distributed import rest, within
from cotrain.training.interrupts import validates
from cotrain.training.module import alpha_of, tau_of
from cotrain.training.stand_ins import Shown, showing

POINTS = 24  # over a whole training, besides validations
TOKENS, MOST = 0.1, 2**14  # what all points score, of the tokens of training, and one; without gradients, so cheaper
MOST_TIME = 0.05  # of the time of training


class HeldOutPoints(Callback):
    """Acceptance, tau and acceptance by depth in the regime, on a part of its held-out texts that stays the same: at
    every validation, and whenever another share 1 / POINTS of the training is done. Figures of all texts at
    validations.

    A point between validations is left out while it would bring the seconds that these took above MOST_TIME of the
    training's so far; the clock leaves them out. k, objective, verify: what tau is of. shown: weights that stand in.
    """

    def __init__(
        self, part: HeldOut, clock: Clock, shown: list[Shown], k: int, objective: str = "sampled", verify: str = "token"
    ) -> None:
        self.part, self.clock, self.shown = part, clock, shown
        self.served = k, objective, verify
        self.shares, self.at = 0, -1
        self.count, self.seconds, self.last = 0, 0.0, 0.0  # of points between validations; of the newest point

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.shares = self._shares(trainer)

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, _: Any, batch: Any, __: int) -> None:
        index, number = batch.get("group", (0, 1))
        shares = self._shares(trainer)
        if index + 1 < number or shares <= self.shares:
            return
        self.shares = shares
        if validates(trainer) or not trainer.strategy.broadcast(self._affordable()):
            return
        with self.clock.paused(), self._shown(module):
            self._point(trainer, module)
        self.count, self.seconds = self.count + 1, self.seconds + self.last

    def on_validation_epoch_end(self, trainer: lightning.Trainer, module: Any) -> None:
        if self.at != trainer.global_step:
            self._point(trainer, module)

    def on_validation_end(self, trainer: lightning.Trainer, module: Any) -> None:
        log(trainer, whole(module.judged, module.temperature, self.served[1]), trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seconds": self.seconds, "last": self.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count, self.seconds, self.last = (state_dict[name] for name in ("count", "seconds", "last"))

    def line(self) -> str:
        """What the points cost."""
        share = self.seconds / max(self.clock.progress.elapsed, 1e-9)
        return (f"held-out acceptance between validations: {self.count} points of {len(self.part.texts)} texts, "
                f"{self.seconds:.1f} s, {share:.1%} of the time of training")  # fmt: skip

    def _affordable(self) -> bool:
        return self.seconds + self.last <= MOST_TIME * self.clock.progress.elapsed

    def _shares(self, trainer: lightning.Trainer) -> int:
        return int(self.clock.progress.at(trainer.global_step) * POINTS + 1e-9)

    @contextmanager
    def _shown(self, module: Any) -> Iterator[None]:
        """As a validation sees the draft."""
        training = module.draft.training
        with showing(self.shown, module):
            module.draft.eval()
            yield
            module.draft.train(training)

    def _point(self, trainer: lightning.Trainer, module: Any) -> None:
        begin = time.monotonic()
        scores = within(module.draft, lambda: module.on(self.part))["all"]
        rest(module.draft)
        self.at, self.last = trainer.global_step, time.monotonic() - begin
        figures = {tags.ACCEPTANCE: alpha_of(scores, self.served[1]), tags.TAU: tau_of(scores, *self.served)}
        log(trainer, figures | depths(scores, *self.served[:2]), self.at)


def part_of(held: HeldOut, training_tokens: float) -> HeldOut:
    """So many of the texts that POINTS passes over them score TOKENS of the training's tokens, a pass MOST at most; at
    least one."""
    each = float(held.texts.predicted.sum()) / max(len(held.texts), 1)
    count = int(min(TOKENS * training_tokens / POINTS, MOST) / max(each, 1.0))
    return held.spread(min(max(count, 1), len(held.texts)))


def depths(scores: Scores, k: int, objective: str = "sampled") -> dict[str, float]:
    """Of draft i of k, given that those before it were accepted; none of drafts that are the likeliest tokens."""
    if objective == "greedy":
        return {}
    found = conditional(scores.r, scores.drafted(k), scores.lengths).tolist()
    return {f"{tags.DEPTH}/acceptance_{depth}": value for depth, value in enumerate(found, 1)}


def whole(judged: dict[float, dict[str, Scores]], temperature: float, objective: str = "sampled") -> dict[str, float]:
    """Figures of all held-out texts: acceptance by temperature; in the regime, what the draft is like, and, where there
    are several domains, acceptance in each."""
    own = judged[temperature]
    named = {tags.at("acceptance", t): alpha_of(found["all"], objective) for t, found in judged.items()}
    for name in ("kl", "entropy", "calibration"):
        named[f"{tags.HELD_OUT}/{name}"] = getattr(own["all"], name)
    domains = {name: alpha_of(scores, objective) for name, scores in own.items() if name != "all"}
    if len(domains) > 1:
        named |= {f"{tags.DOMAINS}/acceptance_{name}": alpha for name, alpha in domains.items()}
    return named
