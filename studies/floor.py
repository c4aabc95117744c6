"""A lower bound on the time of passes on a machine. It follows from the bytes to move and the operations to do.

t = max((W + B kv (L + n) + 8 B n V) / bandwidth, operations / rate) for a pass of n ids over B rows with L tokens
before them. W: bytes of the weights. kv: bytes of one token's keys and values. Logits are written and read in float32.
A round of K drafts is K passes of the draft and one pass of the target over K + 1 ids.
"""

import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from inference.models.cache import token_bytes
from inference.models.forward import Lean
from inference.models.llama import projections
from inference.models.lm import LM

COPIED = 2**28  # bytes: larger than any cache
SIDE = 2048  # of the square matrices that are multiplied


@dataclass(frozen=True)
class Machine:
    """The speed of a machine. bandwidth: bytes per second of a large copy, counting read and written bytes. rate:
    operations per second, two per multiply-add."""

    bandwidth: float
    rate: float


@dataclass(frozen=True)
class Load:
    """The work of a pass. bytes: number that it must move. operations: number that it must do."""

    bytes: float
    operations: float

    def seconds(self, machine: Machine) -> float:
        return max(self.bytes / machine.bandwidth, self.operations / machine.rate)


def measure_machine(device: torch.device, dtype: torch.dtype, repeats: int = 7) -> Machine:
    """Time a large copy and a matrix product in `dtype`, and return the speeds from the medians."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.ones(SIDE, SIDE, dtype=dtype, device=device) for _ in range(2))

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    copied = _median(lambda: target.copy_(source), wait, repeats)
    multiplied = _median(lambda: a @ b, wait, repeats)
    return Machine(2 * COPIED / copied, 2 * SIDE**3 / multiplied)


def _median(task: Callable[[], object], wait: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        task()
        wait()
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def weight_bytes(lm: LM) -> tuple[float, float]:
    """Return (bytes, count) of the weights that a pass reads. These are all weights except an embedding that is not
    also the head. bytes: as stored, with scales and tables of quantised weights. count: the number of weights that
    these represent."""
    embedding = lm.model.get_input_embeddings().weight
    skipped = set() if embedding is lm.model.get_output_embeddings().weight else {embedding.data_ptr()}
    if isinstance(lm.run, Lean):  # some of its weights are rounded or packed
        weights, linears = lm.run.weights, projections(lm.run.weights)
        others = [linear.bias for linear in linears] + [part for layer in weights.layers for part in layer]
        vectors = [weights.norm, *(part for part in others if isinstance(part, Tensor))]
        count = sum(t.numel() for t in [*vectors, *(linear.weight for linear in linears)])
        return float(sum(t.nbytes for t in vectors) + sum(linear.read_bytes for linear in linears)), float(count)
    parameters = {p.data_ptr(): p for p in lm.model.parameters() if p.data_ptr() not in skipped}
    scales = sum(t.nbytes for at, t in _states(lm.model, set(parameters)).items() if at not in skipped)
    return float(sum(p.nbytes for p in parameters.values()) + scales), float(sum(map(_count, parameters.values())))


def _count(parameter: Tensor) -> int:
    """Return the number of weights in a parameter. bitsandbytes packs two 4-bit weights into a byte."""
    state = getattr(parameter, "quant_state", None)
    return math.prod(state.shape) if state is not None else parameter.numel()


def _states(model: torch.nn.Module, known: set[int]) -> dict[int, Tensor]:
    """Return, by address, the tensors that bitsandbytes stores besides its parameters: scales and code tables, nested
    ones too."""
    tensors: dict[int, Tensor] = {}
    states = [getattr(module, "state", None) for module in model.modules()]
    waiting = [vars(p) for p in model.parameters()]
    waiting += [vars(state) for state in states if type(state).__name__ == "MatmulLtState"]
    while waiting:
        for value in waiting.pop().values():
            if isinstance(value, Tensor) and value.data_ptr() not in known:
                tensors[value.data_ptr()] = value
            elif type(value).__name__ == "QuantState":
                waiting.append(vars(value))
    return tensors


def pass_load(lm: LM, rows: int, n: int, context: int) -> Load:
    """Return the load of a pass of n ids per row after `context` tokens."""
    weights, count = weight_bytes(lm)
    per_token = token_bytes(lm.model.config, lm.held)
    moved = weights + rows * per_token * (context + n) + 8 * rows * n * lm.vocabulary
    return Load(moved, 2.0 * rows * n * count)


def round_loads(target: LM, draft: LM | None, k: int, rows: int, context: int) -> list[Load]:
    """Return the loads of all passes of a round that drafts k tokens; k = 0 is a plain step. If `draft` is None, only
    the target's pass is included."""
    own = [] if draft is None else k * [pass_load(draft, rows, 1, context)]
    return [pass_load(target, rows, k + 1, context), *own]


def peak_memory() -> float:
    """Return the peak memory, in bytes, of this process or of its accelerator so far."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
