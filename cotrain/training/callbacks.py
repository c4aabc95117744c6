"""Callbacks of a training that measure checkpoints, average or quantise weights, and log curves."""

import ctypes
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from cotrain.board import tags
from cotrain.board.curves import log
from cotrain.errors import warn
from cotrain.evaluation.held_out import HeldOut, Scores
from cotrain.ranks import rank
from cotrain.students.quantised import draft_projections
from cotrain.training.distributed import ends_step, rest, within
from cotrain.training.interrupts import validates
from cotrain.training.module import alpha_of, tau_of
from cotrain.training.progress import Clock, Progress
from inference.drafts.atomic import new_folder
from inference.proposers.quantised import round_bits

Measure = Callable[[PreTrainedModel], dict[str, float]]
Show = Callable[[PreTrainedModel], str]

# limits of the points that `HeldOutPoints` computes between validations
POINTS = 24  # number of points of a training
TOKENS = 0.1  # tokens that all points score together, as a share of the tokens of training
MOST = 2**14  # tokens that one point scores
FIRST, LOOKED_AT = 20, 1024  # steps after which `StandingWeights` looks at so many weights of each tensor
TRIM = 30.0  # seconds
MOST_TIME = 0.05  # seconds of all points, as a share of the seconds of training


# --- checkpoints


@dataclass(frozen=True)
class MeasuredCheckpoint:
    """A saved checkpoint. step: the number of steps before it. path: its folder. speedup: from a quick measurement.
    tau: tokens per target call, predicted on the held-out texts."""

    step: int
    path: Path
    speedup: float
    tau: float


class MeasureSpeed(Callback):
    """Callback that measures the draft with the engine at every validation, logs the figures, and saves the weights.

    measure: a function from the draft to figures by name, with "speedup". Few prompts are timed, so the speed-up is
    noisy.
    tau: a function that returns tau by the latest scores of the held-out texts, an average over thousands of tokens.
    Checkpoints are ranked by it, since a round costs the same in all of them.
    folder: where weights are saved.
    patience: training ends after this many validations in a row without a higher tau; 0: never.
    show: a function from the draft to a Markdown text that was decoded with it, which is logged; None for no text.
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
                with torch.inference_mode(False), torch.no_grad():  # two engines cannot share tensors of inference mode
                    figures = self.measure(draft)
                    logger: Any = trainer.logger
                    if logger and self.show:
                        logger.experiment.add_text(f"{tags.TEXT}/fixed_prompt", self.show(draft), trainer.global_step)
                self.save(draft, trainer.global_step)
        trainer.strategy.barrier()  # other processes wait, so that they do not disturb the timing
        log(trainer, tags.speed(figures), trainer.global_step)
        self.add(trainer.global_step, figures["speedup"])
        if self.stale:
            trainer.should_stop = True

    def save(self, draft: PreTrainedModel, step: int) -> None:
        """Write the draft's weights to the subfolder `step-N` of the folder of checkpoints, N = `step`, the number of
        steps so far. An earlier subfolder of this name is replaced."""
        with new_folder(self.folder / f"step-{step}", replace=True) as new:
            draft.save_pretrained(new)

    def add(self, step: int, speedup: float) -> None:
        """Add the saved weights of a step to the checkpoints from which `best` chooses, with the current tau. speedup:
        measured at this step."""
        self.checkpoints.append(MeasuredCheckpoint(step, self.folder / f"step-{step}", speedup, self.tau()))

    @property
    def stale(self) -> bool:
        """Return whether `patience` validations have passed without a higher tau."""
        return bool(self.patience) and len(self.checkpoints) - 1 - self.checkpoints.index(self.best()) >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [(one.step, str(one.path.name), one.speedup, one.tau) for one in self.checkpoints]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.checkpoints = [
            MeasuredCheckpoint(step, self.folder / name, *rest) for step, name, *rest in state_dict["kept"]
        ]

    def best(self) -> MeasuredCheckpoint:
        """Return the checkpoint with the highest tau. Raises ValueError if there was no validation."""
        if not self.checkpoints:
            raise ValueError(
                "no checkpoint was measured: the training ended before its first validation: raise trainer.steps= or "
                "trainer.validations="
            )
        return max(self.checkpoints, key=lambda one: one.tau)


# --- quantised weights, used while the draft is evaluated or measured


class QuantisationAware(Callback):
    """Callback that quantises the draft's projections, except the head, in every pass: the draft trains with the
    weights with which it is served. kind: "int8" or "nf4".

    Gradients update the float weights (straight-through estimator, Bengio et al. 2013, 1308.3432). The draft is also
    evaluated, measured and saved with quantised weights. `show` puts them in, and `hide` restores the draft's own
    weights bit for bit; a second call of either has no effect. If a run ends between `show` and `hide`, the quantised
    weights are exported.
    """

    own: dict[str, Tensor] | None = None  # the draft's weights between `show` and `hide`

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @torch.no_grad()
    def show(self, module: Any) -> None:
        """Put quantised weights into `module.draft`, in place."""
        if self.own is None:
            own = {f"{name}.weight": weight for name, weight in draft_projections(module.draft).items()}
            self.own = {name: weight.detach().clone() for name, weight in own.items()}
            _copy({name: round_bits(weight, self.kind) for name, weight in own.items()}, module.draft)

    def hide(self, module: Any) -> None:
        """Restore the own weights of `module.draft`, in place."""
        if self.own is not None:
            _copy(self.own, module.draft)
            self.own = None

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, *_: Any) -> None:
        self.show(module)

    def on_after_backward(self, trainer: lightning.Trainer, module: Any) -> None:
        self.hide(module)

    def on_validation_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.show(module)

    def on_validation_end(self, trainer: lightning.Trainer, module: Any) -> None:
        self.hide(module)


@torch.no_grad()
def _copy(weights: Mapping[str, Tensor], module: nn.Module) -> None:
    parameters = dict(module.named_parameters())
    for name, weight in weights.items():
        parameters[name].copy_(weight)


@contextmanager
def showing(rounded: Sequence[QuantisationAware], module: Any) -> Iterator[None]:
    """Put the weights of all of `rounded`, at most one, into `module.draft` until the block ends; then restore its own
    weights."""
    for one in rounded:
        one.show(module)
    try:
        yield
    finally:
        for one in rounded:
            one.hide(module)


# --- curves


class Learning(Callback):
    """Callback that logs the loss and its terms, the learning rate, the gradient norm and tokens per second, every
    `module.WATCHED` steps. It must come after `Clock`.

    Tokens per second are the tokens that the loss counts, in all processes, over the seconds of training without
    validations. The gradient norm is computed before clipping.
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
        if not ends_step(batch) or not module.step_figures:
            return
        seconds = self.progress.elapsed - self.since
        speed = float(self.tokens) * trainer.world_size / seconds if seconds else 0.0
        self.tokens, self.since = torch.zeros_like(self.tokens), self.progress.elapsed
        figures = {f"{tags.TRAINING}/{name}": value for name, value in module.step_figures.items()}
        own = {tags.RATE: self.rate, tags.NORM: self.norm, tags.TOKENS_PER_SECOND: speed}
        log(trainer, figures | own, trainer.global_step)


