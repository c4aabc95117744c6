"""Launches, copies and reads of a round on a GPU, counted on the stand-in device, and by a profiler on a real one.

    python -m tests.gpu_counts [outputs/results/gpu_counts.json]
    python -m tests.gpu_counts --real outputs/results/gpu_counts_real.json

Tiny models with the shapes of a round of eight rows and four drafts: what is counted does not depend on their size.
A round is one after the first ones, in which no graph is recorded; the median round and the worst one are given.
`tests/inference/test_gpu_counts.py` bounds them.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import profile

from inference import Engine, Sampling
from inference.measure.environment import environment
from inference.models import graphs
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from tests import kinds, standin
from tests.tiny import near, tiny

ROWS, K, FIRST, ROUNDS = 8, 4, 4, 12
PROMPTS = [[(7 * i + 5 * n) % 30 + 1 for i in range(n)] for n in (3, 9, 2, 6, 14, 5, 11, 7)]
# microseconds: of a launch, of a copy that does not block, of a call that waits for the device (a read, a copy that is
# not pinned); and of what a round does in Python beside these, eight rows' lists that are sent and committed: the least
# of 300 rounds of that alone, on a CPU in use
LAUNCH, COPY, WAIT, HOST = 5, 8, 15, 220

Made = Callable[[Any], Any]  # of the target


def _draft(_: Any) -> Any:
    return Independent(near(tiny()).to("cuda"), compile=True)


KINDS = ("conditioned", "medusa", "medusa, markov", "hydra", "eagle", "p_eagle", "p_eagle, markov", "block",
         "block, causal", "block, pruned", "parallel", "parallel, markov", "early_exit", "quantised", "retrieval",
         "hybrid", "two_levels")  # fmt: skip
MIXED = [Sampling(t) for t in (0.5, 0.7, 1.0, 1.3, 0.9, 0.8, 1.1, 0.6)]
CUTS = [Sampling(0.9, top_k=n % 3 * 5, top_p=1 - 0.1 * (n % 2), min_p=0.02 * (n % 4)) for n in range(ROWS)]
PENALTIES = Sampling(0.9, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1, logit_bias={3: 1.0},
                     banned=((1,), (2, 3)), min_new_tokens=90, stop_ids=(5,))  # fmt: skip
SETTINGS: dict[str, tuple[Made, str, Any]] = {
    "plain": (lambda _: None, "token", Sampling(0.8)),
    "draft, token": (_draft, "token", Sampling(0.8)),
    "draft, block": (_draft, "block", Sampling(0.8)),
    "draft, match": (_draft, "match", Sampling(0.8)),
    "draft, coupled": (_draft, "coupled", Sampling(0.8)),
    "draft, greedy": (_draft, "token", Sampling(0.0)),
    "draft, mixed temperatures": (_draft, "token", MIXED),
    "draft, nucleus": (_draft, "token", Sampling(0.9, top_p=0.9)),
    "draft, mixed top-k, top-p, min-p": (_draft, "token", CUTS),
    "draft, penalties, bias, bans, minimum length": (_draft, "token", PENALTIES),
    **{f"{kind}, token": (kinds.KINDS[kind].proposer, "token", Sampling(0.8)) for kind in KINDS},
    "n-gram look-up": (lambda _: NGram(), "token", Sampling(0.8)),
    "n-gram look-up, penalties, bias, bans, minimum length": (lambda _: NGram(), "token", PENALTIES),
}


def rounds_of(name: str) -> Iterator[Any]:
    """The rounds of a setting on the current device after the first ones, in which most graphs are recorded."""
    make, rule, sampling = SETTINGS[name]
    target = tiny().to("cuda")
    engine = Engine(target, make(target), verify=rule, policy=Fixed(K), rows=ROWS, compile=True)
    rounds = engine.rounds(engine.begin(PROMPTS, 200, sampling, ignore_eos=True))
    for _ in range(FIRST):
        next(rounds)
    return rounds


def counted(name: str, arch: str) -> dict[str, Any]:
    """Launches outside graphs (each replay is one), copies to the device, those that block, reads and replays of a
    round."""
    with standin.device(arch) as gpu:
        rounds = rounds_of(name)
        found: list[tuple[int, ...]] = []
        while len(found) < ROUNDS:
            gpu.clear()
            recordings = gpu.recordings
            next(rounds)
            sums = (gpu.launches, gpu.h2d, gpu.d2h, gpu.replays)
            if gpu.recordings == recordings:
                found.append((gpu.blocking, *(sum(one.values()) for one in sums)))
    names = ("blocking", "launches", "copies", "reads", "replays")
    sums = {key: [one[place] for one in found] for place, key in enumerate(names)}
    middle = {key: median(values) for key, values in sums.items()}
    return middle | {"worst": {key: max(values) for key, values in sums.items()}}


def counted_on_gpu(name: str, some: int = 5) -> dict[str, float]:
    """What `counted` returns, of a real device, as torch's profiler sees it; and milliseconds of a round without it."""
    rounds, found = rounds_of(name), []
    while len(found) < some:
        with patch.object(graphs, "_recorded", wraps=graphs._recorded) as recorded, profile() as seen:
            next(rounds)
            torch.cuda.synchronize()
        if not recorded.called:
            found.append(calls([event.name for event in seen.events()]))
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        next(rounds)
        seconds.append(time.perf_counter() - began)
    return {key: median(one[key] for one in found) for key in found[0]} | {"round_ms": 1000 * median(seconds)}


