"""Optimisers, the learning-rate schedule, and the precision of a step."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from cotrain.errors import UserError
from cotrain.training.progress import Progress
from inference.measure import environment
from inference.models.pretrained import half

# Lightning's precisions with weights in half precision -> those that compute in it, with weights in float32
HALVES = {
    "16-true": "16-mixed",
    "bf16-true": "bf16-mixed",
    "transformer-engine": "bf16-mixed",
    "transformer-engine-float16": "16-mixed",
}


class MuonAdamW(torch.optim.Optimizer):
    """An optimiser that applies Muon (Jordan 2024) to matrices, and AdamW to embeddings, heads and norms.

    Its `param_groups` are the groups of both optimisers, so a schedule applies to both. Muon's updates are scaled to
    the size of AdamW's, so one learning rate fits both.

    lr: the learning rate of both. betas: AdamW's. weight_decay: Muon's; AdamW has none here. embedding_lr: AdamW's
    learning rate; None: `lr`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        weight_decay: float,
        betas: Iterable[float] = (0.9, 0.95),
        embedding_lr: float | None = None,
    ) -> None:
        matrices, others = matrices_and_others(model)
        first, second = betas
        muon: Callable[..., torch.optim.Optimizer] = partial(
            torch.optim.Muon, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        rest: Callable[..., torch.optim.Optimizer] = partial(
            torch.optim.AdamW, lr=embedding_lr or lr, betas=(first, second), weight_decay=0.0, fused=True
        )
        chosen = [(optimizer, some) for optimizer, some in ((muon, matrices), (rest, others)) if some]
        self.parts = [optimizer(some) for optimizer, some in chosen]
        super().__init__([{"params": some} for _, some in chosen], {})
        self._share()

    def _share(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share()


def matrices_and_others(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return two lists of the trainable parameters: matrices that are neither embedding nor head, and all others."""
    tables = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            inside = parameter.ndim == 2 and "head" not in name and id(parameter) not in tables
            (matrices if inside else others).append(parameter)
    return matrices, others


def adamw(model: nn.Module, lr: float, weight_decay: float, betas: Iterable[float]) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov 2019, arXiv 1711.05101) for all trainable parameters of the model, without weight decay
    on vectors. lr: the learning rate. betas: the decays of both moments.

    It is fused unless the weights are sharded. This saves a tenth of a step's time if a small draft has a large
    embedding.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    first, second = betas
    whole = not any(isinstance(one, DTensor) for one in trained)
    optimizer: Any = torch.optim.AdamW(groups, lr=lr, betas=(first, second), fused=whole)
    # else gradients could not be clipped: a fused optimiser may undo their scaling (float16) in its step
    optimizer._step_supports_amp_scaling = False
    return cast(torch.optim.AdamW, optimizer)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": adamw, "muon": MuonAdamW}  # optimizer.kind


def trapezoid(optimizer: torch.optim.Optimizer, progress: Progress, warmup: float, decay: float) -> LambdaLR:
    """Return a schedule in which the learning rate rises linearly over the first fraction `warmup` of the training, is
    then constant, and falls linearly to 0 over the last fraction `decay`. progress: says which share of the training is
    done after a step. If a finished training is extended, the rate continues at this share of the longer training."""

    def factor(step: int) -> float:
        done = progress.at(step)
        rise = (done + 1 / max(progress.steps, 1)) / warmup if warmup else 1.0
        fall = (1 - done) / decay if decay else float(done < 1)
        return max(0.0, min(1.0, rise, fall))

    return LambdaLR(optimizer, factor)


def precision(name: str, device: str | None = None, key: str = "trainer.precision") -> str:
    """Return Lightning's name for a precision. "auto" gives bf16-mixed, or 32-true on a CPU without fast bfloat16.
    device: the device's type; None for the GPU, if there is one, or else the CPU. key: the setting, for the message.

    Raises UserError, which names `key`, for weights in half precision. There, an update is lost if it is below half the
    distance to the next number, which is 1/256 to 1/128 of a weight in bfloat16.
    """
    if name in HALVES:
        raise UserError(
            f"{key}={name}: weights in half precision lose small updates, so they hardly train: "
            f"set {key}=auto or {HALVES[name]}, with weights in float32"
        )
    if name != "auto":
        return name
    return "bf16-mixed" if half(device or environment.device()) == torch.bfloat16 else "32-true"
