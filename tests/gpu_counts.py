"""Launches, copies and reads of a round and of a training step on a GPU, counted on the stand-in device, and by a
profiler on a real one.

    python -m tests.gpu_counts [outputs/results/gpu_counts.json]
    python -m tests.gpu_counts --real outputs/results/gpu_counts_real.json

Tiny models with the shapes of a round of eight rows and four drafts: what is counted does not depend on their size.
A round is one after the first ones, in which no graph is recorded; the median round and the worst one are given. A
training step is one of `cotrain train` with the default recipe and bfloat16: from the batch on the CPU to the
optimiser, and to the curves if it is a step that is logged.
`tests/inference/test_gpu_counts.py` bounds them.
"""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch.callbacks import Callback
from torch.profiler import profile

from cotrain.config.settings import checked, register
from cotrain.data.texts import Texts, none
from cotrain.evaluation.held_out import held_out
from cotrain.paths import folder
from cotrain.students.base import Student
from cotrain.teacher.target_model import served
from cotrain.training.assembly import trained_by
from cotrain.training.callbacks import Learning, StandingWeights
from cotrain.training.deadline import Deadline
from cotrain.training.fit import _loader, _points, _trainer
from cotrain.training.interrupts import Signals
from cotrain.training.progress import Clock
from inference import Engine, Sampling
from inference.measure.environment import environment
from inference.models import replay as graphs
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from tests import kinds, standin, student_kinds
from tests.tiny import near, tiny

ROWS, K, FIRST, ROUNDS = 8, 4, 4, 12
PROMPTS = [[(7 * i + 5 * n) % 30 + 1 for i in range(n)] for n in (3, 9, 2, 6, 14, 5, 11, 7)]
# microseconds: of a launch, of a copy that does not block, of a call that waits for the device (a read, a copy that is
# not pinned); and of what a round does in Python beside these, eight rows' lists that are sent and committed: the least
# of 300 rounds of that alone, on a CPU in use
LAUNCH, COPY, WAIT, HOST = 5, 8, 15, 220

Made = Callable[[Any], Any]  # of the target


def _draft(_: Any) -> Any:
    return Independent(near(tiny()).to("cuda"))


KINDS = (
    "conditioned",
    "medusa",
    "medusa, markov",
    "hydra",
    "eagle",
    "p_eagle",
    "p_eagle, markov",
    "block",
    "block, causal",
    "block, pruned",
    "parallel",
    "parallel, markov",
    "early_exit",
    "quantised",
    "retrieval",
    "hybrid",
    "two_levels",
)
MIXED = [Sampling(t) for t in (0.5, 0.7, 1.0, 1.3, 0.9, 0.8, 1.1, 0.6)]
CUTS = [Sampling(0.9, top_k=n % 3 * 5, top_p=1 - 0.1 * (n % 2), min_p=0.02 * (n % 4)) for n in range(ROWS)]
PENALTIES = Sampling(
    0.9,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.1,
    logit_bias={3: 1.0},
    banned=((1,), (2, 3)),
    min_new_tokens=90,
    stop_ids=(5,),
)
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
    engine = Engine(target, make(target), verify=rule, policy=Fixed(K), rows=ROWS)
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


TRAINED = (
    "independent",
    "conditioned",
    "parallel",
    "eagle, pruned",
    "p_eagle, markov",
    "block, causal",
    "medusa",
    "hydra",
    "early_exit",
    "hybrid",
)
STEPS, TEXTS = 3, 4  # of a training, and of a step: the first one stores states of the target, the others read them
LOGGED = 2  # the step that is logged


@cache
def recipe() -> Any:
    """The settings of `cotrain train trainer=gpu`."""
    register()
    with initialize_config_dir(str(folder("conf")), version_base="1.3"):
        asked = [
            "trainer=gpu",
            f"trainer.steps={STEPS}",
            "trainer.corpus_steps=0",
            f"trainer.batch={TEXTS}",
            "trainer.validations=1",
        ]
        return checked("train", compose("train", overrides=asked))


