"""At a validation: a measurement by the engine and its checkpoint; between: averaged and rounded weights."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import PreTrainedModel

from cotrain.board import tags
from cotrain.board.loggers import log
from cotrain.students.rounding import projections, quantised
from cotrain.training.stand_ins import Shown
from inference.drafts.atomic import new_folder

Measure = Callable[[PreTrainedModel], dict[str, float]]
Show = Callable[[PreTrainedModel], str]


@dataclass(frozen=True)
class Kept:
    """A checkpoint's folder of weights, its quick speed-up, and tau predicted on the held-out texts."""

    step: int
    path: Path
    speedup: float
    tau: float


class MeasureSpeed(Callback):
    """Measures the draft with the engine at every validation, logs it, and keeps the weights of each.

    measure: draft -> figures with a `speedup`, timed on few prompts, so noisy. tau: of the draft as the held-out texts
    were last scored, exact and from thousands of tokens. It is what ranks checkpoints: their rounds cost the same.
    show: draft -> a text that it drafted for, in Markdown, written beside its figures.
    patience: training ends when so many validations in a row brought no higher tau, 0 for never.
    """

    def __init__(
        self, measure: Measure, tau: Callable[[], float], folder: Path, patience: int = 0, show: Show | None = None
    ) -> None:
        self.measure, self.tau, self.folder, self.patience, self.show = measure, tau, folder, patience, show
        self.kept: list[Kept] = []

    def on_validation_end(self, trainer: lightning.Trainer, module: Any) -> None:
        figures = {"speedup": math.nan}
        with module.assembled() as draft:
            if trainer.is_global_zero:
                with torch.inference_mode(False), torch.no_grad():  # a copy made in it could not be read by two engines
                    figures = self.measure(draft)
                    self._show(trainer, draft)
                self.save(draft, trainer.global_step)
        trainer.strategy.barrier()  # timings are disturbed by whoever goes on
        log(trainer, tags.speed(figures), trainer.global_step)
        self.keep(trainer.global_step, figures["speedup"])
        if self.stale:
            trainer.should_stop = True

    def save(self, draft: PreTrainedModel, step: int) -> None:
        with new_folder(self.folder / f"step-{step}", replace=True) as new:
            draft.save_pretrained(new)

    def keep(self, step: int, speedup: float) -> None:
        """Count the saved weights of a step among those of which one is exported."""
        self.kept.append(Kept(step, self.folder / f"step-{step}", speedup, self.tau()))

    def _show(self, trainer: lightning.Trainer, draft: PreTrainedModel) -> None:
        logger: Any = trainer.logger
        if logger and self.show:
            logger.experiment.add_text(f"{tags.TEXT}/fixed_prompt", self.show(draft), trainer.global_step)

    @property
    def stale(self) -> bool:
        """Whether patience has run out."""
        return bool(self.patience) and len(self.kept) - 1 - self.kept.index(self.best()) >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [(k.step, str(k.path.name), k.speedup, k.tau) for k in self.kept]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = [Kept(step, self.folder / name, *found) for step, name, *found in state_dict["kept"]]

    def best(self) -> Kept:
        """The checkpoint to measure afresh. Raises ValueError before any validation."""
        if not self.kept:
            raise ValueError("no checkpoint was measured: trainer.steps ended before a validation")
        return max(self.kept, key=lambda kept: kept.tau)


class Averaged(Shown):
    """An exponential moving average of the draft's weights: what is judged, measured, kept and exported. Steps go on
    from the weights themselves. Behind the callbacks that measure: it gives the weights back as validation ends.

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
        kept = self.average or [weight.detach().clone() for weight in weights]
        self.average = [one.to(weight) for one, weight in zip(kept, weights, strict=True)]
        self.shown = None

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.step = trainer.global_step  # a resumed trainer knows it by now

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


class QuantisationAware(Shown):
    """Passes of a draft whose projections, but the head, are quantised, see `quantisation_table.quantised`; gradients
    move the whole weights (straight through, Bengio et al. 2013, 1308.3432). Judged, measured and kept so."""

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
