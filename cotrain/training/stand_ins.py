"""A draft's weights swapped for a while: for their average, or as rounded, while they are judged or measured."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn


class StandIn:
    """Puts weights in the place of a module's own, by name, until it is left; its own are then back to the bit.

    Entered twice it changes nothing, and left twice neither. Never left, it stays: a run ends with what is exported.
    """

    def __init__(self, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self.module, self.weights, self.own = module, weights, dict[str, Tensor]()

    @torch.no_grad()
    def __enter__(self) -> nn.Module:
        if not self.own:
            places = dict(self.module.named_parameters())
            self.own = {name: places[name].detach().clone() for name in self.weights}
            self._put(self.weights)
        return self.module

    def __exit__(self, *_: object) -> None:
        self._put(self.own)
        self.own = {}

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        places = dict(self.module.named_parameters())
        for name, weight in weights.items():
            places[name].copy_(weight)


class Shown(Callback):
    """Shows other weights than those that learn, from `show` to `hide`."""

    shown: StandIn | None = None

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """What stands in for the weights of a draft, by their names; nothing for those that stay."""
        raise NotImplementedError

    def show(self, module: Any) -> None:
        """module: whose `draft` is shown with other weights."""
        if self.shown is None:
            self.shown = StandIn(module.draft, self.weights(module.draft))
            self.shown.__enter__()

    def hide(self, module: Any) -> None:
        """Give its own weights back."""
        if self.shown is not None:
            self.shown.__exit__()
            self.shown = None


@contextmanager
def showing(others: Sequence[Shown], module: Any) -> Iterator[None]:
    """What looks at the module's draft within sees the weights of all these."""
    for one in others:
        one.show(module)
    yield
    for one in others:
        one.hide(module)
