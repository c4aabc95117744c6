"""Whole passes compiled into one graph by torch.compile, for models that run `lean`.

Sizes that change (rows, ids a row, slots read) are symbols: there are at most six graphs a model, for one row or
several, one id or several, and one more where one id of several is asked for. Weights are not packed here,
as they are for `Lean`: which of the two is faster is for `bench.compile=true` to say, whose matrix times both.
"""

import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference import lean
from inference.cache import Window
from inference.forward import SHORT, Lean, additive, attention, picked, visible

# what was compiled of a model and in which state, for every engine that runs it; by whether it is rounded
_STEPS: WeakKeyDictionary[PreTrainedModel, dict[bool, tuple[Any, Any]]] = WeakKeyDictionary()


class Compiled(Lean):
    """As `Lean`, short passes over the first slots compiled. Where that fails, passes run uncompiled, with one
    warning."""

    failed = False  # for all: what fails once, as for want of a C++ compiler, fails again

    def _read(self) -> None:
        super()._read()
        self.seen: set[tuple[bool, bool, bool]] = set()
        state, step = _STEPS.setdefault(self.model, {}).get(self.int8, (None, None))
        if step is None or state != self.state:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)  # for all models
            weights = self.weights if self.int8 else lean.weights_of(self.model)  # it cannot trace packed ones
            step = torch.compile(Step(weights, self.shape))
            _STEPS[self.model][self.int8] = (self.state, step)
        self.step = step

    def logits(self, ids: Tensor, window: Window, only: Tensor | None = None) -> Tensor:
        if self._ready(ids, window) and not Compiled.failed:
            try:
                return self._compiled(ids, window, only)
            except Exception as error:  # whatever the compiler raises
                Compiled.failed = True
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                warnings.warn(f"torch.compile failed, passes run uncompiled: {reason}", stacklevel=2)
        return super().logits(ids, window, only)

    def _ready(self, ids: Tensor, window: Window) -> bool:
        """The last row of a batch runs uncompiled: a graph of one row would be made for a few rounds."""
        store = self.cache.stores[0]
        usual = (ids.shape[0] > 1) == (store.rows > 1)
        return usual and window.low == 0 and ids.shape[1] <= SHORT and store.is_initialized

    def _compiled(self, ids: Tensor, window: Window, only: Tensor | None) -> Tensor:
        cos, sin = self.rotation(window)
        mask = additive(visible(window, ids.device), self.shape.held)
        keys, values = ([getattr(store, name) for store in self.cache.stores] for name in ("keys", "values"))
        inputs = (ids, window.positions, cos, sin, mask, keys, values)
        kind = (ids.shape[0] > 1, ids.shape[1] > 1, only is not None)
        if kind not in self.seen:
            _mark(*inputs)
            if only is not None and ids.shape[0] > 1:
                torch._dynamo.mark_dynamic(only, 0)
            self.seen.add(kind)
        logits: Tensor = self.step(*inputs, only)
        return logits


class Step(nn.Module):
    """A pass as a function of tensors; the weights are its parameters."""

    def __init__(self, weights: lean.Weights, shape: lean.Shape) -> None:
        super().__init__()
        self.shape, self.count = shape, 0
        self.weights = self._registered(weights)

    def _registered(self, value: Any) -> Any:
        """The same structure, each tensor a parameter."""
        if isinstance(value, Tensor):
            self.count += 1
            self.register_parameter(f"weight{self.count}", nn.Parameter(value, requires_grad=False))
            return f"weight{self.count}"
        if isinstance(value, list):
            return [self._registered(item) for item in value]
        return value if value is None else type(value)(*map(self._registered, value))

    def _tensors(self, value: Any) -> Any:
        if isinstance(value, str):
            return getattr(self, value)
        if isinstance(value, list):
            return [self._tensors(item) for item in value]
        return value if value is None else type(value)(*[self._tensors(item) for item in value])

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        only: Tensor | None,
    ) -> Tensor:
        """ids, positions (A, n), mask (A, 1, n, L), keys, values (rows, G, slots, D) a layer -> logits (A, n, V), or
        (A, 1, V) of `only` (A,)."""
        A, L = ids.shape[0], mask.shape[-1]
        row = torch.arange(A, device=ids.device).unsqueeze(1)
        weights = self._tensors(self.weights)

        def keep(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            for store, new in ((keys[layer], k), (values[layer], v)):
                store.transpose(1, 2).index_put_((row, positions), new.transpose(1, 2))
            return keys[layer][:A, :, :L], values[layer][:A, :, :L]

        states = lean.hidden(ids, weights, self.shape, cos, sin, keep, attention(mask, self.shape))
        return weights.head(states if only is None else picked(states, only))


def _mark(ids: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, keys: Any, values: Any) -> None:
    """Sizes that change from pass to pass; a size of one is a graph of its own."""
    changing = [(ids, (0, 1)), (positions, (0, 1)), (cos, (0, 1)), (sin, (0, 1)), (mask, (0, 2, 3))]
    for tensor, sizes in changing + [(store, (2,)) for store in (*keys, *values)]:
        for size in sizes:
            if tensor.shape[size] > 1:
                torch._dynamo.mark_dynamic(tensor, size)
