"""What happens besides the steps: measured checkpoints, averaged and rounded weights, the curves of a training."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import PreTrainedModel

from cotrain.acceptance import conditional
from cotrain.board import tags
from cotrain.board.curves import log
from cotrain.evaluation.held_out import HeldOut, Scores
from cotrain.students.quantised import projections, quantised
from cotrain.training.distributed import rest, within
from cotrain.training.interrupts import validates
from cotrain.training.module import alpha_of, tau_of
from cotrain.training.progress import Clock, Progress
from inference.drafts.atomic import new_folder

Measure = Callable[[PreTrainedModel], dict[str, float]]
Show = Callable[[PreTrainedModel], str]

POINTS = 24  # over a whole training, besides validations
TOKENS = 0.1  # tokens that all points score together, as a share of the tokens of training
MOST = 2**14  # tokens that one point scores; without gradients, so cheaper than a step
MOST_TIME = 0.05  # of the time of training


# --- checkpoints


@dataclass(frozen=True)
class MeasuredCheckpoint:
    """A checkpoint's folder of weights, its quick speed-up, and tau predicted on the held-out texts."""

    step: int
    path: Path
    speedup: float
    tau: float


class MeasureSpeed(Callback):
    """Measures the draft with the engine at every validation, logs the figures and saves the weights.

    measure: draft -> figures with a `speedup`, timed on few prompts, so noisy. tau: () -> tau by the latest scores of
    the held-out texts, over thousands of tokens. Checkpoints are ranked by tau: their rounds cost the same.
    show: draft -> a text that it drafted for, in Markdown, logged with its figures.
    patience: training ends when so many validations in a row brought no higher tau, 0 for never.
    """

    def __init__(
        self, measure: Measure, tau: Callable[[], float], folder: Path, patience: int = 0, show: Show | None = None
    ) -> None:
        self.measure, self.tau, self.folder, self.patience, self.show = measure, tau, folder, patience, show
        self.checkpoints: list[MeasuredCheckpoint] = []

    def on_validation_end(self, trainer: lightning.Trainer, module: Any) -> None:
        figures = {"speedup": math.nan}
        with module.assembled() as draft:
            if trainer.is_global_zero:
                with torch.inference_mode(False), torch.no_grad():  # a copy made in it could not be read by two engines
                    figures = self.measure(draft)
                    self._show(trainer, draft)
                self.save(draft, trainer.global_step)
        trainer.strategy.barrier()  # a process that goes on would disturb the timing
        log(trainer, tags.speed(figures), trainer.global_step)
        self.add(trainer.global_step, figures["speedup"])
        if self.stale:
            trainer.should_stop = True

    def save(self, draft: PreTrainedModel, step: int) -> None:
        with new_folder(self.folder / f"step-{step}", replace=True) as new:
            draft.save_pretrained(new)

    def add(self, step: int, speedup: float) -> None:
        """Add the saved weights of a step to the checkpoints that one is chosen from."""
        self.checkpoints.append(MeasuredCheckpoint(step, self.folder / f"step-{step}", speedup, self.tau()))

    def _show(self, trainer: lightning.Trainer, draft: PreTrainedModel) -> None:
        logger: Any = trainer.logger
        if logger and self.show:
            logger.experiment.add_text(f"{tags.TEXT}/fixed_prompt", self.show(draft), trainer.global_step)

    @property
    def stale(self) -> bool:
        """Whether patience has run out."""
        return bool(self.patience) and len(self.checkpoints) - 1 - self.checkpoints.index(self.best()) >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [(one.step, str(one.path.name), one.speedup, one.tau) for one in self.checkpoints]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.checkpoints = [
            MeasuredCheckpoint(step, self.folder / name, *rest) for step, name, *rest in state_dict["kept"]
        ]

    def best(self) -> MeasuredCheckpoint:
        """The checkpoint to measure afresh. Raises ValueError before any validation."""
        if not self.checkpoints:
            raise ValueError("no checkpoint was measured: trainer.steps ended before a validation")
        return max(self.checkpoints, key=lambda one: one.tau)


# --- weights swapped for their average, or as rounded, while they are judged or measured


