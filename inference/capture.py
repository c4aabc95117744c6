"""Short passes recorded once as CUDA graphs and replayed: on a GPU a pass over a few ids is bound by its launches.

A graph belongs to a bucket of shapes: rows and slots read, each rounded up to a power of two, ids a row, and whether
one id of each row is asked for. What it reads and writes stays where it was when it was recorded: ids, positions and
results have buffers of their own, keys and values are the cache's, and graphs are dropped when the cache grows or
weights change. On a CPU the same buckets run without a graph, so that one test covers both.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.cache import SlotCache, Window
from inference.forward import SHORT, Lean
from inference.step import Step

FEWEST = 64  # slots of the smallest bucket
WARMUP = 3  # runs before a recording, in which libraries choose their kernels

Pass = Callable[[Tensor, Tensor, Tensor], Tensor]  # ids, positions, only -> logits
Bucket = tuple[int, int, int, bool]  # rows, ids a row, slots read, one id of each row


class Captured(Lean):
    """As `Lean`, short passes over the first slots replayed. Where recording fails, passes run as they are, with one
    warning."""

    failed = False  # for all: what fails once fails again

    def __init__(self, model: PreTrainedModel, cache: SlotCache, int8: bool, rows: int) -> None:
        self.rows = rows
        self.graphs: dict[Bucket, _Graph] = {}
        self.made: tuple[Any, ...] = (None, None, None)  # keys, angles and weights that the graphs were recorded with
        super().__init__(model, cache, int8)

    def logits(self, ids: Tensor, window: Window, only: Tensor | None = None) -> Tensor:
        store = self.cache.stores[0]
        if Captured.failed or window.low or ids.shape[1] > SHORT or not store.is_initialized:
            return super().logits(ids, window, only)
        self.rotation(window)  # finds new weights, and angles for new slots
        made = store.keys, self.angles, self.weights
        if any(now is not then for now, then in zip(made, self.made, strict=True)):
            self.graphs, self.made = {}, made
        bucket = self._bucket(ids, window, only)
        try:
            if bucket not in self.graphs:
                self.graphs[bucket] = self._recorded(bucket, ids, window.positions, only)
        except RuntimeError as error:
            Captured.failed = True
            warnings.warn(f"CUDA graphs failed, passes run without: {str(error).splitlines()[0]}", stacklevel=2)
            return super().logits(ids, window, only)
        return self.graphs[bucket](ids, window.positions, only)

    def _bucket(self, ids: Tensor, window: Window, only: Tensor | None) -> Bucket:
        rows = min(_power(ids.shape[0]), self.rows)  # prompts may wait in the slots after those
        return rows, ids.shape[1], min(max(_power(window.limit), FEWEST), self.cache.slots), only is not None

    def _recorded(self, bucket: Bucket, ids: Tensor, positions: Tensor, only: Tensor | None) -> "_Graph":
        rows, n, slots, one = bucket
        step = Step(self.weights, self.shape)
        keys, values = self.cache.held(self.rows)
        angles, read = self.angles, torch.arange(slots, device=self.model.device)

        def run(ids: Tensor, positions: Tensor, only: Tensor) -> Tensor:
            logits: Tensor = step(ids, positions, *angles, read, keys, values, only if one else None)
            return logits

        return _Graph(run, rows, n, self.model.device, (ids, positions, only))


class _Graph:
    """A pass with buffers for what changes. Rows that are not given keep position 0 of slots that no row holds."""

    def __init__(
        self, run: Pass, rows: int, n: int, device: torch.device, first: tuple[Tensor, Tensor, Tensor | None]
    ) -> None:
        self.ids, self.positions = torch.zeros(2, rows, n, dtype=torch.int64, device=device)
        self.only = torch.zeros(rows, dtype=torch.int64, device=device)
        self.run, self.graph = run, None
        self._fill(*first)  # warm-up runs write keys and values: those of this very pass, where they belong
        if device.type == "cuda":
            with torch.cuda.device(device):  # a capture is of the current device's stream
                self.graph, self.result = _record(lambda: run(self.ids, self.positions, self.only))

    def __call__(self, ids: Tensor, positions: Tensor, only: Tensor | None) -> Tensor:
        """ids, positions (A, n), only (A,) -> logits, as `Forward.logits` gives them."""
        rows = len(ids)
        self._fill(ids, positions, only)
        if self.graph is None:
            return self.run(self.ids, self.positions, self.only)[:rows]
        self.graph.replay()
        return self.result[:rows].clone()  # the next replay writes there again

    def _fill(self, ids: Tensor, positions: Tensor, only: Tensor | None) -> None:
        rows = len(ids)
        self.ids[:rows].copy_(ids)
        self.positions[:rows].copy_(positions)
        self.positions[rows:].zero_()
        if only is not None:
            self.only[:rows].copy_(only)


def _record(run: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    """A CUDA graph of `run` and where it leaves its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def _power(size: int) -> int:
    """The least power of two that is no less."""
    return 1 << (size - 1).bit_length()
