"""CUDA graphs. Short passes, all drafts of a round, and other functions of tensors are recorded once and launched as
one.

On a GPU the time of a pass over a few ids is that of its kernel launches. The same holds for the distributions, draws
and verification of a round, some sixty launches. A graph reads and writes the memory that it was recorded with, so
inputs are copied to fixed buffers. `Graph` is the only code that uses the CUDA API. On a CPU the same functions are
called without a graph, so one test covers both.

`Graphs` are functions of named tensors, each input with its own memory. `ColumnGraph` is a function of one int64
buffer, which one copy fills. `GraphForward` runs the passes of a model, with one `ColumnGraph` per shape of inputs.

A rows, n ids per row, k drafts, S slots.
"""

import gc
import warnings
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, arange
from transformers import PreTrainedModel

from inference.models.cache import SlotCache, Window, move_path
from inference.models.forward import SHORT, Lean, most_ids
from inference.models.markov import Term
from inference.models.passes import Branches, Layers, Pass
from inference.models.step import Drafting, Drafts, Draws, Masked, OnePass, Step, by_round, in_order
from inference.verify.tree import MOST_NODES

WARMUP = 3  # runs before a recording, in which libraries choose their kernels
MOST = 256  # graphs of one `Graphs`; before one more is recorded, all are dropped
FEWEST = 64  # slots of the smallest bucket
WIDTHS = (1, 2, 3, 5, 9, SHORT)  # ids a row of a bucket: an anchor and 0, 1, 2, 4, 8 drafts, or more
TREE_WIDTHS = (*WIDTHS[:-1], 17, 33, MOST_NODES + 1)  # ids per row of a tree's buckets

Inputs = Mapping[str, Tensor]
Bucket = tuple[Any, ...]


class Graph:
    """A CUDA graph of `run`, a function without arguments that reads nothing on the host. On a CPU `run` is called
    instead.

    A CUDA graph reads memory, not tensors. The caller must hold every tensor that `run` refers to, or pass it as
    `reads`, which lives as long as the graph.
    """

    def __init__(self, run: Callable[[], Any], device: torch.device, pool: Any, reads: object = None) -> None:
        self.reads = reads
        self.run: Callable[[], Any] | None = run
        self.graph: Any = None
        if device.type == "cuda":
            with torch.cuda.device(device):  # a capture is of the current device's stream
                self.graph, self.results = _recorded(run, pool)
            self.run = None

    def __call__(self) -> Any:
        """Return the result of `run`. On a GPU it is valid until the next call of any graph in the pool."""
        if self.run is not None:
            return self.run()
        self.graph.replay()
        return self.results