class ReturnedMemory(Callback):
    """Callback that gives freed memory back to the system every `TRIM` seconds. Between the tensors of a step, which
    differ in size from those of the next, lie small ones that stay, such as those of `target_distributions.Masses`. The
    C library then keeps what is freed: a process grew by 9 MB a step, 23 GB after 1,100."""

    def __init__(self) -> None:
        self.returned = time.monotonic()

    def on_train_batch_end(self, *_: Any) -> None:
        if time.monotonic() - self.returned > TRIM:
            with suppress(OSError, AttributeError):  # without glibc
                ctypes.CDLL(None).malloc_trim(0)
            self.returned = time.monotonic()


class StandingWeights(Callback):
    """Callback that prints a line if most of the draft's weights have not changed after `FIRST` steps. The reason is
    then rounding: an update that is small relative to its weight is lost.

    It looks at `LOOKED_AT` weights of each tensor, or of this process's part of it. Weights without a gradient do not
    count, for example embeddings of tokens that are in no text.
    """

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.until, random = trainer.global_step + FIRST, torch.Generator().manual_seed(0)
        self.looked_at = [
            (
                weight,
                at := torch.randint(max(size, 1), (min(LOOKED_AT, size),), generator=random).to(weight.device),
                _values(weight, at),
            )
            for weight in module.draft.parameters()
            if (size := _local(weight).numel()) and weight.requires_grad
        ]
        self.learns = [torch.zeros_like(before, dtype=torch.bool) for _, _, before in self.looked_at]

    def on_before_optimizer_step(self, trainer: lightning.Trainer, module: Any, optimizer: Any) -> None:
        for (weight, at, _), learns in zip(self.looked_at, self.learns, strict=True):
            if weight.grad is not None:
                learns |= _values(weight.grad, at) != 0

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step < self.until or not self.looked_at:
            return
        counts = torch.zeros(2, device=module.device)  # weights that moved, and weights with a gradient
        for (weight, at, before), learns in zip(self.looked_at, self.learns, strict=True):
            changed = learns & (_values(weight, at) != before)
            counts += torch.stack([changed.sum(), learns.sum()]) / len(at) * _local(weight).numel()
        self.looked_at, self.learns = [], []
        moved, learning = trainer.strategy.reduce(counts, reduce_op="sum").tolist()
        if moved <= learning / 2 and not rank():
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            warn(
                f"after {FIRST} steps only {moved / max(learning, 1):.0%} of the draft's weights have moved: at the "
                f"learning rate {rate:.1e}, rounding loses the updates of the other weights: raise optimizer.lr"
            )


def _local(weight: Tensor) -> Tensor:
    """Return a tensor, or only this process's part of it if it is sharded."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _values(weight: Tensor, at: Tensor) -> Tensor:
    """Return a copy (n,) of the tensor's entries at the flat indices `at` (n,). If the tensor is sharded, only this
    process's part of it is read, and the indices count from the beginning of this part."""
    return _local(weight.detach()).flatten()[at]


