"""Runs functions of named tensors: directly, recorded as CUDA graphs, or compiled.

A function maps named tensors to tensors, and reads nothing on the host. `Replay` runs it directly, `Recorded` as a CUDA
graph, `Compiled` by torch.compile; `replay_of` chooses. "Replayed" means recorded or compiled. Callers give the
function and its inputs, and first ask which sizes the inputs should have.

On a GPU, kernel launches take most of the time of a pass over a few ids, and of the distributions, draws and
verification of a round. A graph reads and writes the memory that it was recorded with, so inputs are copied to fixed
memory. `Graph` is the only code that uses the CUDA API. On a CPU it calls the function, so one test covers both
devices.

Compiled functions have symbols for the sizes that change (`DYNAMIC`), so a model needs few of them: for one id per row,
for several ids, and for each draft length. Batches that are not full, as at the end of a queue, run uncompiled, since
compiling for a few rounds does not pay.

A rows, n ids per row.
"""

import gc
import shlex
import warnings
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._inductor import cpp_builder
from transformers import PreTrainedModel

from inference.models.llama import SHORT

WARMUP = 3  # runs before a recording, in which libraries choose their kernels
MOST = 256  # graphs of one `Recorded`; before one more is recorded, all are dropped
FEWEST = 64  # slots of the smallest bucket
# the dimension of an input whose size changes between calls of one compiled function
DYNAMIC = {
    "ids": 1,
    "positions": 1,
    "nodes": 1,
    "seen": 1,
    "masked": 1,
    "lacking": 1,
    "features": 1,
    "cos": 0,
    "sin": 0,
    "slots": 0,
    "keys": 2,
    "values": 2,
}

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


class Asked(NamedTuple):
    """A request to replay a function: the function and its arguments.

    name: everything that the function depends on except its arguments. inputs: tensors by name; they are copied. make:
    returns the function. reads: tensors by name that the function reads in place; their owner calls `drop` when it
    replaces them. rows: the largest number of rows; a recording has a power of two of rows, at most this many; 0 if the
    number of rows is fixed. widths: the numbers of ids per row to record, in ascending order; missing ids repeat the
    last one, so that its keys and values are written again. steady: names of inputs whose values change only when the
    tensor is replaced. first: returns other inputs for the runs before a recording; None to use the present inputs.
    """

    name: Hashable
    inputs: Inputs
    make: Make
    reads: Reads
    rows: int = 0
    widths: Sequence[int] = ()
    steady: frozenset[str] = frozenset()
    first: Callable[[], Inputs] | None = None


