"""A lower bound on the time of passes on a machine. It follows from the bytes to move and the operations to do.

t = max((W + B kv (L + n) + 8 B n V) / bandwidth, operations / rate) for a pass of n ids over B rows with L tokens
before them. W: bytes of the weights. kv: bytes of one token's keys and values. Logits are written and read in float32.
A round of K drafts is K passes of the draft and one pass of the target over K + 1 ids.
"""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from inference.measure.floor import weight_bytes
from inference.models.cache import token_bytes
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
