"""What every test shares: no network, two threads, fixed seeds, and a list of the GPU tests not run."""

import copy
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
from dataclasses import astuple, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.event_file_writer import AtomicCounter

from cotrain.paths import folder
from tests.browser import CHROMIUM

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
    """A command composes its settings once; each file of `conf` and each word is parsed once per process, and files
    that were merged are not merged again: 0.02 s for 0.17 s.

    Hydra composes twice, the first time for `hydra.mode` alone. Unless a setting names that, the mode follows from
    `-m`. Which files are merged depends on the groups that a command names, and not on the values that it sets
    afterwards. `test_cli.py::test_a_command_composes_its_settings_with_hydra_as_it_is` runs without this fixture.
    """
    mode, load, parsed = Hydra.get_mode, FileConfigSource.load_config, dict[str, Any]()
    list_files, merge = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
    lists, merged = dict[Any, DefaultsList](), dict[Any, Any]()
    parse, words = OverridesParser.parse_rule, dict[Any, Any]()

    def get_mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        return mode(hydra, config_name, overrides) if any("hydra.mode" in text for text in overrides) else None

    def load_config(source: FileConfigSource, config_path: str) -> Any:
        if source.path != str(folder("conf")):
            return load(source, config_path)
        if config_path not in parsed:
            parsed[config_path] = load(source, config_path)
        return copy.deepcopy(parsed[config_path])

    def create_defaults_list(repo: Any, config_name: Any, overrides_list: list[Any], **settings: Any) -> DefaultsList:
        values = Overrides(repo=repo, overrides_list=overrides_list).config_overrides
        groups = [one.input_line for one in overrides_list if one not in values]
        key = config_name, *groups, *settings.values(), *(source.path for source in repo.get_sources())
        if key not in lists:
            lists[key] = list_files(repo, config_name, overrides_list, **settings)
        return replace(lists[key], config_overrides=values)

    def compose(loader: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
        sources = {source.path for source in repo.get_sources()}
        if not sources <= {str(folder("conf")), "hydra.conf", ""}:
            return merge(loader, defaults, repo)
        key = tuple(map(astuple, defaults))
        if key not in merged:
            merged[key] = merge(loader, defaults, repo)
        return copy.deepcopy(merged[key])

    def parse_rule(parser: OverridesParser, word: str, rule_name: str) -> Any:
        if (word, rule_name) not in words:
            words[word, rule_name] = parse(parser, word, rule_name)
        return copy.copy(words[word, rule_name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverridesParser, "parse_rule", parse_rule)
        patch.setattr(config_loader_impl, "create_defaults_list", create_defaults_list)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", compose)
        patch.setattr(Hydra, "get_mode", get_mode)
        patch.setattr(FileConfigSource, "load_config", load_config)
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