def _recorded(run: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
    """Return a CUDA graph of `run`, and the tensors that it writes its results to."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with uncollected(), torch.cuda.graph(graph, pool=pool):
        results = run()
    return graph, results


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage inside the block: a graph of an engine that nothing refers to any more would be destroyed,
    which CUDA does not allow during a capture. This is of the whole process; calls of engines run one at a time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def pool_for(device: torch.device) -> Any:
    """Return a new memory pool for graphs, or None on a CPU. A pool whose graphs are all dropped cannot be used
    again."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def _reason(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class Graphs:
    """Functions of named tensors as graphs. There is one graph per shape of a function's inputs, and all graphs read an
    input from the same memory.

    device: device of all inputs. If recording fails, there is one warning and nothing more is recorded.
    """

    failed = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory: dict[str, Tensor] = {}  # of each input, flat, as long as its longest value so far
        self._drop()

    def __call__(
        self,
        name: Hashable,
        inputs: Inputs,
        steady: frozenset[str],
        make: Callable[[], Callable[[Inputs], Any]],
        reads: object = None,
    ) -> Any:
        """Return the result of the function `name` for these inputs, valid until the next call. Return None once
        recording has failed.

        name: everything that the function depends on except the inputs. steady: inputs whose values change only when
        the tensor is replaced; they are copied only then. make: returns the function, which maps inputs to tensors
        without a read on the host; it is called if there is no graph. reads: an object with further tensors that the
        function reads; a graph refers to the object that it was recorded with.
        """
        if self.failed:
            return None
        copies = self._copied(inputs, steady)
        key = name, tuple((part, value.dtype, value.shape) for part, value in copies.items())
        if key not in self.graphs:
            try:
                self._record(key, make(), copies, reads)
            except RuntimeError as error:
                self.failed = True
                self._drop()
                message = f"CUDA graphs of distributions and draws failed; they run without: {_reason(error)}"
                warnings.warn(message, stacklevel=3)
                return None
        return self.graphs[key]()

    def _copied(self, inputs: Inputs, steady: frozenset[str]) -> dict[str, Tensor]:
        """Copy the inputs into the memory that graphs read, and return these copies."""
        copies = {}
        for name, value in inputs.items():
            copies[name] = copy = self._memory(name, value)
            if name not in steady:
                copy.copy_(value)
            elif self.sources.get(name) is not value:
                copy.copy_(value)
                self.sources[name] = value
        return copies

    def _memory(self, name: str, value: Tensor) -> Tensor:
        memory = self.memory.get(name)
        if memory is None or memory.dtype != value.dtype or memory.numel() < value.numel():
            if memory is not None:
                self._drop()  # graphs read the old memory
            with torch.inference_mode(False):  # written to in inference mode and outside it
                self.memory[name] = memory = torch.empty(value.numel(), dtype=value.dtype, device=self.device)
        return memory[: value.numel()].view(value.shape)

    def _record(self, key: Hashable, run: Callable[[Inputs], Any], inputs: Inputs, reads: object) -> None:
        if len(self.graphs) >= MOST:
            self._drop()
        if not self.graphs:
            self.pool = pool_for(self.device)
        self.graphs[key] = Graph(lambda: run(inputs), self.device, self.pool, reads)

    def _drop(self) -> None:
        self.graphs: dict[Hashable, Graph] = {}
        self.sources: dict[str, Tensor] = {}  # the tensor that was last copied, of each steady input


class ColumnGraph:
    """A graph of the function `run`, which maps (rows, C) int64 to tensors. columns: parts (A, c) of the first input;
    floating-point inputs are passed as their `bits`.

    The runs before a recording write keys and values too, so they use the inputs of a real pass and write the same
    numbers. Rows after A repeat the inputs of the first row until they have their own; no text uses their slots.
    """

    def __init__(self, run: Callable[[Tensor], Any], columns: Sequence[Tensor], rows: int, pool: Any) -> None:
        self.run, first = run, torch.cat(list(columns), 1)
        self.buffer = buffer = first[:1].repeat(rows, 1)
        buffer[: len(first)] = first
        self.graph = Graph(lambda: run(buffer), buffer.device, pool)  # no reference to self: freed without a collection

    def __call__(self, columns: Sequence[Tensor]) -> Any:
        """Return what `run` returns for the parts (A, c), A <= rows, and for the rows after them. The result is valid
        as long as `Graph` says."""
        torch.cat(list(columns), 1, out=self.buffer[: len(columns[0])])
        return self.graph()


def bits(numbers: Tensor) -> Tensor:
    """Return floating-point numbers as float64 whose bits are read as int64, see `numbers_of`."""
    return numbers.to(torch.float64).view(torch.int64)


def numbers_of(bits: Tensor) -> Tensor:
    """Return the float64 numbers with these `bits`."""
    return bits.view(torch.float64)


class GraphForward(Lean):
    """The forward of `Lean` with CUDA graphs of short passes over the first slots. Their logits, states, drafts and
    distributions are views that the next call overwrites. If recording fails, this model's passes run without graphs,
    with one warning.

    There is one graph per bucket and kind of result. A bucket is rows, ids per row and slots read, each rounded up. The
    kinds are logits of one id of each row, states of layers, and nodes of a tree. Graphs read keys and values of the
    cache, and the scale of the LM. They are dropped when weights change, and before the cache grows, so that the old
    memory can be freed. All graphs of a model share one memory pool.
    """

    failed = False
    slot_numbers: Tensor | None  # 0 .. slots - 1, which all graphs read

    def __init__(self, model: PreTrainedModel, cache: SlotCache, int8: bool, rows: int) -> None:
        self.rows = rows
        super().__init__(model, cache, int8)
        cache.before_growth(self._drop)

    def forward(self, ids: Tensor, window: Window, only: Tensor | None = None, layers: Layers = ()) -> Pass:
        results = self._step(ids, window, only, layers)
        if results is None:
            return super().forward(ids, window, only, layers)
        return Pass(results[0], dict(zip(layers, results[1:], strict=True)))

    def hidden(self, ids: Tensor, window: Window, depth: int) -> Tensor:
        results = self._step(ids, window, None, (depth,), head=False)
        return super().hidden(ids, window, depth) if results is None else results[0]

    def _step(
        self, ids: Tensor, window: Window, only: Tensor | None, layers: Layers, head: bool = True
    ) -> list[Tensor] | None:
        """Return what a `Step` with these layers and head returns, or None if the pass runs without a graph."""
        if not self._fits(ids, window):
            return None
        (A, n), branches = ids.shape, window.branches
        widths = WIDTHS if branches is None else TREE_WIDTHS
        width = widths[bisect_left(widths, n)]
        parts = [ids, window.positions] + ([] if branches is None else [branches.slots, branches.seen])
        columns = [column for part in parts for column in (part, repeated(part, width))]
        columns += [] if branches is None else [branches.anchor]
        columns += [] if only is None else [only.unsqueeze(1)]
        rows, slots, one, tree = self._rows(A), self._slots(window), only is not None, branches is not None

        def make() -> Callable[[Tensor], Any]:
            step, stored = Step(self.weights, self.shape, layers, head), self._stored(slots)

            def run(columns: Tensor) -> Any:
                begins = range(0, (4 if tree else 2) * width, width)
                ids, positions, *more = (columns[:, begin : begin + width] for begin in begins)
                branches = Branches(columns[:, 4 * width : 4 * width + 1], *more) if tree else None
                return step(ids, positions, *stored, columns[:, -1] if one else None, branches, scale=self.scale)

            return run

        bucket = rows, width, slots, one, layers, head, tree
        results = self._launch(bucket, columns, make)
        return None if results is None else [part[:A, :n] for part in results]

    def draft(
        self, tails: Tensor, ends: Tensor, u: Tensor, temperature: Tensor, greedy: bool, window: Window
    ) -> Drafts | None:
        """Return all drafts of a round from `Drafting`, see `LM.draft`. Return None if they run without a graph.
        window.limit: the slots of the longest text with its drafts."""
        if not self._fits(tails, window):
            return None
        (A, k), tail, slots = u.shape, tails.shape[1], self._slots(window)

        def make() -> Callable[[Tensor], Any]:
            step, stored = Drafting(self.weights, self.shape, k, greedy), self._stored(slots)

            def run(columns: Tensor) -> Any:
                tails, ends, u, temperature = columns.split((tail, 1, k, 1), 1)
                return step(tails, ends[:, 0], numbers_of(u), numbers_of(temperature[:, 0]), *stored, scale=self.scale)

            return run

        columns = [tails, ends.unsqueeze(1), bits(u), bits(temperature.unsqueeze(1))]
        results = self._launch((self._rows(A), f"{k} drafts", slots, greedy), columns, make)
        return None if results is None else (results[0][:A], results[1][:A])

    def draft_for(
        self,
        draws: Draws,
        k: int,
        greedy: bool,
        tails: Tensor,
        ends: Tensor,
        window: Window,
        fit: Callable[..., Tensor],
    ) -> Drafts | None:
        """Return all k drafts of a round for any sampling settings. They use the round's own distributions and draws.
        Return None if they run without a graph, or if the round is on another device.

        greedy: draft the likeliest tokens. fit: converts logits of the model to the round's vocabulary. tails, ends,
        window: as in `draft`.
        """
        if not self._fits(tails, window):
            return None
        slots = self._slots(window)

        def make() -> Callable[[Draws, Inputs], Drafts]:
            step, stored, scale = Drafting(self.weights, self.shape, k), self._stored(slots), self.scale

            def run(draws: Draws, inputs: Inputs) -> Drafts:
                choose = by_round(draws, greedy)
                return step.drafts(lambda z, x: choose(fit(z), x), inputs["last"], inputs["ends"], scale, *stored)

            return run

        name, given = ("drafts", k, greedy, slots), {"last": tails, "ends": ends}
        drafts: Drafts | None = draws.replayed(self.of_rounds, name, given, make)
        return drafts

    def draft_masked(
        self,
        draws: Draws,
        masked: Masked,
        k: int,
        greedy: bool,
        window: Window,
        term: Term | None,
        fit: Callable[..., Tensor],
    ) -> Drafts | None:
        """Return what `draft_for` returns, but from one pass over masks (`OnePass`), see `at_once`."""
        if not self._fits(masked.ids, window):
            return None
        slots = self._slots(window)

        def make() -> Callable[[Draws, Inputs], Drafts]:
            step, stored = OnePass(self.weights, self.shape, k), self._stored(slots)

            def run(draws: Draws, inputs: Inputs) -> Drafts:
                parts = Masked(*(inputs[f"masked_{name}"] for name in Masked._fields))
                logits = fit(step.logits(parts, *stored))
                return in_order(by_round(draws, greedy), logits, parts.last, term)

            return run

        given = {f"masked_{name}": part for name, part in masked._asdict().items()}
        drafts: Drafts | None = draws.replayed(self.of_rounds, ("one pass", k, greedy, slots), given, make)
        return drafts

    def keep(self, start: Tensor, path: Tensor) -> None:
        bucket, anchor = (self._rows(len(path)), f"{path.shape[1]} nodes"), start.unsqueeze(1)

        def make() -> Callable[[Tensor], Any]:
            keys, values = self.cache.stored(bucket[0])

            def run(columns: Tensor) -> Tensor:
                move_path([*keys, *values], columns[:, 0], columns[:, 1:])
                return columns

            return run

        if not self.failed and bucket not in self.graphs:  # recording would run the move more than once
            self._launch(bucket, [anchor, torch.full_like(path, -1)], make)
        if self.failed or self._launch(bucket, [anchor, path], make) is None:
            super().keep(start, path)

    def _fits(self, ids: Tensor, window: Window) -> bool:
        """Return whether a pass can be a graph. This also reads changed weights and computes angles for new slots; both
        drop the graphs."""
        if self.failed or window.low or ids.shape[1] > most_ids(window) or not self.cache.stores[0].is_initialized:
            return False
        self.refresh(window.limit)
        return True

    def _launch(self, bucket: Bucket, columns: Sequence[Tensor], make: Callable[[], Callable[[Tensor], Any]]) -> Any:
        """Return what the bucket's graph returns. If there is no graph, it is recorded. Return None once recording has
        failed."""
        if bucket not in self.graphs:
            try:
                self.graphs[bucket] = self._record(make(), columns, bucket[0])
            except RuntimeError as error:
                self.failed = True
                self._drop()
                name = type(self.model).__name__
                message = f"{name}: CUDA graphs failed; passes run without: {_reason(error)}"
                warnings.warn(message, stacklevel=4)
                return None
        return self.graphs[bucket](columns)

    def _record(self, run: Callable[[Tensor], Any], columns: Sequence[Tensor], rows: int) -> ColumnGraph:
        if not self.graphs:
            self.pool = pool_for(self.model.device)
        return ColumnGraph(run, columns, rows, self.pool)

    def _rows(self, rows: int) -> int:
        return min(_power(rows), self.rows)  # prompts may wait in the slots after those

    def _slots(self, window: Window) -> int:
        return min(max(_power(window.limit), FEWEST), self.cache.slots)

    def _stored(self, slots: int) -> tuple[Any, ...]:
        """Return the tensors that graphs read: angles of all positions, the slots to read, keys and values. `_drop`
        releases them."""
        if self.slot_numbers is None:
            self.slot_numbers = arange(self.cache.slots, device=self.model.device)
        return *self.angles, self.slot_numbers[:slots], *self.cache.stored(self.rows)

    def _compute_angles(self) -> None:
        self._drop()  # graphs read the angles and the weights, and both are replaced here
        super()._compute_angles()

    def _drop(self) -> None:
        self.graphs: dict[Bucket, ColumnGraph] = {}
        self.of_rounds = Graphs(self.model.device)
        self.slot_numbers = None


def repeated(part: Tensor, width: int) -> Tensor:
    """Return padding columns (A, width - n) for a part (A, n): its last column repeated, as a view. An id that is
    computed twice at one position writes the same keys and values twice, so padding needs no slot past the text."""
    return part[:, -1:].expand(-1, width - part.shape[1])


def _power(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
