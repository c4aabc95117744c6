"""What every test shares: no network, two threads, fixed seeds, and a list of the GPU tests not run."""

import gc
import os

# Read when the libraries are first imported, so set before them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.event_file_writer import AtomicCounter

from tests.browser import CHROMIUM
from tests.composing import composing_fast

# Event files of one second are read in the order of their names, which end in a count of the process's files: file 10
# before file 9, and then the last figures of a run that was resumed are lost. Tests make many in a second.
event_file_writer._global_uid = AtomicCounter(10_000)

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))

MINUTES = float(os.environ.get("COTRAIN_TEST_MINUTES") or "inf")  # after these, no test begins
BEGAN = time.monotonic()
NO_TIME = f"no time left: COTRAIN_TEST_MINUTES={MINUTES:g}"
# of a kind, beside the kind itself: `make test-thorough` runs what a suite over all kinds says of them
STUDIES = Path(__file__).parent / "studies"
VARIANT = re.compile(r"\[.*, (pruned|low rank|markov|causal|greedy)\b")


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Global random state is the same before each test, whatever ran earlier."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def fast_settings() -> Iterator[None]:
    """`test_cli.py::test_a_command_composes_its_settings_with_hydra_as_it_is` runs without it."""
    with composing_fast():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a CUDA device, tests marked `gpu` are skipped; without a vLLM, those marked `engine`, without a llama.cpp
    those marked `llamacpp`, without Chromium those marked `browser`. Variants of kinds and studies are `thorough`. With
    a limit of time, each day begins with another file, so that none is always left out."""
    wanted = {
        "gpu": (torch.cuda.is_available(), "needs a CUDA GPU"),
        "browser": (CHROMIUM is not None, "needs Chromium: apt-get install chromium"),
        "engine": ("COTRAIN_VLLM" in os.environ, "needs a vLLM: make test-engines"),
        "llamacpp": ("COTRAIN_LLAMACPP" in os.environ, "needs a llama.cpp: make test-engines"),
    }
    files = list(dict.fromkeys(item.path for item in items))
    if MINUTES < float("inf"):
        first = date.today().toordinal() % len(files)
        order = {path: place for place, path in enumerate(files[first:] + files[:first])}
        items.sort(key=lambda item: order[item.path])
    for item in items:
        if VARIANT.search(item.name) or STUDIES in item.path.parents:
            item.add_marker(pytest.mark.thorough)
        for mark, (there, reason) in wanted.items():
            if item.get_closest_marker(mark) and not there:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """The collector of garbage does not look at modules and tests again and again: they stay to the end."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test for which no time is left."""
    if time.monotonic() - BEGAN > 60 * MINUTES:
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists every test that did not run, by file if the time was over: nothing is left out in silence."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section(f"{len(skipped)} not run")
    late = Counter(report.fspath for report in skipped if NO_TIME in report.longrepr[2])
    for file, count in late.items():
        terminalreporter.write_line(f"{file}: {count} tests, {NO_TIME}")
    for report in skipped:
        if NO_TIME not in report.longrepr[2]:
            terminalreporter.write_line(f"{report.nodeid}: {report.longrepr[2]}")
