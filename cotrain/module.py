"""Distillation of a draft from a frozen target, as a LightningModule that only wires its parts together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning
from torch import Tensor
from transformers import PreTrainedModel

from cotrain import acceptance, losses
from cotrain.evaluate import HeldOut, Scores, evaluate, figures
from cotrain.rows import Truncate, chunked
from cotrain.teacher import Remembering, split

Loss = Callable[..., Tensor]
WATCHED = 5  # every so many steps, what a step found is logged


@dataclass(frozen=True)
class Stage:
    """A loss that is used until this fraction of the steps is done."""

    until: float
    loss: Loss


def current(stages: Sequence[Stage], progress: float) -> Loss:
    """The loss at a progress in [0, 1]: the first stage that has not ended, else the last."""
    return next((stage.loss for stage in stages if progress < stage.until), stages[-1].loss)


class Distillation(lightning.LightningModule):
    """Trains `draft` to be accepted by `target` under a regime.

    stages: losses of `cotrain.losses`, one after the other. optimizer, scheduler: factories that take the draft,
    and the optimiser. temperature, truncate: the regime, see `rows.chunked`. held_out: texts sampled from the target,
    by temperature; acceptance on them is logged at every validation, by domain. cosine: weight of
    `losses.misaligned` on the final hidden states, 0 for none. remember: bytes of the target's hidden states to keep.

    Raises ValueError for a cosine between states of different widths.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        target: PreTrainedModel,
        stages: Sequence[Stage],
        optimizer: Callable[..., Any],
        scheduler: Callable[..., Any],
        held_out: dict[float, HeldOut],
        temperature: float = 1.0,
        truncate: Truncate | None = None,
        chunk: int = 1024,
        cosine: float = 0.0,
        remember: int = 0,
    ) -> None:
        super().__init__()
        self.draft, self.stages = draft, stages
        self.make_optimizer, self.make_scheduler, self.held_out = optimizer, scheduler, held_out
        self.temperature, self.truncate, self.chunk, self.cosine = temperature, truncate, chunk, cosine
        self.read_draft, self.head_draft = split(draft)
        read_target, self.head_target = split(target)  # plain functions: the target is not saved
        self.teacher = Remembering(read_target, remember)
        self.judged: dict[float, dict[str, Scores]] = {}
        widths = [model.config.get_text_config().hidden_size for model in (draft, target)]
        if cosine and len(set(widths)) > 1:
            raise ValueError(f"init.cosine: the draft's hidden states are {widths[0]} wide, the target's {widths[1]}")

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        ids, weight = batch["ids"], batch["predicted"]
        theirs = self.teacher(ids, batch["key"])[:, :-1]
        ours = self.read_draft(ids)[:, :-1]
        watched = (self.global_step + 1) % WATCHED == 0
        loss = current(self.stages, self.global_step / max(self.trainer.max_steps, 1))
        total, found = chunked(
            loss, theirs, self.head_target, ours, self.head_draft, weight, self.temperature,
            chunk=self.chunk, truncate=self.truncate, measured=watched,
        )  # fmt: skip
        mean = total / max(found.positions, 1)
        if watched:
            self.log("train/loss", mean, prog_bar=True)
            self.log("train/alpha", found.alpha, prog_bar=True)
            self.log("train/alpha_greedy_draft", found.alpha_greedy)
        if self.cosine:
            apart = losses.misaligned(ours, theirs)[weight].mean()
            if watched:
                self.log("train/misaligned", apart)
            mean = mean + self.cosine * apart
        return mean

    def validation_step(self, batch: Any, _: int) -> None:
        """The held-out texts are evaluated at the epoch's end, by regime; the loader only asks for it."""

    def on_validation_epoch_end(self) -> None:
        self.judge()
        self.log_dict(self.acceptance())

    def judge(self) -> None:
        """Score the draft as it now is on the held-out texts; `acceptance` and `scores` tell what was found last."""
        heads = (self.read_draft, self.head_draft, self.head_target)
        self.judged = {t: evaluate(held_out, *heads) for t, held_out in self.held_out.items()}

    def acceptance(self) -> dict[str, float]:
        """Every figure of `evaluate`, named for its temperature."""
        return {_tag(name, t): value for t, found in self.judged.items() for name, value in figures(found).items()}

    def tau(self, k: int, objective: str = "sampled") -> float:
        """Tokens per target call at draft length k in the regime, as predicted on the held-out texts; objective: how
        drafts are chosen, "sampled" or "greedy"."""
        found = self.judged[self.temperature]["all"]
        r = found.r_greedy if objective == "greedy" else found.r
        return float(acceptance.tau(r, k, found.lengths))

    def scores(self) -> dict[float, Scores]:
        """Of all held-out texts together, by temperature."""
        return {t: found["all"] for t, found in self.judged.items()}

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.draft)
        schedule = self.make_scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _tag(name: str, temperature: float) -> str:
    """alpha/code at 0.5 -> alpha_T0.5/code: TensorBoard draws one section a quantity and temperature."""
    kind, rest = name.split("/", 1)
    return f"{kind}_T{temperature:g}/{rest}"
