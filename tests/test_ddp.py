"""Two processes of one machine, started as a user would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_train import SIZES, place, weights  # noqa: F401 - a fixture

SETTINGS = ["trainer.precision=32-true", "trainer.corpus_steps=0", "rollout.temperatures=[1.0]", "overwrite=true"]


def trained(folder: Path, output: str, *settings: str) -> Path:
    paths = [f"target.path={folder / 'target'}", f"data.path={folder / 'own.jsonl'}", f"output={folder / output}"]
    command = [sys.executable, "-m", "cotrain", "train", *paths, *SIZES, *SETTINGS, *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / output


def test_two_processes_train_what_one_would(place: Path) -> None:  # noqa: F811
    one = trained(place, "alone")
    two = trained(place, "pair", "trainer.devices=2", "trainer.strategy=ddp")
    for step in (2, 5):
        ours, theirs = weights(one, step), weights(two, step)
        moved = max((ours[name] - weights(one, 0)[name]).abs().max() for name in ours)
        apart = max((ours[name] - theirs[name]).abs().max() for name in ours)
        assert apart < 0.02 * moved and moved > 1e-4
    assert (two / "draft" / "report.json").exists() and not list(two.rglob("*.lock"))


def test_a_batch_that_processes_cannot_share_is_refused(place: Path) -> None:  # noqa: F811
    with pytest.raises(AssertionError, match="trainer.batch: 3 texts are not as many for each of 2 devices"):
        trained(place, "odd", "trainer.devices=2", "trainer.strategy=ddp", "trainer.batch=3", "measure=false")
