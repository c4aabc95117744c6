"""A function of tensors recorded as a CUDA graph, with one buffer for all that changes between its calls.

A replay reads and writes the memory that it was recorded with. All inputs are columns of one int64 buffer, so that one
copy fills it; floating-point inputs travel as their bits (`bits`). Graphs of one pool share memory: a replay may
overwrite what another of the pool returned.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WARMUP = 3  # runs before a recording, in which libraries choose their kernels


class Recording:
    """run: (rows, C) int64 -> tensors, without a read on the host. columns: parts (A, c) of its first input.

    The warm-up runs write keys and values, so they are given a real pass's inputs, which write what that pass writes.
    Rows that are not given hold the first row's columns until they are: their slots belong to no text.
    """

    def __init__(self, run: Callable[[Tensor], Any], columns: Sequence[Tensor], rows: int, pool: Any) -> None:
        self.run, self.graph = run, None
        first = torch.cat(list(columns), 1)
        self.buffer = first[:1].repeat(rows, 1)
        self.buffer[: len(first)] = first
        if self.buffer.device.type == "cuda":
            with torch.cuda.device(self.buffer.device):  # a capture is of the current device's stream
                self.graph, self.result = recorded(lambda: run(self.buffer), pool)

    def __call__(self, columns: Sequence[Tensor]) -> Any:
        """parts (A, c), A <= rows -> what `run` gives for them and for the rows after; valid until the next call of
        any recording of the pool."""
        torch.cat(list(columns), 1, out=self.buffer[: len(columns[0])])
        if self.graph is None:
            return self.run(self.buffer)
        self.graph.replay()
        return self.result


def pool_for(device: torch.device) -> Any:
    """A new memory pool for graphs; None on a CPU. One whose graphs are all gone cannot be used again."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def recorded(run: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
    """A CUDA graph of `run` and where it leaves its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run()
    return graph, result


def bits(numbers: Tensor) -> Tensor:
    """Floating-point numbers as int64 of the same bits in float64, see `numbers_of`."""
    return numbers.to(torch.float64).view(torch.int64)


def numbers_of(bits: Tensor) -> Tensor:
    """The float64 numbers of `bits`."""
    return bits.view(torch.float64)


def repeated(part: Tensor, width: int) -> Tensor:
    """The columns (A, width - n) that (A, n) lacks, each its last one again; a view. An id computed twice at one
    position writes the same keys and values twice, so no slot past the text is needed."""
    return part[:, -1:].expand(-1, width - part.shape[1])
