"""What every test shares: no network, two threads, fixed seeds, and a list of the GPU tests not run."""

import gc
import os
from collections.abc import Iterator

# Read when the libraries are first imported, so set before them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import random

import numpy as np
import pytest
import torch
from hydra._internal.hydra import Hydra
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.event_file_writer import AtomicCounter

from tests.browser import CHROMIUM

# Event files of one second are read in the order of their names, which end in a count of the process's files: file 10
# before file 9, and then the last figures of a run that was resumed are lost. Tests make many in a second.
event_file_writer._global_uid = AtomicCounter(10_000)

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


@pytest.fixture(scope="session", autouse=True)
def settings_are_composed_once() -> Iterator[None]:
    """Hydra composes all settings twice a call, the first time to look for hydra.mode=, which no test sets. Processes
    that tests start (tests/cotrain/training/test_interrupts.py) do both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hydra, "get_mode", lambda *_, **__: None)
        yield


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Global random state is the same before each test, whatever ran earlier."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a CUDA device, tests marked `gpu` are skipped; without a vLLM, those marked `engine`, without Chromium
    those marked `browser`."""
    wanted = {
        "gpu": (torch.cuda.is_available(), "needs a CUDA GPU"),
        "browser": (CHROMIUM is not None, "needs Chromium: apt-get install chromium"),
        "engine": ("COTRAIN_VLLM" in os.environ, "needs a vLLM: make test-engines"),
    }
    for item in items:
        for mark, (there, reason) in wanted.items():
            if item.get_closest_marker(mark) and not there:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """The collector of garbage does not look at modules and tests again and again: they stay to the end."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists every test that did not run: nothing is left out in silence."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section(f"{len(skipped)} not run")
    for report in skipped:
        terminalreporter.write_line(f"{report.nodeid}: {report.longrepr[2]}")