class Training:
    """A training of a draft on the current device, by `cotrain`'s own trainer, callbacks and loss."""

    def __init__(self, kind: str, place: Path, callbacks: tuple[Callback, ...] = (), device: str = "cuda") -> None:
        target = student_kinds.target()
        student: Student = student_kinds.STUDENTS[kind](target)  # made on the CPU: random numbers of a GPU are others
        student.network.float()  # on the CPU until the trainer moves it, as in a run
        target.float().to(device)  # type: ignore[arg-type]
        cfg, self.target = recipe(), target
        ids = torch.randint(1, 32, (TEXTS, 24), generator=torch.Generator().manual_seed(0))
        texts = Texts(ids, torch.arange(TEXTS) + 2, torch.arange(TEXTS) + 18, ["a", "b"] * (TEXTS // 2))
        job: Any = SimpleNamespace(
            cfg=cfg, folder=place, target=target, loggers=[], signals=Signals(), deadline=Deadline()
        )
        job.halves = job.read, _ = served(target, layers=student.reads)
        held = {1.0: held_out(job.read, texts.rows([0, 1]), 1.0)}
        self.module = trained_by(job, student, held)
        clock = Clock(self.module.progress, 1)  # type: ignore[arg-type]
        own = [clock, Learning(clock.progress), StandingWeights(), _points(job, self.module, clock, [])]
        self.trainer = _trainer(job, [*own, *callbacks], STEPS + 1, clock.progress, 0)
        self.loader = _loader(cfg.trainer, 0, none(), texts, self.trainer)


@contextmanager
def logging_soon() -> Iterator[None]:
    """Steps are logged so often that a short training has one."""
    with patch("cotrain.training.module.WATCHED", LOGGED), patch("cotrain.training.fit.WATCHED", LOGGED):
        yield


class _Each(Callback):
    """Calls `ended` after each step."""

    def __init__(self, ended: Callable[[int], None]) -> None:
        self.ended = ended

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.ended(trainer.global_step)


def training_counts(kind: str, real: bool = False, then: Callable[[Training], None] | None = None) -> dict[str, Any]:
    """Launches, copies to the device, those that block, and reads of a training step: "step", of one that is not
    logged, and "logged", of one that is. Of the stand-in also `places`, where the former read. real: on a GPU, by
    torch's profiler. then: called with the training on the device."""
    found: dict[int, dict[str, float]] = {}
    places: Counter[str] = Counter()

    def of_standin(step: int) -> None:
        sums = {"launches": gpu.launches, "copies": gpu.h2d, "reads": gpu.d2h}
        found[step] = {name: sum(each.values()) for name, each in sums.items()} | {"blocking": gpu.blocking}
        if step == STEPS:
            places.update({place: count for (_, what, place), count in gpu.sites.items() if what == "d2h"})
        gpu.clear()

    def of_gpu(step: int) -> None:
        torch.cuda.synchronize()
        seen.step()

    def ready(events: Any) -> None:
        found[len(found) + 1] = calls([event.name for event in events.events()])

    with TemporaryDirectory() as place, logging_soon(), ExitStack() as within:
        if real:
            schedule = torch.profiler.schedule(wait=0, warmup=0, active=1)
            seen = within.enter_context(profile(schedule=schedule, on_trace_ready=ready))
        else:
            gpu = within.enter_context(standin.device("sm90"))
        training = Training(kind, Path(place), (_Each(of_gpu if real else of_standin),))
        training.trainer.fit(training.module, training.loader)
        if then:
            then(training)
    return {"step": found[STEPS], "logged": found[LOGGED]} | ({} if real else {"places": dict(places)})


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
    return {
        "launches": kernels + inside + replays,
        "replays": replays,
        "copies": copies,
        "blocking": starting("Memcpy HtoD (Pageable"),
        "reads": reads,
    }


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
        parts = [
            f"{key} {found[name]['gpu'][key]:g} ({stored[name]['sm90'][key]:g})"
            for key in ("launches", "replays", "copies", "blocking", "reads")
        ]
        print(f"{name:56} {', '.join(parts)}, {found[name]['gpu']['round_ms']:.2f} ms", flush=True)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if "--real" in sys.argv:
        place = Path(sys.argv[-1])
        found = {
            "rows": ROWS,
            "k": K,
            "unit": "a round",
            "settings": beside(place.parent),
            "environment": environment(),
        }
        place.write_text(json.dumps(found, indent=2) + "\n")
        sys.exit()
    report = {
        "rows": ROWS,
        "k": K,
        "unit": "a round",
        "estimate": f"arithmetic, not measured: {LAUNCH} us a launch, "
        f"{COPY} us a copy, {WAIT} us a call that waits; a launch costs the same at 8B; "
        f"{HOST} us of Python a round are not in it, before or after",
        "after": table(),
        "environment": environment(),
        "training": {
            "unit": f"a step of {TEXTS} texts, bfloat16",
            "kinds": {kind: training_counts(kind) for kind in TRAINED},
        },
    }
    if len(sys.argv) > 1:
        place = Path(sys.argv[1])
        kept = json.loads(place.read_text()) if place.exists() else {}
        place.write_text(json.dumps(({"before": kept["before"]} if "before" in kept else {}) | report, indent=2) + "\n")
    for name, by_arch in report["after"].items():
        for arch, one in by_arch.items():
            counts = f"{one['launches']:5} {one['copies']:4} {one['reads']:4}"
            print(f"{name:56} {arch} {counts} {one['estimated_ms']:.2f} ms")
