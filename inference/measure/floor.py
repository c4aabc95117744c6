"""The least time that passes can take on a machine: bytes that must be moved, operations that must be done.

t = max((W + B kv (L + n) + 8 B n V) / bandwidth, operations / rate) for a pass of n ids over B rows with L tokens
before them, W the bytes of the weights, kv the bytes of one token's keys and values, and logits written and read in
float32; a round of K drafts is K passes of the draft and one of K + 1 ids of the target.
"""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from inference.models.lm import LM
from inference.models.memory import token_bytes

COPIED = 2**28  # bytes: more than any cache holds
SIDE = 2048  # of the square matrices that are multiplied


@dataclass(frozen=True)
class Machine:
    """bandwidth: bytes per second of a large copy, those read and those written; rate: multiply-adds count two."""

    bandwidth: float
    rate: float


@dataclass(frozen=True)
class Load:
    """What a pass must move and do: bytes and operations."""

    bytes: float
    operations: float

    def seconds(self, machine: Machine) -> float:
        return max(self.bytes / machine.bandwidth, self.operations / machine.rate)


def measure_machine(device: torch.device, dtype: torch.dtype, repeats: int = 7) -> Machine:
    """Copy and matrix product in `dtype`, medians."""
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
    """(bytes, count) of the weights that a pass reads: all but an embedding that only looks rows up."""
    embedding = lm.model.get_input_embeddings().weight
    tied = embedding is lm.model.get_output_embeddings().weight
    count = sum(p.numel() for p in lm.model.parameters() if tied or p is not embedding)
    return count * (1 if lm.weights == "int8" else lm.model.dtype.itemsize), count


def pass_load(lm: LM, rows: int, n: int, context: int) -> Load:
    """A pass of n ids a row after `context` tokens."""
    held, count = weight_bytes(lm)
    kept = token_bytes(lm.model.config, lm.held)
    moved = held + rows * kept * (context + n) + 8 * rows * n * lm.vocabulary
    return Load(moved, 2.0 * rows * n * count)


def round_loads(target: LM, draft: LM | None, k: int, rows: int, context: int) -> list[Load]:
    """Every pass of a round that drafts k tokens; k = 0 is a plain step. draft None: the target's pass alone."""
    own = [] if draft is None else k * [pass_load(draft, rows, 1, context)]
    return [pass_load(target, rows, k + 1, context), *own]


def peak_memory() -> float:
    """Bytes: the most that this process, or its accelerator, has held so far."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
