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
from safetensors.torch import load_file

from cotrain.cli import main
from cotrain.commands import train
from cotrain.errors import UserError
from cotrain.ranks import awaited
from tests.cotrain.commands.test_train import SIZES, job, same, weights
from tests.cotrain.teacher.test_spread import distance
from tests.folders import own_texts, run_paths

# of the loss tv, rounding decides on which side of p a probability q lies that is p
SETTINGS = "trainer.precision=32-true trainer.corpus_steps=0 rollout.temperatures=[1.0] loss=kl".split()


def launch(folder: Path, output: str, *settings: str) -> dict[str, Any]:
    words = [sys.executable, "-m", "cotrain", "train", *run_paths(folder, output), *SIZES, *SETTINGS, *settings]
    return {"args": words, "env": os.environ | {"OMP_NUM_THREADS": "1"}}


def trained(folder: Path, *runs: tuple[str, ...]) -> list[Path]:
    """The folders of runs, each an output and settings, started together. A run resumes from what its folder holds."""
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    for process in [subprocess.Popen(**launch(folder, *run), **pipes) for run in runs]:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
    return [folder / output for output, *_ in runs]


WHOLE = ("trainer.devices=2", "trainer.strategy=ddp")
PARTS = ("trainer.devices=2", "trainer.strategy=fsdp2")


@pytest.fixture(scope="module")
def pairs(place: Path) -> dict[str, Path]:
    """The folders of two runs of two processes: with the whole draft in each, and with a sharded draft."""
    return dict(zip(("pair", "parts"), trained(place, ("pair", *WHOLE), ("parts", *PARTS)), strict=True))


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    """The folder of a run of this process."""
    assert job(place, "alone", *SETTINGS) == 0
    return place / "alone"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["pair", "parts"])
def test_two_processes_train_what_one_would(alone: Path, pairs: dict[str, Path], name: str) -> None:
    one, two = alone, pairs[name]
    for step in (2, 5):
        start, ours, theirs = weights(one, 0), weights(one, step), weights(two, step)
        # by their norms: Adam moves a weight whose gradient is mere rounding as far as any other
        moved, apart = distance(ours, start), distance(ours, theirs)
        assert apart < 0.02 * moved and moved > 1e-2
    assert (two / "draft" / "report.json").exists() and not list(two.rglob("*.lock"))


@pytest.mark.thorough
def test_two_processes_move_a_target_as_one_would(place: Path) -> None:
    """Also with steps in which the adapter has no gradient."""
    own_texts(place / "more.jsonl", 900)  # of fewer too few held-out texts begin differently
    given = [
        f"data.path={place / 'more.jsonl'}",
        *"""mode=joint joint.warm_steps=3 joint.steps=4 joint.every=2 joint.rank=2 joint.lr=0.05 joint.epsilon=9
        rollout.held_out_texts=6 measure=false trainer.steps=1 trainer.validations=1 optimizer.decay=0.4""".split(),
    ]
    moved = trained(place, ("joint alone", *given), ("joint pair", *given, *WHOLE))
    start, one, two = (
        load_file(path / "model.safetensors") for path in (place / "target", *(run / "target" for run in moved))
    )
    learnt, apart = distance(one, start), distance(one, two)
    assert apart < 0.2 * learnt and learnt > 1e-2  # Adam's first step is the sign of a gradient, even of rounding


@pytest.mark.thorough
def test_a_killed_sharded_run_resumes_as_if_it_had_not_been_killed(place: Path, pairs: dict[str, Path]) -> None:
    parts, killed, last = pairs["parts"], place / "killed", Path("checkpoints") / "last.ckpt"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(**launch(place, killed.name, *PARTS), **quiet, start_new_session=True)
    while not (killed / last).exists() and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL  # it had not ended by itself
    began = torch.load(killed / last, weights_only=True)["global_step"]
    runs = [*trained(place, (killed.name, *PARTS)), parts]
    assert 0 < began < 5 and same(*(weights(run, 5) for run in runs)) and not same(weights(parts, 2), weights(parts, 5))
    saved = [torch.load(run / last, weights_only=True) for run in runs]
    assert [one["global_step"] for one in saved] == [4, 4] and same(*(one["state_dict"] for one in saved))
    moments = [one["optimizer_states"][0]["state"] for one in saved]
    assert moments[0].keys() == moments[1].keys()
    assert all(torch.equal(one["exp_avg"], moments[1][key]["exp_avg"]) for key, one in moments[0].items())


KILLED = """
import os, signal, sys, torch
import torch.distributed as dist
from cotrain.cli import _failed

rank, killed, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
values = torch.ones(3)
dist.all_reduce(values)
if rank == killed:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(values)
except Exception as error:
    sys.exit(_failed("train", error))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("killed", [0, 1])
def test_the_other_process_says_in_one_line_that_one_was_killed(killed: int, tmp_path: Path) -> None:
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    words = [sys.executable, "-c", KILLED]
    pair = [subprocess.Popen([*words, str(rank), str(killed), str(tmp_path / "store")], **pipes) for rank in (0, 1)]
    errors = [process.communicate(timeout=100)[1] for process in pair]
    assert pair[killed].returncode == -signal.SIGKILL and pair[1 - killed].returncode == 1
    said = [line for line in errors[1 - killed].splitlines() if not line.startswith("[")]  # gloo's own
    assert len(said) == 1 and "cotrain train: another process of this run has ended; " in said[0]


def test_a_process_that_waits_says_that_the_first_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([5, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    with pytest.raises(UserError, match="the process that samples has ended; .* the same command resumes"):
        awaited(lambda: False, "the process that samples")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("trainer.devices=2", "trainer.batch=3"), "trainer.batch: 3 texts cannot be divided equally among 2 devices"),
        (("trainer.devices=0",), "trainer.devices=0: it must be at least 1"),
        (("draft.quantisation=int3",), "draft.quantisation=int3: it must be one of none, int8, nf4"),
        (("trainer.strategy=fsdp2", "draft.quantisation=nf4"), "draft.quantisation, trainer.strategy: use only one"),
    ],
)
def test_settings_that_exclude_each_other_raise_before_anything_is_loaded(
    tmp_path: Path, settings: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", f"target.path={tmp_path / 'nowhere'}", f"output={tmp_path / 'run'}", *settings]) == 1
    assert said in capsys.readouterr().err


def test_each_process_does_the_checks_before_it_waits_for_the_first(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process that waits in a collective does not see the launcher's signal. What the checks print, the first process
    prints."""
    begun: list[Any] = []
    monkeypatch.setattr(train, "rank", lambda: 1)
    monkeypatch.setattr(train, "train", lambda *given: begun.append(given))
    assert job(place, "second", "init.layers=[0,99]") == 1 and not begun
    assert "init.layers=[0, 99]: the target has " in capfd.readouterr().err
    assert job(place, "second") == 0 and not any(capfd.readouterr())
    ((_, folder, _, sources),) = begun
    assert {"train", "held_out"} <= set(sources) and not folder.exists()
