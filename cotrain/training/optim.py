"""The optimiser, its learning-rate schedule, and the precision of a step."""

from collections.abc import Iterable
from typing import Any

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
    return optimizer


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