def gradient_norm(draft: torch.nn.Module) -> float:
    """Return the 2-norm of all gradients of the draft together. If the draft is sharded, all processes must call this
    function."""
    grads = [weight.grad for weight in draft.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class HeldOutPoints(Callback):
    """Callback that logs acceptance, tau and acceptance by depth on a fixed part of the regime's held-out texts, at
    every validation and after each 1 / POINTS of the training. At validations it also logs figures for all held-out
    texts.

    A point between validations is skipped if such points would take more than the share MOST_TIME of the seconds of
    training so far, which do not include the points.

    part: the texts. clock: counts the seconds of training, and is paused for a point. rounded: callbacks whose
    quantised weights the draft has at a point. k, objective, verify: the draft length, the way of drafting
    ("sampled" or "greedy") and the verification rule for the predicted tau.
    """

    def __init__(
        self,
        part: HeldOut,
        clock: Clock,
        rounded: list[QuantisationAware],
        k: int,
        objective: str = "sampled",
        verify: str = "token",
    ) -> None:
        self.part, self.clock, self.rounded = part, clock, rounded
        self.served = k, objective, verify
        self.shares, self.at = 0, -1
        self.count, self.seconds, self.last = 0, 0.0, 0.0  # points so far, their seconds, seconds of the last

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.shares = self._shares(trainer)

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, _: Any, batch: Any, __: int) -> None:
        shares = self._shares(trainer)
        if not ends_step(batch) or shares <= self.shares:
            return
        self.shares = shares
        affordable = self.seconds + self.last <= MOST_TIME * self.clock.progress.elapsed
        if validates(trainer) or not trainer.strategy.broadcast(affordable):
            return
        with self.clock.paused(), showing(self.rounded, module):  # as in a validation
            training = module.draft.training
            module.draft.eval()
            self._point(trainer, module)
            module.draft.train(training)
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
        """Return a line for the user with the number of points and the seconds that they took."""
        share = self.seconds / max(self.clock.progress.elapsed, 1e-9)
        return (
            f"held-out acceptance between validations: {self.count} points of {len(self.part.texts)} texts, "
            f"{self.seconds:.1f} s, {share:.1%} of the time of training"
        )

    def _shares(self, trainer: lightning.Trainer) -> int:
        return int(self.clock.progress.at(trainer.global_step) * POINTS + 1e-9)

    def _point(self, trainer: lightning.Trainer, module: Any) -> None:
        begin = time.monotonic()
        scores = within(module.draft, lambda: module.on(self.part))["all"]
        rest(module.draft)
        self.at, self.last = trainer.global_step, time.monotonic() - begin
        figures = {tags.ACCEPTANCE: alpha_of(scores, self.served[1]), tags.TAU: tau_of(scores, *self.served)}
        log(trainer, figures | depths(scores, *self.served[:2]), self.at)


def part_of(held: HeldOut, training_tokens: float) -> HeldOut:
    """Return the part of the held-out texts that each of the POINTS passes scores, at least one text. All passes
    together score at most the share TOKENS of `training_tokens`, the number of tokens that the training learns from;
    one pass scores at most MOST tokens."""
    each = float(held.texts.predicted.sum()) / max(len(held.texts), 1)
    return held.spread(max(int(min(TOKENS * training_tokens / POINTS, MOST) / max(each, 1.0)), 1))


def depths(scores: Scores, k: int, objective: str = "sampled") -> dict[str, float]:
    """Return the acceptance of drafted token i if all before it were accepted, for i = 1 .. k, keyed by TensorBoard
    tag. k is cut to the draft's number of depths. objective: "sampled" or "greedy" drafting; {} for greedy."""
    if objective == "greedy":
        return {}
    _, conditional = scores.accepted(scores.drafted(k))
    return {f"{tags.DEPTH}/acceptance_{depth}": value for depth, value in enumerate(conditional, 1)}


def whole(judged: dict[float, dict[str, Scores]], temperature: float, objective: str = "sampled") -> dict[str, float]:
    """Return figures for all held-out texts, keyed by TensorBoard tag: the acceptance at each temperature; for the
    regime also KL, entropy, calibration and, if there are several domains, the acceptance in each.

    judged: temperature -> domain -> scores. temperature: the regime's. objective: "sampled" or "greedy" drafting.
    """
    own = judged[temperature]
    named = {tags.at("acceptance", t): alpha_of(scores["all"], objective) for t, scores in judged.items()}
    for name in ("kl", "entropy", "calibration"):
        named[f"{tags.HELD_OUT}/{name}"] = getattr(own["all"], name)
    domains = {name: alpha_of(scores, objective) for name, scores in own.items() if name != "all"}
    if len(domains) > 1:
        named |= {f"{tags.DOMAINS}/acceptance_{name}": alpha for name, alpha in domains.items()}
    return named
