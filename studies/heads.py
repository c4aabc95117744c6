"""Memory and time of a loss over a real vocabulary: in chunks against both distributions whole, in one run.

    python -m studies.heads 151936 4096 [outputs/results/heads.json]

Each side runs in processes of its own, in turn: hidden states and heads of width 1024 in bfloat16 (float32 on a CPU
that emulates it), forward and backward of forward KL. Memory is what a process's peak grows by; the plain side's
gradients are the truth for the other's.
"""

import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from cotrain.losses import divergences
from cotrain.losses.chunked import chunk_positions, chunked
from cotrain.students.base import Guess
from cotrain.teacher.target_distributions import FromStates
from inference.measure.environment import environment
from inference.models.pretrained import half

WIDTH, REPEATS = 1024, 3
SIDES = ("plain", "chunked")


def side(name: str, vocabulary: int, tokens: int, kept: str) -> dict[str, Any]:
    """One forward and backward; gradients go to the file `kept`."""
    torch.manual_seed(0)
    hidden = [torch.randn(1, tokens, WIDTH).to(half("cpu")) for _ in range(2)]
    heads = [torch.nn.Linear(WIDTH, vocabulary, bias=False, dtype=half("cpu")) for _ in range(2)]
    hidden[1].requires_grad_()
    mask, before, start = torch.ones(1, tokens, dtype=torch.bool), peak(), time.perf_counter()
    value = (whole if name == "plain" else in_chunks)(hidden, heads, mask) / tokens
    value.backward()
    seconds, grown = time.perf_counter() - start, peak() - before
    torch.save([value.detach(), hidden[1].grad, heads[1].weight.grad], kept)
    return {"seconds": seconds, "bytes": grown}


def whole(hidden: list[Tensor], heads: list[torch.nn.Linear], mask: Tensor) -> Tensor:
    with torch.no_grad():
        logp = torch.log_softmax(heads[0](hidden[0]).float(), -1)
    return divergences.kl(logp, torch.log_softmax(heads[1](hidden[1]).float(), -1))[mask].sum()


def in_chunks(hidden: list[Tensor], heads: list[torch.nn.Linear], mask: Tensor) -> Tensor:
    value, _ = chunked(
        divergences.kl,
        FromStates(hidden[0], heads[0]),
        Guess.everywhere(hidden[1], heads[1], tuple(heads[1].parameters())),
        mask,
        measured=False,
        chunk=chunk_positions(heads[1].out_features, "cpu"),
    )
    return value


def peak() -> int:
    """Bytes that this program held at most. Linux's `ru_maxrss` begins at that of the process which started it."""
    status = Path("/proc/self/status")
    if status.is_file():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(vocabulary: int, tokens: int, repeats: int = REPEATS) -> dict[str, Any]:
    """Both sides in turn; ratios of medians, and how far apart their results are."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as place:
        kept = {name: str(Path(place) / name) for name in SIDES}
        for _ in range(repeats):
            for name in SIDES:
                words = [sys.executable, "-m", "studies.heads", name, str(vocabulary), str(tokens), kept[name]]
                done = subprocess.run(words, check=True, capture_output=True, text=True)
                found[name].append(json.loads(done.stdout))
        truth, other = (torch.load(kept[name], weights_only=True) for name in SIDES)
    sides = {name: {key: median(one[key] for one in runs) for key in runs[0]} for name, runs in found.items()}
    return {
        "vocabulary": vocabulary,
        "tokens": tokens,
        "width": WIDTH,
        "repeats": repeats,
        "sides": sides,
        "runs": found,
        "memory": sides["chunked"]["bytes"] / sides["plain"]["bytes"],
        "time": sides["chunked"]["seconds"] / sides["plain"]["seconds"],
        "apart": [_apart(a, b) for a, b in zip(truth, other, strict=True)],
    }


def _apart(truth: Tensor, other: Tensor) -> float:
    return float((other.double() - truth.double()).norm() / truth.double().norm())


if __name__ == "__main__":
    if sys.argv[1] in SIDES:
        print(json.dumps(side(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
    else:
        report = run(int(sys.argv[1]), int(sys.argv[2])) | {"environment": environment()}
        print(json.dumps(report, indent=2))
        if len(sys.argv) > 3:
            Path(sys.argv[3]).write_text(json.dumps(report, indent=2) + "\n")
