"""Plants each row of `tests.mutants.MUTANTS` in a copy of the checkout and expects its tests to fail.

    python -m tests.run_mutants [--minutes N] [name ...]

The named tests must first pass on the unmodified copy. A mutant is caught when a test fails; a module that
no longer imports is an error of the table, not a catch. One that was not caught is run once more at the end, where the
log names it: a run that the machine ended says nothing. One whose tests are all skipped here (without Chromium, say) is
neither: it is listed at the end. With --minutes the rows come in an order that differs from day to day, and those for
which no time is left are counted at the end. Heavy libraries are imported once, here,
and every run is a fork of this process, so `cotrain` and `inference` must not be imported before it.
"""

import argparse
import gc
import importlib
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import date
from math import inf
from pathlib import Path
from typing import NoReturn

import pytest

from tests.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cotrain", "inference", "conf", "data", "docs", "studies", "tests", "outputs/results")
FILES = ("pyproject.toml", "constraints.txt", "Makefile", "README.md", "CONTRIBUTING.md", "LICENSE")
OURS = {"cotrain", "inference", "studies", "tests"}
HEAVY = ("torch", "transformers.models.llama.modeling_llama", "lightning", "hydra", "datasets")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # one thread a worker: they share the cores
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # each takes time in every run; what is needed is in QUICKLY
    "PYTHONDONTWRITEBYTECODE": "1",  # a mutant of equal size within a second would meet stale bytecode
    "TOKENIZERS_PARALLELISM": "false",
}
QUICKLY = ("-x", "-q", "--disable-warnings", "--assert=plain", "-p", "no:cacheprovider", "-p", "pytest_timeout")
NOT_CAUGHT = (ImportError, NameError, SyntaxError)  # the change broke the module, not the behaviour
CAUGHT, PASSED, BROKEN, SKIPPED = 0, 1, 2, 3  # exit status of a run
SECONDS_A_TEST = 60  # a mutant may loop for ever


class Recorder:
    """Pytest plugin that tells tests that failed from tests that could not run."""

    def __init__(self) -> None:
        self.caught = False
        self.broken = False
        self.ran = False

    def pytest_runtest_makereport(self, call: pytest.CallInfo) -> None:
        skipped = call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception)
        self.ran |= call.when == "call" and not skipped
        if call.excinfo is None or skipped:
            return
        if call.excinfo.errisinstance(NOT_CAUGHT):
            self.broken = True
        else:
            self.caught = True


@dataclass
class Job:
    """One run of pytest in a worker's copy: a mutant, or None for the unmodified tree."""

    mutant: Mutant | None
    tests: list[str]


@dataclass
class Result:
    """What a run came to: its status, wall seconds and what pytest printed."""

    job: Job
    status: int
    seconds: float
    output: str


def copy_tree(target: Path) -> Path:
    """Copies what the tests read to `target`; what the checkout lacks is left out."""
    for name in FOLDERS + FILES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, target / name)
    return target