class Replay:
    """Runs functions directly. model: the model whose weights the functions read. int8: whether these weights are
    rounded."""

    replays = False  # whether functions are compiled or recorded at all
    fixed = False  # whether sizes must be few, because each has a recording
    failed = False
    origin: Any = None  # of the weights that compiled functions are made from

    def __init__(self, model: PreTrainedModel, int8: bool = False) -> None:
        self.model, self.int8, self.device = model, int8, model.device

    def takes(self, A: int, rows: int) -> bool:
        """Return whether functions of A rows are recorded or compiled, for a caller with room for `rows` rows."""
        return False

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

    def __call__(self, name: Hashable, inputs: Inputs, make: Make, reads: Reads, **how: Any) -> Any:
        """Return the result of make()(**inputs, **reads), or None if the function is neither recorded nor compiled. The
        result of a recording is valid until the next call.

        name: everything that the function depends on except its arguments. inputs: tensors by name; they are copied.
        make: returns the function. reads: tensors by name that the function reads in place. how: the other fields of
        `Asked`.
        """
        return self.run(Asked(name, inputs, make, reads, **how))

    def run(self, asked: Asked) -> Any:
        """Run a function as a recording or compiled. Return its result, or None if it is neither."""
        return None

    def pure(self, round: Any, depths: int, greedy: bool, trees: bool) -> Pure | None:
        """Return the round as a function of the tensors that it reads, or None if it cannot be recorded or compiled.
        round: a `Round`. depths: number of drafts that need uniforms. greedy: whether the proposer drafts the likeliest
        tokens. trees: whether it draws children of trees."""
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
        neither recorded nor compiled.

        `tensors` joins `given` and `reads`. given: inputs by name; they are copied. reads: tensors by name that `run`
        reads in place. name: everything else that `run` depends on. K: number of drafts. greedy: whether `run` drafts
        the likeliest tokens. trees: whether it draws children of trees.
        """
        pure = None if self.failed else self.pure(round, K, greedy, trees)
        if pure is None:
            return None
        inputs = {part: tensor.to(self.device) for part, tensor in pure.tensors.items()} | dict(given)
        return self(
            (*name, K, greedy, pure.key), inputs, lambda: _Bound(make(), pure.on, K), reads or {}, steady=pure.steady
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
        make: Make | None = None,
        **how: bool,
    ) -> Any:
        """Return the result of `run(round, tensors, number of drafts)`, recorded or compiled if possible. K: the number
        of drafts if it is; k: if it is not.

        `tensors` joins `given` and `reads`. given: inputs by name; they are copied. reads: tensors by name that `run`
        reads in place. name: everything else that `run` depends on. make: returns a module that does the same as `run`,
        but refers to nothing that a compiled module must not keep alive; None for `run` itself. how: `greedy` and
        `trees`, as in `replayed`.
        """
        result = self.replayed(round, name, given, make or (lambda: run), K, reads, **how)
        return run(round, {**given, **(reads or {})}, k) if result is None else result


class _Bound(nn.Module):
    """A function `run` of a round as a function of the tensors that the round reads. on: returns the round for given
    tensors. K: number of drafts."""

    def __init__(self, run: Callable[..., Any], on: Callable[[Inputs], Any], K: int) -> None:
        super().__init__()
        self.run, self.on, self.K = run, on, K

    def forward(self, **tensors: Any) -> Any:
        return self.run(self.on(tensors), tensors, self.K)


def replay_of(model: PreTrainedModel, compile: bool, int8: bool = False) -> Replay:
    """Return the object that runs a model's functions. compile: whether to compile them on a CPU, or record them on a
    GPU. int8: whether the functions read rounded weights."""
    way = Replay if not compile else Recorded if model.device.type == "cuda" else Compiled
    return way(model, int8)


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

    replays = fixed = True

    def __init__(self, model: PreTrainedModel, int8: bool = False) -> None:
        super().__init__(model, int8)
        self.memory: dict[str, Tensor] = {}  # of each input, flat, as long as its longest value so far
        self.drop()

    def takes(self, A: int, rows: int) -> bool:
        return not self.failed

    def width(self, n: int, widths: Sequence[int]) -> int:
        return widths[bisect_left(widths, n)] if n <= widths[-1] else n

    def depth(self, k: int, longest: int) -> int:
        return longest

    def slots(self, limit: int, most: int) -> int:
        return min(max(_power(limit), FEWEST), most)

    def pure(self, round: Any, depths: int, greedy: bool, trees: bool) -> Pure | None:
        pure: Pure | None = round.pure(depths, greedy, trees=trees)
        return pure if pure and pure.tensors["start"].device == self.device else None

    def drop(self) -> None:
        self.graphs: dict[Hashable, tuple[Graph, Tensor]] = {}  # with its buffer
        self.sources: dict[str, Tensor] = {}  # the tensor that was last copied, of each steady input

    def run(self, asked: Asked) -> Any:
        if self.failed:
            return None
        name, inputs, make, reads, rows, widths, steady, first = asked
        packed = [part for part, x in inputs.items() if x.element_size() == 8 and x.dim() < 3 and part not in steady]
        copies = self._copied({part: value for part, value in inputs.items() if part not in packed}, steady)
        A, n = len(inputs[packed[0]]), inputs["ids"].shape[1] if widths else 0
        rows, width = min(_power(A), rows) if rows else A, self.width(n, widths) if widths else 0
        shapes = {part: inputs[part].shape[1:] for part in packed}
        shapes |= {part: torch.Size([width]) for part in packed if widths and DYNAMIC.get(part) == 1}
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
                    "; to have no warning, set compile=False"
                )
                warnings.warn(message, stacklevel=5)
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


# compiled functions with the origin of their weights, by model and then by (int8, name); shared by all engines
_COMPILED: WeakKeyDictionary[PreTrainedModel, dict[tuple[bool, Any], tuple[Any, Any]]] = WeakKeyDictionary()


class Compiled(Replay):
    """Runs modules compiled by torch.compile. They read the `keys` and `values` of a full batch. Engines share the
    modules as long as the weights are unchanged. If compiling fails, functions run directly, with one warning."""

    replays = True
    failed = False  # for all models: if compiling fails once, as without a C++ compiler, it fails again

    def __init__(self, model: PreTrainedModel, int8: bool = False) -> None:
        super().__init__(model, int8)
        self.drop()

    def takes(self, A: int, rows: int) -> bool:
        return A == rows and not Compiled.failed

    def width(self, n: int, widths: Sequence[int]) -> int:
        return max(n, 2)  # a width of one has a graph of its own

    def depth(self, k: int, longest: int) -> int:
        return longest

    def pure(self, round: Any, depths: int, greedy: bool, trees: bool) -> Pure | None:
        pure: Pure | None = None if trees else round.pure(depths, greedy, simple=True)
        return pure

    def drop(self) -> None:
        self.graphs: set[Hashable] = set()  # those that have run: their sizes are marked

    def run(self, asked: Asked) -> Any:
        # one stride for each shape
        parts = {part: value.reshape(-1).view(value.shape) for part, value in asked.inputs.items()} | dict(asked.reads)
        try:
            return self._called(asked.name, self.compiled(asked.name, asked.make), parts)
        except Exception as error:  # the compiler may raise anything
            Compiled.failed = True
            warnings.warn(
                f"passes run uncompiled, since torch.compile failed: {compiler_reason(error)}; to have no "
                "warning, set compile=False",
                stacklevel=3,
            )
            return None

    def _called(self, name: Hashable, module: Any, parts: dict[str, Any]) -> Any:
        sizes = {part: parts[part].shape[1] for part in DYNAMIC if part in parts and DYNAMIC[part] == 1}
        given = tuple(part for part, value in parts.items() if value is not None)
        # tensors of inference mode and others have different graphs; so have masks of many ids
        key = name, given, *((n > 1) + (n > SHORT) for n in sizes.values()), len(parts["keys"][0])
        key = *key, parts["keys"][0].is_inference()
        if key in self.graphs:
            return module(**parts)
        for part in DYNAMIC:
            for tensor in parts.get(part, ()) if part in ("keys", "values") else [parts[part]] if part in parts else []:
                if tensor.shape[DYNAMIC[part]] > 1:  # a size of one has a graph of its own
                    torch._dynamo.maybe_mark_dynamic(tensor, DYNAMIC[part])
        self.graphs.add(key)
        return module(**parts)

    def compiled(self, name: Hashable, make: Make) -> Any:
        """Return the compiled module with this name. If there is none for the present weights, compile what make()
        returns."""
        modules = _COMPILED.setdefault(self.model, {})
        origin, module = modules.get((self.int8, name), (None, None))
        if module is None or origin != self.origin:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)  # of all models
            quote_libraries()
            module = torch.compile(make())
            for old in [key for key, (own, _) in modules.items() if own == origin]:
                del modules[old]  # and with it copies of old weights
            modules[self.int8, name] = (self.origin, module)
        return module


HINTS = ("Set TORCH", "You can suppress", "    import", "    torch._dynamo", "For even more", "For more")  # torch's own


def compiler_reason(error: Exception) -> str:
    """Return the last line of the compiler's message, without torch's advice after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith(HINTS)]
    return lines[-1] if lines else type(error).__name__


def quote_libraries() -> None:
    """Make torch 2.13 quote library folders for its C++ compiler, as it already quotes header folders. Otherwise
    nothing compiles if torch is installed in a path with a space."""
    options = cpp_builder.BuildOptionsBase
    if " " in torch.__path__[0]:
        options.get_libraries_dirs = lambda self: [shlex.quote(path) for path in self._libraries_dirs]  # type: ignore[method-assign]