class SwapWeights(Callback):
    """Puts other weights in place of the draft's own, by name, from `show` to `hide`, which restores them to the bit.

    Either call repeated changes nothing. After a last `show` the weights stay: a run ends with those it exports.
    """

    own: dict[str, Tensor] | None = None  # the draft's weights, while others are in their place

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """The weights that replace a draft's, by their names; weights that stay are left out."""
        raise NotImplementedError

    @torch.no_grad()
    def show(self, module: Any) -> None:
        """Put the other weights into the module's `draft`."""
        if self.own is None:
            weights, parameters = self.weights(module.draft), dict(module.draft.named_parameters())
            self.own = {name: parameters[name].detach().clone() for name in weights}
            _copy(weights, module.draft)

    def hide(self, module: Any) -> None:
        """Restore the draft's own weights."""
        if self.own is not None:
            _copy(self.own, module.draft)
            self.own = None


@torch.no_grad()
def _copy(weights: Mapping[str, Tensor], module: nn.Module) -> None:
    parameters = dict(module.named_parameters())
    for name, weight in weights.items():
        parameters[name].copy_(weight)


@contextmanager
def showing(swaps: Sequence[SwapWeights], module: Any) -> Iterator[None]:
    """Inside the block the module's draft has the weights of all these callbacks."""
    for one in swaps:
        one.show(module)
    yield
    for one in swaps:
        one.hide(module)


class Averaged(SwapWeights):
    """An exponential moving average of the draft's weights, which is judged, measured, saved and exported. Steps go on
    from the weights themselves. Must come after the callbacks that measure: it restores the weights as validation ends.

    decay: the share of the average that a step leaves; of step t at most (1 + t) / (10 + t), so that the average of a
    short run is not that of its first weights.
    """

    def __init__(self, decay: float) -> None:
        self.decay, self.average = decay, list[Tensor]()
        self.step = 0

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        names = (name for name, _ in module.named_parameters())
        return dict(zip(names, self.average, strict=True))

    def on_fit_start(self, trainer: lightning.Trainer, module: Any) -> None:
        weights = list(module.draft.parameters())
        average = self.average or [weight.detach().clone() for weight in weights]
        self.average = [one.to(weight) for one, weight in zip(average, weights, strict=True)]
        self.own = None

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.step = trainer.global_step  # a resumed trainer has read it by now

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step > self.step:  # not every batch ends a step
            self.step = trainer.global_step
            update = get_ema_multi_avg_fn(min(self.decay, (1 + self.step) / (10 + self.step)))
            update(self.average, [weight.detach() for weight in module.draft.parameters()], torch.tensor(1))

    def on_validation_start(self, trainer: lightning.Trainer, module: Any) -> None:
        if self.average:
            self.show(module)

    def on_validation_end(self, trainer: lightning.Trainer, module: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self.hide(module)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]


class QuantisationAware(SwapWeights):
    """Quantises the draft's projections, except the head, in every pass, see `students.quantised`; gradients
    move the float weights (straight through, Bengio et al. 2013, 1308.3432). Judged, measured and saved so."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @torch.no_grad()
    def weights(self, module: Any) -> dict[str, Tensor]:
        return {f"{name}.weight": quantised(weight, self.kind) for name, weight in projections(module).items()}

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, *_: Any) -> None:
        self.show(module)

    def on_after_backward(self, trainer: lightning.Trainer, module: Any) -> None:
        self.hide(module)

    def on_validation_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.show(module)

    def on_validation_end(self, trainer: lightning.Trainer, module: Any) -> None:
        self.hide(module)


# --- curves


class Learning(Callback):
    """Loss with its parts, learning rate, gradient norm and tokens per second, every `module.WATCHED` steps. Must come
    after the clock.

    Tokens per second: those that are learnt from, of all processes, over the time of training, without validations.
    The gradient norm is the one before clipping.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress, self.rate, self.norm = progress, 0.0, 0.0
        self.tokens, self.since = torch.zeros(()), 0.0

    def setup(self, trainer: lightning.Trainer, module: Any, stage: str) -> None:
        logger: Any = trainer.logger
        if stage == "fit" and logger and trainer.is_global_zero:
            logger.experiment.add_custom_scalars(tags.layout())

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.tokens, self.since = torch.zeros((), device=module.device), self.progress.elapsed

    def on_before_optimizer_step(self, trainer: lightning.Trainer, module: Any, optimizer: Any) -> None:
        if module.watched:
            self.rate = float(optimizer.param_groups[0]["lr"])
            self.norm = gradient_norm(module.draft)

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, _: Any, batch: Any, __: int) -> None:
        self.tokens += batch["predicted"].sum()
        index, number = batch.get("group", (0, 1))
        if index + 1 < number or not module.step_figures:
            return
        seconds = self.progress.elapsed - self.since
        speed = float(self.tokens) * trainer.world_size / seconds if seconds else 0.0
        self.tokens, self.since = torch.zeros_like(self.tokens), self.progress.elapsed
        figures = {f"{tags.TRAINING}/{name}": value for name, value in module.step_figures.items()}
        own = {tags.RATE: self.rate, tags.NORM: self.norm, tags.TOKENS_PER_SECOND: speed}
        log(trainer, figures | own, trainer.global_step)