def calls(names: list[str]) -> dict[str, float]:
    """Counts from the names of a profiler's events: calls of the runtime, and copies as the device ran them."""

    def starting(*starts: str) -> int:
        return sum(name.startswith(starts) for name in names)

    replays, copies, reads = starting("cudaGraphLaunch"), starting("Memcpy HtoD"), starting("Memcpy DtoH")
    kernels = starting("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel")
    inside = starting("cudaMemcpyAsync", "cudaMemsetAsync") - copies - reads  # of the device's memory
    return {"launches": kernels + inside + replays, "replays": replays, "copies": copies,
            "blocking": starting("Memcpy HtoD (Pageable"), "reads": reads}  # fmt: skip


def milliseconds(found: dict[str, Any]) -> float:
    """Arithmetic, not a measurement: what the counts cost a round on the host and in waiting."""
    waits = found["blocking"] + found["reads"]
    return (LAUNCH * found["launches"] + COPY * found["copies"] + WAIT * waits) / 1000


def table() -> dict[str, Any]:
    """Every setting on both kinds of GPU."""
    found: dict[str, Any] = {}
    for name in SETTINGS:
        found[name] = {arch: counted(name, arch) for arch in ("sm80", "sm90")}
        for one in found[name].values():
            one["estimated_ms"] = milliseconds(one)
    return found


def beside(folder: Path) -> dict[str, Any]:
    """Counts of a real device beside those of the stand-in, which are in the report of `folder`."""
    stored = json.loads((folder / "gpu_counts.json").read_text())["after"]
    found = {}
    for name in SETTINGS:
        found[name] = {"gpu": counted_on_gpu(name), "standin": stored[name]["sm90"]}
        parts = [f"{key} {found[name]['gpu'][key]:g} ({stored[name]['sm90'][key]:g})"
                 for key in ("launches", "replays", "copies", "blocking", "reads")]  # fmt: skip
        print(f"{name:56} {', '.join(parts)}, {found[name]['gpu']['round_ms']:.2f} ms", flush=True)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "--real" in sys.argv:
        place = Path(sys.argv[-1])
        found = {"rows": ROWS, "k": K, "unit": "a round", "settings": beside(place.parent),
                 "environment": environment()}  # fmt: skip
        place.write_text(json.dumps(found, indent=2) + "\n")
        sys.exit()
    report = {
        "rows": ROWS, "k": K, "unit": "a round", "estimate": f"arithmetic, not measured: {LAUNCH} us a launch, "
        f"{COPY} us a copy, {WAIT} us a call that waits; a launch costs the same at 8B; "
        f"{HOST} us of Python a round are not in it, before or after", "after": table(), "environment": environment(),
    }  # fmt: skip
    if len(sys.argv) > 1:
        place = Path(sys.argv[1])
        kept = json.loads(place.read_text()) if place.exists() else {}
        place.write_text(json.dumps(({"before": kept["before"]} if "before" in kept else {}) | report, indent=2) + "\n")
    for name, by_arch in report["after"].items():
        for arch, one in by_arch.items():
            counts = f"{one['launches']:5} {one['copies']:4} {one['reads']:4}"
            print(f"{name:56} {arch} {counts} {one['estimated_ms']:.2f} ms")
