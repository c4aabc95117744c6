"""Optimiser and learning-rate schedule factories, and the numbers that steps are computed in."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from inference.measure import environment
from inference.models.dtypes import half


class MuonAdamW(torch.optim.Optimizer):
    """Muon (Jordan 2024) on the matrices inside the layers, AdamW on embeddings, heads and norms.

    One optimiser for callers: `param_groups` are those of both parts, so any schedule drives both.
    """

    def __init__(self, model: nn.Module, lr: float, embedding_lr: float, weight_decay: float) -> None:
        inside = {id(p) for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in f".{n}"}
        matrices = [p for p in model.parameters() if id(p) in inside]
        others = [p for p in model.parameters() if id(p) not in inside]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=embedding_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        super().__init__([{"params": matrices}, {"params": others}], {})
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


def adamw(model: nn.Module, lr: float, weight_decay: float, betas: Iterable[float]) -> torch.optim.AdamW:
    """AdamW (Loshchilov 2019, arXiv 1711.05101) on every parameter that trains, without decay on vectors."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    first, second = betas
    return torch.optim.AdamW(groups, lr=lr, betas=(first, second))


def precision(name: str, device: str | None = None) -> str:
    """Lightning's name; "auto": bf16-mixed, or 32-true on a CPU that would emulate bfloat16. device: by default the GPU
    where there is one."""
    if name != "auto":
        return name
    return "bf16-mixed" if half(device or environment.device()) == torch.bfloat16 else "32-true"