def gradient_norm(draft: torch.nn.Module) -> float:
    """The 2-norm of all gradients together. Of a sharded draft that of the whole; all processes must call it."""
    grads = [weight.grad for weight in draft.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class HeldOutPoints(Callback):
    """Acceptance, tau and acceptance by depth in the regime, on a fixed part of its held-out texts: at every
    validation, and after each 1 / POINTS of the training. Figures of all texts at validations.

    A point between validations is left out while it would bring the seconds of these points above MOST_TIME of the
    training's so far, which do not include them. k, objective, verify: what tau is computed for. swaps: as in
    `showing`.
    """

    def __init__(
        self,
        part: HeldOut,
        clock: Clock,
        swaps: list[SwapWeights],
        k: int,
        objective: str = "sampled",
        verify: str = "token",
    ) -> None:
        self.part, self.clock, self.swaps = part, clock, swaps
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
        with self.clock.paused(), self._as_validated(module):
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
        """A line with the number of points and the time that they took."""
        share = self.seconds / max(self.clock.progress.elapsed, 1e-9)
        return (f"held-out acceptance between validations: {self.count} points of {len(self.part.texts)} texts, "
                f"{self.seconds:.1f} s, {share:.1%} of the time of training")  # fmt: skip

    def _affordable(self) -> bool:
        return self.seconds + self.last <= MOST_TIME * self.clock.progress.elapsed

    def _shares(self, trainer: lightning.Trainer) -> int:
        return int(self.clock.progress.at(trainer.global_step) * POINTS + 1e-9)

    @contextmanager
    def _as_validated(self, module: Any) -> Iterator[None]:
        """Inside the block the draft is as a validation judges it."""
        training = module.draft.training
        with showing(self.swaps, module):
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
    """As many of the texts as POINTS passes may score: TOKENS of the training's tokens in all, MOST in one pass; at
    least one text."""
    each = float(held.texts.predicted.sum()) / max(len(held.texts), 1)
    count = int(min(TOKENS * training_tokens / POINTS, MOST) / max(each, 1.0))
    return held.spread(min(max(count, 1), len(held.texts)))


def depths(scores: Scores, k: int, objective: str = "sampled") -> dict[str, float]:
    """Conditional acceptance of drafts 1 .. k, by tag; empty for greedy drafting."""
    if objective == "greedy":
        return {}
    values = conditional(scores.r, scores.drafted(k), scores.lengths).tolist()
    return {f"{tags.DEPTH}/acceptance_{depth}": value for depth, value in enumerate(values, 1)}


def whole(judged: dict[float, dict[str, Scores]], temperature: float, objective: str = "sampled") -> dict[str, float]:
    """Figures of all held-out texts, by tag: acceptance at each temperature; in the regime KL, entropy and calibration,
    and acceptance in each domain if there are several."""
    own = judged[temperature]
    named = {tags.at("acceptance", t): alpha_of(scores["all"], objective) for t, scores in judged.items()}
    for name in ("kl", "entropy", "calibration"):
        named[f"{tags.HELD_OUT}/{name}"] = getattr(own["all"], name)
    domains = {name: alpha_of(scores, objective) for name, scores in own.items() if name != "all"}
    if len(domains) > 1:
        named |= {f"{tags.DOMAINS}/acceptance_{name}": alpha for name, alpha in domains.items()}
    return named
