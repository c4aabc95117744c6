"""The optimiser with which the bundled target was trained."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn


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
