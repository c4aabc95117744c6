"""Runs functions of named tensors: directly, or recorded as CUDA graphs.

A function maps named tensors to tensors, and reads nothing on the host. `Replay` runs it directly, `Recorded` as a CUDA
graph; `replay_of` chooses. Callers give the function and its inputs, and first ask which sizes the inputs should have.

On a GPU, kernel launches take most of the time of a pass over a few ids, and of the distributions, draws and
verification of a round. A graph reads and writes the memory that it was recorded with, so inputs are copied to fixed
memory. `Graph` is the only code that uses the CUDA API. On a CPU it calls the function, so one test covers both
devices.

A rows, n ids per row.
"""

import gc
import warnings
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

WARMUP = 3  # runs before a recording, in which libraries choose their kernels
MOST = 256  # graphs of one `Recorded`; before one more is recorded, all are dropped
FEWEST = 64  # slots of the smallest bucket
PER_ID = ("ids", "positions", "nodes", "seen", "masked", "lacking")  # inputs with a column for each id

Inputs = Mapping[str, Tensor]
Reads = Mapping[str, Any]
Make = Callable[[], Callable[..., Any]]


class Pure(NamedTuple):
    """A decoding round as a function of tensors. tensors: all tensors that the round reads, by name. on: returns the
    same round for other tensors of these names and shapes. key: everything else that the round depends on. steady:
    names of tensors whose values change only when the tensor is replaced."""

    tensors: dict[str, Tensor]
    on: Callable[[Inputs], Any]
    key: Hashable
    steady: frozenset[str] = frozenset()


class Replay:
    """Runs functions directly. model: the model whose weights the functions read."""

    records = False  # whether functions are recorded, so that sizes must be few
    failed = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.device = model, model.device

    @property
    def ready(self) -> bool:
        """Return whether functions are recorded, and no recording has failed."""
        return self.records and not self.failed

    def width(self, n: int, widths: Sequence[int]) -> int:
        """Return how many columns the inputs should have if at least n are needed. widths: the numbers that are
        recorded, in ascending order."""
        return n

    def depth(self, k: int, longest: int) -> int:
        """Return how many drafts to make. k: number needed now. longest: the largest number that a round needs."""
        return k

    def slots(self, limit: int, most: int) -> int:
        """Return how many slots per row to read. limit: number needed. most: number of slots there are."""
        return limit

    def drop(self) -> None:
        """Drop everything that was made from weights or keys and values that are now replaced."""

    def __call__(
        self,
        name: Hashable,
        inputs: Inputs,
        make: Make,
        reads: Reads,
        *,
        rows: int = 0,
        widths: Sequence[int] = (),
        steady: frozenset[str] = frozenset(),
        first: Callable[[], Inputs] | None = None,
    ) -> Any:
        """Return the result of make()(**inputs, **reads), or None if the function is not recorded. The result is valid
        until the next call.

        name: everything that the function depends on except its arguments. inputs: tensors by name; they are copied.
        make: returns the function. reads: tensors by name that the function reads in place; their owner calls `drop`
        when it replaces them. rows: the largest number of rows; a recording has a power of two of rows, at most this
        many; 0 if the number of rows is fixed. widths: the numbers of ids per row to record, in ascending order;
        missing ids repeat the last one, so that its keys and values are written again. steady: names of inputs whose
        values change only when the tensor is replaced. first: returns other inputs for the runs before a recording;
        None to use the present inputs.
        """
        return None

    def pure(self, round: Any, depths: int, trees: bool) -> Pure | None:
        """Return the round as a function of the tensors that it reads, or None if it cannot be recorded.
        round: a `Round`. depths: number of drafts that need uniforms. trees: whether the proposer draws children of
        trees."""
        return None

    def replayed(
        self,
        round: Any,
        name: tuple[Any, ...],
        given: Inputs,
        make: Make,
        K: int = 0,
        reads: Reads | None = None,
        *,
        greedy: bool = False,
        trees: bool = False,
    ) -> Any:
        """Return the result of `run(round, tensors, K)`, where `run` is what make() returns. Return None if this is
        not recorded.

        `tensors` joins `given` and `reads`. given: inputs by name; they are copied. reads: tensors by name that `run`
        reads in place. name: everything else that `run` depends on. K: number of drafts. greedy: whether `run` drafts
        the likeliest tokens. trees: whether it draws children of trees.
        """
        pure = None if self.failed else self.pure(round, K, trees)
        if pure is None:
            return None
        inputs = {part: tensor.to(self.device) for part, tensor in pure.tensors.items()} | dict(given)
        return self(
            (*name, K, greedy, pure.key), inputs, lambda: _bound(make(), pure.on, K), reads or {}, steady=pure.steady
        )

    def of_round(
        self,
        round: Any,
        name: tuple[Any, ...],
        given: Inputs,
        run: Callable[..., Any],
        k: int = 0,
        K: int = 0,
        reads: Reads | None = None,
        **how: bool,
    ) -> Any:
        """Return the result of `run(round, tensors, number of drafts)`, recorded if possible. K: the number of drafts
        if it is; k: if it is not.

        `tensors` joins `given` and `reads`. given: inputs by name; they are copied. reads: tensors by name that `run`
        reads in place. name: everything else that `run` depends on. how: `greedy` and `trees`, as in `replayed`.
        """
        result = self.replayed(round, name, given, lambda: run, K, reads, **how)
        return run(round, {**given, **(reads or {})}, k) if result is None else result


