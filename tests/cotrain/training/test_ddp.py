"""Two processes of one machine, started as a user would."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.cli import main
from tests.cotrain.commands.test_train import SIZES, place, same, weights  # noqa: F401 - a fixture

SETTINGS = ["trainer.precision=32-true", "trainer.corpus_steps=0", "rollout.temperatures=[1.0]"]


def launch(folder: Path, output: str, *settings: str) -> dict[str, Any]:
    paths = [f"target.path={folder / 'target'}", f"data.path={folder / 'own.jsonl'}", f"output={folder / output}"]
    words = [sys.executable, "-m", "cotrain", "train", *paths, *SIZES, *SETTINGS, *settings]
    return {"args": words, "env": os.environ | {"OMP_NUM_THREADS": "1"}}


def trained(folder: Path, output: str, *settings: str) -> Path:
    """The folder of a run, which goes on where it was."""
    command = launch(folder, output, *settings)
    done = subprocess.run(**command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / output


PARTS = ("trainer.devices=2", "trainer.strategy=fsdp2")


@pytest.fixture(scope="module")
def parts(place: Path) -> Path:  # noqa: F811
    """The folder of a run of two processes that hold parts of the draft."""
    return trained(place, "parts", *PARTS)


@pytest.fixture(scope="module")
def pair(place: Path) -> Path:  # noqa: F811
    """The folder of a run of two processes that hold all of it."""
    return trained(place, "pair", "trainer.devices=2", "trainer.strategy=ddp")


@pytest.mark.parametrize("name", ["pair", "parts"])
def test_two_processes_train_what_one_would(place: Path, name: str, request: pytest.FixtureRequest) -> None:  # noqa: F811
    two, one = request.getfixturevalue(name), trained(place, "alone")  # a finished run says its table again
    for step in (2, 5):
        ours, theirs = weights(one, step), weights(two, step)
        start = weights(one, 0)
        # by their norms: Adam moves a weight whose gradient is mere rounding as far as any other
        moved = sum((ours[name] - start[name]).double().square().sum() for name in ours).sqrt()
        apart = sum((ours[name] - theirs[name]).double().square().sum() for name in ours).sqrt()
        assert apart < 0.02 * moved and moved > 1e-2
    assert (two / "draft" / "report.json").exists() and not list(two.rglob("*.lock"))


def test_parts_that_were_killed_end_as_if_they_had_not_been(place: Path, parts: Path) -> None:  # noqa: F811
    killed, last = place / "killed", Path("checkpoints") / "last.ckpt"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(**launch(place, killed.name, *PARTS), **quiet, start_new_session=True)
    while not (killed / last).exists() and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL  # it had not ended by itself
    began = torch.load(killed / last, weights_only=True)["global_step"]
    runs = trained(place, killed.name, *PARTS), parts
    assert 0 < began < 5 and same(*(weights(run, 5) for run in runs)) and not same(weights(parts, 2), weights(parts, 5))
    kept = [torch.load(run / last, weights_only=True) for run in runs]
    assert [one["global_step"] for one in kept] == [4, 4] and same(*(one["state_dict"] for one in kept))
    moments = [one["optimizer_states"][0]["state"] for one in kept]
    assert moments[0].keys() == moments[1].keys()
    assert all(torch.equal(one["exp_avg"], moments[1][key]["exp_avg"]) for key, one in moments[0].items())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("trainer.devices=2", "trainer.batch=3"), "trainer.batch: 3 texts are not as many for each of 2 devices"),
        (("trainer.devices=0",), "trainer.devices=0: it must be at least 1"),
        (("draft.quantisation=int3",), "draft.quantisation: 'int3' is none of none, int8, nf4"),
        (("draft.quantisation=int8", "trainer.ema=0.9"), "draft.quantisation, trainer.ema: one of them"),
        (("trainer.strategy=fsdp2", "trainer.ema=0.9"), "trainer.ema, trainer.strategy: one of them"),
        (("trainer.strategy=fsdp2", "draft.quantisation=nf4"), "draft.quantisation, trainer.strategy: one of them"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_loaded(
    tmp_path: Path, settings: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "target.path=nowhere", f"output={tmp_path / 'run'}", *settings]) == 1
    assert said in capsys.readouterr().err
