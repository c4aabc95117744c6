"""Passes compiled by torch.compile, for the models of `llama`. It compiles short passes, and all drafts of a round.

Sizes that change (ids per row, slots read) are symbols. For each number of rows, a model therefore has at most three
graphs: for one id per row, for several ids, and for several ids with logits of only one. A draft has one more graph for
each draft length. States of layers, passes that end early and trees have separate graphs, compiled at their first use.
A batch that is not full, as at the end of a queue, runs uncompiled, since compiling for a few rounds does not pay.
`CompiledModules` serves drafts with a network of their own too (`inference.proposers.eagle`).
"""

import shlex
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._inductor import config, cpp_builder
from transformers import PreTrainedModel

from inference.models import llama, packing
from inference.models.cache import SlotCache, Window
from inference.models.forward import SHORT, Lean, most_ids
from inference.models.markov import Term
from inference.models.passes import Branches, Layers, Pass
from inference.models.step import Drafting, Drafts, Draws, Masked, OnePass, Step

Result = TypeVar("Result")
GraphKey = tuple[Any, ...]
# compiled modules with the origin of their weights, by model and then by (int8, name); shared by all engines
_MODULES: WeakKeyDictionary[PreTrainedModel, dict[tuple[bool, Any], tuple[Any, Any]]] = WeakKeyDictionary()


