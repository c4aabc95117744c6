"""Whole passes, and all drafts of a round, compiled into one graph by torch.compile, for models that run `llama`.

Sizes that change (ids a row, slots read) are symbols: there are at most three graphs a model and number of rows, for
one id a row or several, and one more where one id of several is asked for; and for a draft one more a draft length.
States of layers, passes that are left early and trees are graphs of their own, made when they are first asked for. A
batch that is not full, as at the end of a queue, runs uncompiled: no graph is made for a few rounds.
"""

import shlex
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._inductor import config, cpp_builder
from transformers import PreTrainedModel

from inference.models import llama_weights
from inference.models.cache import SlotCache, Window
from inference.models.forward import SHORT, Lean, most_ids
from inference.models.passes import Branches, Layers, Pass
from inference.models.step import Drafting, Step

Kind = tuple[Any, ...]  # of a graph
# what was compiled of a model and of which weights, for every engine that runs it; by whether it is rounded, and what
_STEPS: WeakKeyDictionary[PreTrainedModel, dict[Kind, tuple[Any, Any]]] = WeakKeyDictionary()


class Compiled(Lean):
    """As `Lean`, short passes over the first `rows` slots compiled. Where that fails, passes run uncompiled, with one
    warning."""

    failed = False  # for all: what fails once, as for want of a C++ compiler, fails again

    def __init__(self, model: PreTrainedModel, cache: SlotCache, int8: bool, rows: int) -> None:
        self.rows = rows
        self.held: tuple[Tensor, tuple[list[Tensor], list[Tensor]]] | None = None
        super().__init__(model, cache, int8)

    def _read(self) -> None:
        super()._read()
        self.seen: set[Kind] = set()

    def forward(self, ids: Tensor, window: Window, only: Tensor | None = None, layers: Layers = ()) -> Pass:
        found = self._tried(lambda: self._compiled(ids, window, only, layers)) if self._ready(ids, window) else None
        if found is None:
            return super().forward(ids, window, only, layers)
        return Pass(found[0], dict(zip(layers, found[1:], strict=True)))

    def hidden(self, ids: Tensor, window: Window, depth: int) -> Tensor:
        layers = (depth,)
        found = (
            self._tried(lambda: self._compiled(ids, window, None, layers, False)) if self._ready(ids, window) else None
        )
        if found is None:
            return super().hidden(ids, window, depth)
        states: Tensor = found[0]
        return states

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
        whole = ids.shape[0] == self.rows and window.low == 0 and not Compiled.failed
        return whole and ids.shape[1] <= most_ids(window) and self.cache.stores[0].is_initialized

    def _tried(self, run: Callable[[], Any]) -> Any:
        """What `run` returns; None once compiling has failed."""
        try:
            return run()
        except Exception as error:  # whatever the compiler raises
            Compiled.failed = True
            warnings.warn(f"torch.compile failed, passes run uncompiled: {reason(error)}", stacklevel=2)
            return None

    def _compiled(
        self, ids: Tensor, window: Window, only: Tensor | None, layers: Layers, head: bool = True
    ) -> list[Tensor]:
        """What a `Step` with these layers and head gives; of each such kind there are graphs of its own."""
        self._refresh(window.limit)
        slots, positions, branches = torch.arange(window.limit, device=ids.device), window.positions, window.branches
        columns = [ids, positions.contiguous()]
        kind: Kind = (ids.shape[1] > 1, only is not None)
        if branches is not None:
            columns += [branches.slots.contiguous(), branches.seen.contiguous()]
            branches, kind = Branches(branches.anchor, *columns[2:]), (*kind, "tree", ids.shape[1] > SHORT)
        inputs = (*columns[:2], *self.angles, slots, *self._stores(), only, branches, self.scale)
        several = [*((part, 1) for part in columns), *((part, 0) for part in (*self.angles, slots))]
        name = ("pass", layers, head) if layers else "pass"
        make = partial(Step, layers=layers, head=head)
        found: list[Tensor] = self._called(name, make, kind, inputs, several)
        return found

    def _drafted(
        self, tails: Tensor, ends: Tensor, u: Tensor, temperature: Tensor, greedy: bool, limit: int
    ) -> tuple[Tensor, Tensor]:
        self._refresh(limit)
        slots = torch.arange(limit, device=tails.device)
        inputs = (tails, ends, u, temperature, *self.angles, slots, *self._stores(), self.scale)
        several = [(part, 0) for part in (*self.angles, slots)]
        kind, k = ("greedy" if greedy else "draws"), u.shape[1]
        found: tuple[Tensor, Tensor] = self._called(
            (kind, k), lambda weights, shape: Drafting(weights, shape, k, greedy), (), inputs, several
        )
        return found

    def _stores(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the rows, without those of the slots in which prompts wait."""
        if self.held is None or self.held[0] is not self.cache.stores[0].keys:  # slots were added
            self.held = self.cache.stores[0].keys, self.cache.held(self.rows)
        return self.held[1]

    def _called(self, name: Any, make: Callable[..., nn.Module], kind: Kind, inputs: Any, several: Any) -> Any:
        """The compiled module `name` on inputs; `several`: tensors, each with the size that changes between calls."""
        step = self.compiled(name, make)
        # tensors of inference mode and others are of two kinds to a graph
        kind = (name, inputs[0].shape[0], self.cache.stores[0].keys.is_inference(), *kind)
        if kind in self.seen:
            return step(*inputs)
        _mark([*several, *((store, 2) for stores in self._stores() for store in stores)])
        self.seen.add(kind)
        with self._packing():
            return step(*inputs)

    def compiled(self, name: Any, make: Callable[..., nn.Module]) -> Any:
        """The module made of the model's weights and shape, for all who run the model while these stay as they are."""
        origin, step = _STEPS.setdefault(self.model, {}).get((self.int8, name), (None, None))
        if step is None or origin != self.origin:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)  # for all models
            weights = self.weights if self.int8 else llama_weights.weights_of(self.model)  # it packs its own
            quote_libraries()
            step = torch.compile(make(weights, self.shape))
            _STEPS[self.model][self.int8, name] = (self.origin, step)
        return step

    def _packing(self) -> AbstractContextManager[Any]:
        """While a graph is made: weights that `llama_weights.packed` would pack become its constants, in the kernels'
        order."""
        fits = not self.int8 and llama_weights.can_pack(self.model)
        return config.patch(freezing=True) if fits else nullcontext()


HINTS = ("Set TORCH", "You can suppress", "    import", "    torch._dynamo", "For even more", "For more")  # torch's own


def reason(error: Exception) -> str:
    """The last line that the compiler said, without torch's advice behind it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith(HINTS)]
    return lines[-1] if lines else type(error).__name__


def quote_libraries() -> None:
    """torch 2.13 quotes the folders of headers, for its C++ compiler, and not those of libraries: where it is installed
    in a path with a space, nothing would compile."""
    options = cpp_builder.BuildOptionsBase
    if " " in torch.__path__[0]:
        options.get_libraries_dirs = lambda self: [shlex.quote(path) for path in self._libraries_dirs]  # type: ignore[method-assign]


def _mark(several: list[tuple[Tensor, int]]) -> None:
    """Sizes that change from call to call; a size of one is a graph of its own."""
    for tensor, size in several:
        if tensor.shape[size] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, size)
