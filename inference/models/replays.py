"""Functions of named tensors, each recorded once as a CUDA graph for the shapes of its inputs, then replayed.

Every input has one place in memory, which all recordings of one `Replays` read: no recording keeps inputs of its own.
Used where the distributions, draws and verdict of a round are made: some sixty launches, which become one.
"""

import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from inference.models.recording import pool_for, recorded

MOST = 256  # recordings that are kept

Inputs = Mapping[str, Tensor]
Run = Callable[[Inputs], Any]  # inputs -> tensors, without a read on the host


class Replays:
    """device: of all inputs; on a CPU functions run without a graph. Where recording fails, nothing is
    recorded any more, with one warning."""

    failed = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory: dict[str, Tensor] = {}  # of each input, flat, as long as the largest so far
        self._forget()

    def __call__(self, name: Hashable, inputs: Inputs, steady: frozenset[str], make: Callable[[], Run]) -> Any:
        """What the function `name` gives for these inputs, valid until the next call; None once recording has failed.

        name: all that the function depends on but the inputs. steady: inputs whose values change only together with
        their tensor: they are copied when it is another one. make: the function, called where there is no recording.
        """
        if self.failed:
            return None
        given = self._given(inputs, steady)
        key = name, tuple((part, value.dtype, value.shape) for part, value in given.items())
        if key not in self.recordings:
            try:
                self._record(key, make(), given)
            except RuntimeError as error:
                self._fail(error)
                return None
        return self.recordings[key]()

    def _given(self, inputs: Inputs, steady: frozenset[str]) -> dict[str, Tensor]:
        """The inputs where recordings read them."""
        given = {}
        for name, value in inputs.items():
            given[name] = place = self._place(name, value)
            if name not in steady:
                place.copy_(value)
            elif self.held.get(name) is not value:
                place.copy_(value)
                self.held[name] = value
        return given

    def _place(self, name: str, value: Tensor) -> Tensor:
        memory = self.memory.get(name)
        if memory is None or memory.dtype != value.dtype or memory.numel() < value.numel():
            if memory is not None:
                self._forget()  # recordings read the old one
            with torch.inference_mode(False):  # written to in inference mode and outside it
                self.memory[name] = memory = torch.empty(value.numel(), dtype=value.dtype, device=self.device)
        return memory[: value.numel()].view(value.shape)

    def _record(self, key: Hashable, run: Run, given: Inputs) -> None:
        if len(self.recordings) >= MOST:
            self._forget()
        if not self.recordings:
            self.pool = pool_for(self.device)
        if self.device.type != "cuda":
            self.recordings[key] = lambda: run(given)
            return
        with torch.cuda.device(self.device):  # a capture is of the current device's stream
            graph, result = recorded(lambda: run(given), self.pool)

        def replayed() -> Any:
            graph.replay()
            return result

        self.recordings[key] = replayed

    def _forget(self) -> None:
        self.recordings: dict[Hashable, Callable[[], Any]] = {}
        self.held: dict[str, Tensor] = {}  # what was last copied to each place

    def _fail(self, error: RuntimeError) -> None:
        self.failed = True
        self._forget()
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(f"CUDA graphs of distributions and draws failed, they run without: {reason}", stacklevel=4)
