"""Whole passes, and all drafts of a round, compiled into one graph by torch.compile, for models that run `lean`.

Sizes that change (rows, ids a row, slots read) are symbols: there are at most six graphs a model, for one row or
several, one id or several, and one more where one id of several is asked for; and for a draft one more a draft length.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._inductor import config
from transformers import PreTrainedModel

from inference import lean
from inference.cache import Window
from inference.forward import SHORT, Lean, additive, attention, picked, seen_from
from inference.sampling import draw, one_hot, wide

Kind = tuple[Any, ...]  # of a graph
# what was compiled of a model and in which state, for every engine that runs it; by whether it is rounded, and what
_STEPS: WeakKeyDictionary[PreTrainedModel, dict[Kind, tuple[Any, Any]]] = WeakKeyDictionary()


class Compiled(Lean):
    """As `Lean`, short passes over the first slots compiled. Where that fails, passes run uncompiled, with one
    warning."""

    failed = False  # for all: what fails once, as for want of a C++ compiler, fails again

    def _read(self) -> None:
        super()._read()
        self.seen: set[Kind] = set()

    def logits(self, ids: Tensor, window: Window, only: Tensor | None = None) -> Tensor:
        if self._ready(ids, window):
            found: Tensor | None = self._tried(lambda: self._compiled(ids, window, only))
            if found is not None:
                return found
        return super().logits(ids, window, only)

    def draft(
        self, tails: Tensor, ends: Tensor, u: Tensor, temperature: Tensor, greedy: bool, window: Window
    ) -> tuple[Tensor, Tensor] | None:
        """By `Drafting`; window.limit: the slots of the longest text with its drafts."""
        if not self._ready(tails, window):
            return None
        found: tuple[Tensor, Tensor] | None = self._tried(
            lambda: self._drafted(tails, ends, u, temperature, greedy, window.limit)
        )
        return found

    def _ready(self, ids: Tensor, window: Window) -> bool:
        """The last row of a batch runs uncompiled: a graph of one row would be made for a few rounds."""
        store = self.cache.stores[0]
        usual = (ids.shape[0] > 1) == (store.rows > 1) and not Compiled.failed
        return usual and window.low == 0 and ids.shape[1] <= SHORT and store.is_initialized

    def _tried(self, run: Callable[[], Any]) -> Any:
        """What `run` returns; None once compiling has failed."""
        try:
            return run()
        except Exception as error:  # whatever the compiler raises
            Compiled.failed = True
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            warnings.warn(f"torch.compile failed, passes run uncompiled: {reason}", stacklevel=2)
            return None

    def _compiled(self, ids: Tensor, window: Window, only: Tensor | None) -> Tensor:
        self._refresh(window.limit)
        slots, positions = torch.arange(window.limit, device=ids.device), window.positions.contiguous()
        inputs = (ids, positions, *self.angles, slots, *self._stores(), only)
        several = [(ids, (0, 1)), (positions, (0, 1)), *((part, (0,)) for part in (*self.angles, slots, only))]
        logits: Tensor = self._called("pass", Step, (ids.shape[1] > 1, only is not None), inputs, several)
        return logits

    def _drafted(
        self, tails: Tensor, ends: Tensor, u: Tensor, temperature: Tensor, greedy: bool, limit: int
    ) -> tuple[Tensor, Tensor]:
        self._refresh(limit)
        slots = torch.arange(limit, device=tails.device)
        inputs = (tails, ends, u, temperature, *self.angles, slots, *self._stores())
        several = [(part, (0,)) for part in inputs[:7]]
        kind, k = ("greedy" if greedy else "draws"), u.shape[1]
        found: tuple[Tensor, Tensor] = self._called(
            (kind, k), lambda weights, shape: Drafting(weights, shape, k, greedy), (), inputs, several
        )
        return found

    def _stores(self) -> tuple[list[Tensor], list[Tensor]]:
        keys, values = ([getattr(store, name) for store in self.cache.stores] for name in ("keys", "values"))
        return keys, values

    def _called(self, name: Any, make: Callable[..., nn.Module], kind: Kind, inputs: Any, several: Any) -> Any:
        """The compiled module `name` on inputs; `several`: tensors with the sizes that change from call to call."""
        step = self.compiled(name, make)
        # tensors of inference mode and others are of two kinds to a graph
        kind = (name, inputs[0].shape[0] > 1, self.cache.stores[0].keys.is_inference(), *kind)
        if kind in self.seen:
            return step(*inputs)
        _mark([*several, *((store, (2,)) for stores in self._stores() for store in stores)])
        self.seen.add(kind)
        with self._packing():
            return step(*inputs)

    def compiled(self, name: Any, make: Callable[..., nn.Module]) -> Any:
        """The module made of the model's weights and shape, for all who run the model while these stay as they are."""
        state, step = _STEPS.setdefault(self.model, {}).get((self.int8, name), (None, None))
        if step is None or state != self.state:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)  # for all models
            weights = self.weights if self.int8 else lean.weights_of(self.model)  # it packs its own
            step = torch.compile(make(weights, self.shape))
            _STEPS[self.model][self.int8, name] = (self.state, step)
        return step

    def _packing(self) -> AbstractContextManager[Any]:
        """While a graph is made: weights that `lean.packed` would pack become its constants, in the kernels' order."""
        fits = not self.int8 and lean.can_pack(self.model)
        return config.patch(freezing=True) if fits else nullcontext()


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
        slots: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        only: Tensor | None = None,
    ) -> Tensor:
        """ids, positions (A, n); cos, sin (S, D) of all positions; slots (L,): 0 .. L - 1, those that are read; keys,
        values (rows, G, S, D) a layer -> logits (A, n, V), or (A, 1, V) of `only` (A,)."""
        A, L = ids.shape[0], slots.shape[0]
        mask = additive(seen_from(positions, slots), self.shape.held)
        cos, sin = (part[positions].unsqueeze(2) for part in (cos, sin))
        row = torch.arange(A, device=ids.device).unsqueeze(1)
        weights = self._tensors(self.weights)

        def keep(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            for store, new in ((keys[layer], k), (values[layer], v)):
                store.transpose(1, 2).index_put_((row, positions), new.transpose(1, 2))
            return keys[layer][:A, :, :L], values[layer][:A, :, :L]

        states = lean.hidden(ids, weights, self.shape, cos, sin, keep, attention(mask, self.shape))
        return weights.head(states if only is None else picked(states, only))


class Drafting(Step):
    """All drafts of a round: `k` passes of a draft with its laws and draws between them. Step by step, a small draft
    takes longer to launch than to compute. greedy: the likeliest token each time, its law one-hot."""

    def __init__(self, weights: lean.Weights, shape: lean.Shape, k: int, greedy: bool = False) -> None:
        super().__init__(weights, shape)
        self.k, self.greedy = k, greedy

    def forward(  # type: ignore[override]
        self,
        tails: Tensor,
        ends: Tensor,
        u: Tensor,
        temperature: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """tails (A, 2): the last two ids of texts of `ends` (A,) tokens, whose ids before those are stored; u (A, k)
        uniforms; temperature (A,) above 0; the rest as for a pass -> drafts (A, k) and the laws (A, k, V) that they
        were drawn from."""

        def after(ids: Tensor, start: Tensor) -> Tensor:
            positions = start.unsqueeze(1) + torch.arange(ids.shape[1], device=ids.device)
            return wide(super(Drafting, self).forward(ids, positions, cos, sin, slots, keys, values)[:, -1])

        drafts: list[Tensor] = []
        laws: list[Tensor] = []
        logits = after(tails, ends - 2)
        for depth in range(self.k):
            if self.greedy:
                drafts.append(logits.argmax(-1))
                laws.append(one_hot(drafts[-1], logits))
            else:
                laws.append((logits / temperature.to(logits.dtype).unsqueeze(-1)).softmax(-1))
                drafts.append(draw(laws[-1], u[:, depth]))
            if depth + 1 < self.k:
                logits = after(drafts[-1].unsqueeze(1), ends + depth)
        return torch.stack(drafts, 1), torch.stack(laws, 1)


def _mark(several: list[tuple[Tensor | None, tuple[int, ...]]]) -> None:
    """Sizes that change from call to call; a size of one is a graph of its own."""
    for tensor, sizes in several:
        for size in sizes:
            if tensor is not None and tensor.shape[size] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, size)