def run_pytest(root: Path, tests: list[str]) -> int:
    """Runs the tests on the copy at `root`, in this process, which is a fresh fork."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)  # for tests that start a process of their own
    sys.path[:] = [str(root), *(entry for entry in sys.path if Path(entry).resolve() != ROOT)]
    sys.dont_write_bytecode = True
    recorder = Recorder()
    options = [*QUICKLY, f"--timeout={SECONDS_A_TEST}", f"--rootdir={root}"]
    code = pytest.main([*options, *tests], plugins=[recorder])
    if code == pytest.ExitCode.OK:
        return PASSED if recorder.ran else SKIPPED
    failed = code == pytest.ExitCode.TESTS_FAILED
    return CAUGHT if failed and recorder.caught and not recorder.broken else BROKEN


def child(job: Job, root: Path) -> NoReturn:
    """Body of a fork: plants the mutant, runs its tests, leaves with the status."""
    status = BROKEN
    with root.with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        if job.mutant is not None:
            (root / job.mutant.file).write_text(job.mutant.applied(ROOT), encoding="utf-8")
        status = run_pytest(root, job.tests)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def run(jobs: list[Job], slots: list[Path], until: float = inf) -> list[Result]:
    """Runs the jobs, as many at a time as there are copies of the tree, and reports each as it ends. until: the value
    of time.monotonic() from which on no job is begun."""
    waiting, free, results = list(jobs), list(slots), []
    running: dict[int, tuple[Job, Path, float]] = {}
    while waiting or running:
        if time.monotonic() > until:
            waiting.clear()
        if not waiting and not running:
            break
        while waiting and free:
            job, root = waiting.pop(0), free.pop()
            pid = os.fork()
            if pid == 0:
                child(job, root)
            running[pid] = (job, root, time.monotonic())
        pid, wait_status = os.wait()
        job, root, began = running.pop(pid)
        if job.mutant is not None:
            shutil.copy2(ROOT / job.mutant.file, root / job.mutant.file)
        output = root.with_suffix(".log").read_text(errors="replace")
        status = os.waitstatus_to_exitcode(wait_status)
        results.append(Result(job, status, time.monotonic() - began, output))
        free.append(root)
        report(results[-1])
    return results


def report(result: Result) -> None:
    """One line a run; what pytest printed too, unless the run came to what it should."""
    mutant = result.job.mutant
    if mutant is None:
        good, words = PASSED, {CAUGHT: "FAILED", PASSED: "passed", SKIPPED: "not run"}
        name = f"unmodified tree: {len(result.job.tests)} of the named tests"
    else:
        good, words = CAUGHT, {CAUGHT: "caught", PASSED: "SURVIVED", SKIPPED: "not run"}
        name = f"{mutant.name} ({mutant.pitfall})"
    print(f"{words.get(result.status, 'BROKEN'):9}{result.seconds:6.1f} s  {name}", flush=True)
    if result.status != good:
        print(result.output, flush=True)


def chosen(names: list[str]) -> list[Mutant]:
    """The mutants asked for, all by default; ValueError for a wrong name or a row that does not apply."""
    known = [mutant.name for mutant in MUTANTS]
    unknown = sorted(set(names) - set(known))
    doubled = sorted({name for name in known if known.count(name) > 1})
    if unknown:
        raise ValueError(f"tests/planted has no mutant named {', '.join(unknown)}")
    if doubled:
        raise ValueError(f"tests/planted: more than one mutant is named {', '.join(doubled)}")
    rows = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    for mutant in rows:
        mutant.applied(ROOT)
    return rows


def baseline(rows: list[Mutant], workers: int) -> list[Job]:
    """The named tests of all rows, each once, dealt out by file, in more hands than workers: some take long."""
    tests = list(dict.fromkeys(test for mutant in rows for test in mutant.tests))
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    count = 4 * workers
    hands = [[t for t in tests if t.partition("::")[0] in files[i::count]] for i in range(count)]
    return [Job(None, hand) for hand in hands if hand]


def main(words: list[str]) -> int:
    """Runs the mutants that are named; exit status 0 when every one that ran is caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.run_mutants")
    parser.add_argument("--minutes", type=float, default=inf)
    parser.add_argument("names", nargs="*")
    given, began = parser.parse_args(words), time.monotonic()
    try:
        rows = chosen(given.names)
    except (ValueError, SyntaxError) as error:
        print(error, file=sys.stderr)
        return 2
    if given.minutes < inf:
        random.Random(date.today().toordinal()).shuffle(rows)
    os.environ.update(ENVIRONMENT)
    for name in HEAVY:
        importlib.import_module(name)
    gc.freeze()  # a run collects what is its own alone
    workers = min(2, len(rows))
    with tempfile.TemporaryDirectory() as folder:
        slots = [copy_tree(Path(folder, f"copy{index}")) for index in range(workers)]
        if any(result.status not in (PASSED, SKIPPED) for result in run(baseline(rows, workers), slots)):
            print("The named tests must pass on the unmodified tree first.", file=sys.stderr)
            return 1
        results = run([Job(mutant, mutant.tests) for mutant in rows], slots, began + 60 * given.minutes)
        skipped = [result.job.mutant.name for result in results if result.status == SKIPPED and result.job.mutant]
        doubtful = [result.job for result in results if result.status not in (CAUGHT, SKIPPED)]
        if doubtful:
            print(f"{len(doubtful)} once more, now that the machine has less to do:", flush=True)
        failed = [result for result in run(doubtful, slots) if result.status != CAUGHT]
    late = len(rows) - len(results)
    if late:
        print(f"{late} of {len(rows)} not run: the {given.minutes:g} minutes were over")
    passed = len(results) - len(failed) - len(skipped)
    print(
        f"{passed} passed, {len(failed)} failed, {len(skipped)} not run for want of what their tests need"
        f"{': ' if skipped else ''}{', '.join(skipped)}"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
