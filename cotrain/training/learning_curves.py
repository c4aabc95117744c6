"""The curves of training itself: loss with its parts, learning rate, gradient norm, tokens per second."""

from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor

from cotrain.board import tags
from cotrain.board.loggers import log
from cotrain.training.progress import Progress


class Learning(Callback):
    """Every so many steps (`module.WATCHED`), at x = steps done, what the last of them found. Behind the clock.

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
        if index + 1 < number or not module.found:
            return
        seconds = self.progress.elapsed - self.since
        speed = float(self.tokens) * trainer.world_size / seconds if seconds else 0.0
        self.tokens, self.since = torch.zeros_like(self.tokens), self.progress.elapsed
        found = {f"{tags.TRAINING}/{name}": value for name, value in module.found.items()}
        own = {tags.RATE: self.rate, tags.NORM: self.norm, tags.TOKENS_PER_SECOND: speed}
        log(trainer, found | own, trainer.global_step)


def gradient_norm(draft: torch.nn.Module) -> float:
    """The 2-norm of all gradients together; of a draft in parts, of the whole, asked of all processes at once."""
    grads = [weight.grad for weight in draft.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