class CompiledModules:
    """Compiled modules of a model, which read the first `rows` slots of a cache. If compiling fails, their callers run
    uncompiled, with one warning. int8: whether their weights are rounded. origin: the weights that they are made
    from."""

    failed = False  # for all models: if compiling fails once, as without a C++ compiler, it fails again

    origin: Any

    def __init__(self, model: PreTrainedModel, cache: SlotCache, int8: bool, rows: int) -> None:
        self.model, self.cache, self.int8, self.rows = model, cache, int8, rows
        self.graphs: set[GraphKey] = set()  # those that have run: their sizes are marked
        self._stored: tuple[Tensor, tuple[list[Tensor], list[Tensor]]] | None = None

    def fits(self, ids: Tensor, window: Window) -> bool:
        """Return whether passes of this shape are compiled."""
        whole = ids.shape[0] == self.rows and window.low == 0 and not CompiledModules.failed
        return whole and ids.shape[1] <= most_ids(window) and self.cache.stores[0].is_initialized

    def uncompiled_on_error(self, run: Callable[[], Result]) -> Result | None:
        """Return what `run` returns, or None once compiling has failed."""
        try:
            return run()
        except Exception as error:  # the compiler may raise anything
            CompiledModules.failed = True
            warnings.warn(f"torch.compile failed, passes run uncompiled: {reason(error)}", stacklevel=2)
            return None

    def keys_and_values(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and values of the rows, without the slots of waiting prompts."""
        if self._stored is None or self._stored[0] is not self.cache.stores[0].keys:  # slots were added
            self._stored = self.cache.stores[0].keys, self.cache.stored(self.rows)
        return self._stored[1]

    def call(self, module: Any, key: GraphKey, inputs: tuple[Any, ...], dynamic: list[tuple[Tensor, int]]) -> Any:
        """Return what the compiled module returns. dynamic: tensors, each with the dimension whose size changes between
        calls."""
        # tensors of inference mode and others have different graphs
        key = (*key, inputs[0].shape[0], self.cache.stores[0].keys.is_inference())
        if key in self.graphs:
            return module(*inputs)
        for tensor, dimension in [*dynamic, *((store, 2) for stores in self.keys_and_values() for store in stores)]:
            if tensor.shape[dimension] > 1:  # a size of one has a graph of its own
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        self.graphs.add(key)
        with self._packing():
            return module(*inputs)

    def compiled(self, name: Any, make: Callable[[], nn.Module]) -> Any:
        """Return the compiled module of a name. Engines share it as long as the weights are unchanged."""
        modules = _MODULES.setdefault(self.model, {})
        origin, module = modules.get((self.int8, name), (None, None))
        if module is None or origin != self.origin:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)  # of all models
            quote_libraries()
            module = torch.compile(make())
            for old in [key for key, (own, _) in modules.items() if own == origin]:
                del modules[old]  # and with it copies of old weights
            modules[self.int8, name] = (self.origin, module)
        return module

    def _packing(self) -> AbstractContextManager[Any]:
        """Return a context for compiling. Inside it, the weights become constants of the graph if the compiler packs
        them."""
        return config.patch(freezing=True) if self.freezes else nullcontext()

    @property
    def freezes(self) -> bool:
        """Return whether the compiler packs the weights itself; it does so for bfloat16 only."""
        return not self.int8 and self.model.dtype == torch.bfloat16 and packing.can_pack(self.model)


class CompiledForward(CompiledModules, Lean):
    """The forward of `Lean` with compiled short passes over the first `rows` slots."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache, int8: bool, rows: int) -> None:
        CompiledModules.__init__(self, model, cache, int8, rows)
        Lean.__init__(self, model, cache, int8)

    def _read_weights(self) -> None:
        super()._read_weights()
        self.graphs = set()

    def module(self, name: Any, make: Callable[[llama.Weights, llama.ModelShape], nn.Module]) -> Any:
        """Return the compiled module of a name, made from the model's weights and shape."""

        def build() -> nn.Module:
            return make(llama.weights_of(self.model) if self.freezes else self.weights, self.shape)

        return self.compiled(name, build)

    def forward(self, ids: Tensor, window: Window, only: Tensor | None = None, layers: Layers = ()) -> Pass:
        alone = layers and ids.shape[1] == 1  # as at a text's end, where no draft is left: a graph would not pay
        results = None if alone else self._pass(ids, window, only, layers)
        if results is None:
            return super().forward(ids, window, only, layers)
        return Pass(results[0], dict(zip(layers, results[1:], strict=True)))

    def hidden(self, ids: Tensor, window: Window, depth: int) -> Tensor:
        results = self._pass(ids, window, None, (depth,), head=False)
        return super().hidden(ids, window, depth) if results is None else results[0]

    def _pass(
        self, ids: Tensor, window: Window, only: Tensor | None, layers: Layers, head: bool = True
    ) -> list[Tensor] | None:
        """Return what a `Step` with these layers and head returns, or None if the pass runs uncompiled."""
        if not self.fits(ids, window):
            return None

        def run() -> list[Tensor]:
            self.refresh(window.limit)
            slots = torch.arange(window.limit, device=ids.device)
            positions, branches = window.positions, window.branches
            columns = [ids, positions.contiguous()]
            key: GraphKey = (ids.shape[1] > 1, only is not None)
            if branches is not None:
                columns += [branches.slots.contiguous(), branches.seen.contiguous()]
                branches, key = Branches(branches.anchor, *columns[2:]), (*key, "tree", ids.shape[1] > SHORT)
            inputs = (*columns[:2], *self.angles, slots, *self.keys_and_values(), only, branches, self.scale)
            dynamic = [*((part, 1) for part in columns), *((part, 0) for part in (*self.angles, slots))]
            name = ("pass", layers, head) if layers else "pass"
            module = self.module(name, partial(Step, layers=layers, head=head))
            results: list[Tensor] = self.call(module, (name, *key), inputs, dynamic)
            return results

        return self.uncompiled_on_error(run)

    def draft(
        self, tails: Tensor, ends: Tensor, u: Tensor, temperature: Tensor, greedy: bool, window: Window
    ) -> Drafts | None:
        """Return all drafts of a round from a compiled `Drafting`, see `LM.draft`. Return None if there are too many
        slots to compile. window.limit: the slots of the longest text with its drafts."""
        if not self.fits(tails, window):
            return None

        def run() -> Drafts:
            self.refresh(window.limit)
            slots, k = torch.arange(window.limit, device=tails.device), u.shape[1]
            inputs = (tails, ends, u, temperature, *self.angles, slots, *self.keys_and_values(), self.scale)
            dynamic = [(part, 0) for part in (*self.angles, slots)]
            name = ("greedy" if greedy else "draws"), k
            module = self.module(name, lambda weights, shape: Drafting(weights, shape, k, greedy))
            drafts: Drafts = self.call(module, (name,), inputs, dynamic)
            return drafts

        return self.uncompiled_on_error(run)

    def draft_masked(
        self, draws: Draws, masked: Masked, k: int, greedy: bool, window: Window, term: Term | None
    ) -> Drafts | None:
        """Return all drafts of a round from a compiled `OnePass`, see `at_once`. Return None if rows are too long, or
        if distributions depend on more than a temperature."""
        alone = draws.by_temperature(greedy)
        if alone is None or not self.fits(masked.ids, window):
            return None
        device = self.model.device
        u, temperature = (part.to(device) for part in draws.uniforms(k))
        even = u.reshape(-1).view(u.shape)  # the strides do not depend on the number of uniforms

        def run() -> Drafts:
            self.refresh(window.limit)
            slots = torch.arange(window.limit, device=device)
            inputs = (*masked, even, temperature, *self.angles, slots, *self.keys_and_values())
            dynamic = [(masked.ids, 1), *((part, 0) for part in (*self.angles, slots))]
            name = ("one pass", k, alone)
            module = self.module(name, lambda weights, shape: OnePass(weights, shape, k, alone, term))
            drafts: Drafts = self.call(module, (name, masked.ids.shape[1] > 1), inputs, dynamic)
            return drafts

        return self.uncompiled_on_error(run)


HINTS = ("Set TORCH", "You can suppress", "    import", "    torch._dynamo", "For even more", "For more")  # torch's own


def reason(error: Exception) -> str:
    """Return the last line of the compiler's message, without torch's advice after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith(HINTS)]
    return lines[-1] if lines else type(error).__name__


def quote_libraries() -> None:
    """Make torch 2.13 quote library folders for its C++ compiler, as it already quotes header folders. Otherwise
    nothing compiles if torch is installed in a path with a space."""
    options = cpp_builder.BuildOptionsBase
    if " " in torch.__path__[0]:
        options.get_libraries_dirs = lambda self: [shlex.quote(path) for path in self._libraries_dirs]  # type: ignore[method-assign]