def _bound(run: Callable[..., Any], on: Callable[[Inputs], Any], K: int) -> Callable[..., Any]:
    """Return a function `run` of a round as a function of the tensors that the round reads. on: returns the round for
    given tensors. K: number of drafts."""
    return lambda **tensors: run(on(tensors), tensors, K)


def replay_of(model: PreTrainedModel, graphs: bool) -> Replay:
    """Return the object that runs a model's functions. graphs: whether to record them."""
    return (Recorded if graphs else Replay)(model)


class Graph:
    """A CUDA graph of `run`, a function without arguments that reads nothing on the host. On a CPU `run` is called
    instead. device: where `run` computes. pool: the graph's memory pool, from `pool_for`; None on a CPU.

    A CUDA graph reads memory, not tensors. The caller must therefore keep every tensor that `run` refers to alive, or
    pass it in `reads`; the graph keeps that alive.
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
        """Return the result of `run`. On a GPU the result is valid until the next call of any graph in the pool."""
        if self.run is not None:
            return self.run()
        self.graph.replay()
        return self.results


def _recorded(run: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
    """Return a CUDA graph of `run`, and the tensors that the graph writes its results to."""
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
    """Collect no garbage within the `with` block. Garbage collection could destroy the graph of an engine that is no
    longer used, and CUDA does not allow that during a capture. The setting is for the whole process; calls of engines
    run one at a time."""
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


class Recorded(Replay):
    """Runs functions as CUDA graphs, one per shape of a function's inputs; all share one memory pool.

    Inputs of 64 bits with at most two dimensions are columns (A, c) of one buffer per graph, so that one copy fills
    them; floating-point inputs are copied as bits. Every other input has one block of memory for all graphs. The runs
    before a recording write keys and values too, so they use the inputs of a real call and write the same numbers. Rows
    of the buffer after A repeat the first row until a later call fills them; no text uses these rows' keys and values.
    If recording fails, there is one warning and nothing more is recorded.
    """

    records = True

    @staticmethod
    def possible(device: torch.device) -> bool:
        """Return whether functions can be recorded on the device."""
        return device.type == "cuda"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.memory: dict[str, Tensor] = {}  # of each input, flat, as long as its longest value so far
        self.drop()

    def width(self, n: int, widths: Sequence[int]) -> int:
        return widths[bisect_left(widths, n)] if n <= widths[-1] else n

    def depth(self, k: int, longest: int) -> int:
        return longest

    def slots(self, limit: int, most: int) -> int:
        return min(max(_power(limit), FEWEST), most)

    def pure(self, round: Any, depths: int, trees: bool) -> Pure | None:
        pure: Pure | None = round.pure(depths, trees)
        return pure if pure and pure.tensors["start"].device == self.device else None

    def drop(self) -> None:
        self.graphs: dict[Hashable, tuple[Graph, Tensor]] = {}  # with its buffer
        self.sources: dict[str, Tensor] = {}  # the tensor that was last copied, of each steady input

    def __call__(
        self,
        name: Hashable,
        inputs: Inputs,
        make: Make,
        reads: Reads,
        *,
        rows: int = 0,
        widths: Sequence[int] = (),
        steady: frozenset[str] = frozenset(),
        first: Callable[[], Inputs] | None = None,
    ) -> Any:
        if self.failed:
            return None
        packed = [part for part, x in inputs.items() if x.element_size() == 8 and x.dim() < 3 and part not in steady]
        copies = self._copied({part: value for part, value in inputs.items() if part not in packed}, steady)
        A, n = len(inputs[packed[0]]), inputs["ids"].shape[1] if widths else 0
        rows, width = min(_power(A), rows) if rows else A, self.width(n, widths) if widths else 0
        shapes = {part: inputs[part].shape[1:] for part in packed}
        shapes |= {part: torch.Size([width]) for part in packed if widths and part in PER_ID}
        held = [(part, value.shape) for part, value in reads.items() if isinstance(value, Tensor)]
        key = name, rows, *shapes.items(), *((part, x.dtype, x.shape) for part, x in copies.items()), *held
        if key not in self.graphs:
            given = first() if first else inputs
            try:
                self._record(key, make(), rows, {part: given[part] for part in packed}, shapes, copies, reads)
            except RuntimeError as error:
                self.failed = True
                self.drop()
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                message = (
                    f"{type(self.model).__name__}: passes run without CUDA graphs, since recording failed: {reason}"
                    "; to have no warning, set graphs=False"
                )
                warnings.warn(message, stacklevel=4)
                return None
        graph, buffer = self.graphs[key]
        torch.cat([x for part in packed for x in _columns(inputs[part], shapes[part])], 1, out=buffer[:A])
        results = graph()
        return results if A == rows and n == width else [part[:A, :n] if widths else part[:A] for part in results]

    def _record(
        self,
        key: Hashable,
        run: Callable[..., Any],
        rows: int,
        given: Inputs,
        shapes: Mapping[str, torch.Size],
        copies: Inputs,
        reads: Reads,
    ) -> None:
        if len(self.graphs) >= MOST:
            self.drop()
        if not self.graphs:
            self.pool = pool_for(self.device)
        columns = torch.cat([x for part, value in given.items() for x in _columns(value, shapes[part])], 1)
        buffer = columns[:1].repeat(rows, 1)
        buffer[: len(columns)] = columns
        widths, dtypes = [shape.numel() for shape in shapes.values()], {part: x.dtype for part, x in given.items()}

        def bound() -> Any:
            parts = zip(shapes.items(), buffer.split(widths, 1), strict=True)
            inputs = {part: (x if shape else x[:, 0]).view(dtypes[part]) for (part, shape), x in parts}
            return run(**inputs, **copies, **reads)

        self.graphs[key] = Graph(bound, self.device, self.pool, reads), buffer

    def _copied(self, inputs: Inputs, steady: frozenset[str]) -> dict[str, Tensor]:
        """Copy the inputs into the memory that graphs read, and return these copies. steady: names of inputs whose
        values change only when the tensor is replaced; these are copied only then."""
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
                self.drop()  # graphs read the old memory
            with torch.inference_mode(False):  # written to in inference mode and outside it
                self.memory[name] = memory = torch.empty(value.numel(), dtype=value.dtype, device=self.device)
        return memory[: value.numel()].view(value.shape)


def _columns(value: Tensor, shape: torch.Size) -> list[Tensor]:
    """Return a value (A,) or (A, n) of 64-bit numbers as int64 columns: (A, n), then its last column repeated up to the
    width in `shape` (width,)."""
    columns = (value.unsqueeze(1) if value.dim() == 1 else value).view(torch.int64)
    more = shape.numel() - columns.shape[1]
    return [columns, columns[:, -1:].expand(-1, more)] if more else [columns]


def _power(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
