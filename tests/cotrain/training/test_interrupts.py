"""Signals, checkpoints by time, and runs that are resumed or made longer."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cotrain.errors import Interrupted
from cotrain.training import results
from cotrain.training.interrupts import Keeper, Signals
from cotrain.training.module import Distillation
from cotrain.training.progress import Bar
from inference.drafts.draft_folder import read
from inference.drafts.weight_files import WEIGHTS
from tests.cotrain.commands.test_train import job

QUICK = "measure=false rollout.temperatures=[1.0] trainer.corpus_steps=0 trainer.accumulate=2".split()


LAST = Path("checkpoints") / "last.ckpt"


def quick(place: Path, output: str, *settings: str) -> int:
    return job(place, output, *QUICK, f"rollout.folder={place / 'quick texts'}", "trainer.steps=6", *settings)


@pytest.mark.thorough
def test_a_run_that_ends_while_it_measures_leaves_a_draft_and_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = results.measurement.measure

    def ended(*_: Any) -> Any:
        raise Interrupted(signal.SIGINT, "interrupted")

    settings = "measure=true trainer.steps=2 bench.minutes=0".split()
    monkeypatch.setattr(results.measurement, "measure", ended)
    assert quick(place, "unmeasured", *settings) == 128 + signal.SIGINT
    draft = place / "unmeasured" / "draft"
    assert f"draft: {draft}, which is measured now" in capsys.readouterr().out
    weights, early = load_file(draft / WEIGHTS), read(draft).metadata
    assert early.report is None
    monkeypatch.setattr(results.measurement, "measure", measured)
    assert quick(place, "unmeasured", *settings) == 0
    late, metadata = load_file(draft / WEIGHTS), read(draft).metadata
    assert metadata.report is not None and late.keys() == weights.keys()
    assert all(weights[name].equal(late[name]) for name in weights)


def saved_by(folder: Path) -> dict[str, Any]:
    return torch.load(folder / LAST, weights_only=True)


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """The folder of a run that nothing stopped."""
    assert quick(place, "whole") == 0
    return place / "whole"


def at(patch: pytest.MonkeyPatch, owner: type, name: str, when: Callable[[Any], bool], number: int) -> None:
    """Send this process a signal, once, in a method of the module."""
    true, sent = getattr(owner, name), []

    def method(self: Any, *arguments: Any) -> Any:
        if when(self) and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return true(self, *arguments)

    patch.setattr(owner, name, method)


def test_signals_keep_the_step_and_the_same_command_resumes(
    place: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    displays: list[tuple[int, int]] = []
    true = Bar.on_train_start

    def noted(self: Any, *arguments: Any) -> None:
        true(self, *arguments)
        displays.append((self.display.start_at, self.display.done))

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(Bar, "on_train_start", noted)
        at(patch, Distillation, "learn", lambda module: module.global_step == 1, signal.SIGTERM)
        assert quick(place, "stopped") == 143
    assert "cotrain train: interrupted at step 2, which is saved; the same command resumes" in capsys.readouterr().err
    assert saved_by(place / "stopped")["global_step"] == 2
    with monkeypatch.context() as patch:
        patch.setattr(Bar, "on_train_start", noted)
        at(patch, Distillation, "judge", lambda module: module.global_step == 3, signal.SIGINT)
        assert quick(place, "stopped", "overwrite=true") == 130
    out, err = capsys.readouterr()
    assert "interrupted at step 3, which is saved" in err and "the training goes on from step 2 of 6" in out
    assert f"output={place / 'stopped'} has an unfinished run of the same settings, which is resumed" in out
    assert displays == [(0, 0), (2, 2)]
    with monkeypatch.context() as patch:  # after the training, while the page is written
        patch.setattr("cotrain.commands.train.written", lambda _: os.kill(os.getpid(), signal.SIGTERM))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert quick(place, "stopped", "label=other", "bench.prompts=3") == 143
    signal.signal(signal.SIGTERM, handlers[1])
    assert "cotrain train: interrupted; the same command resumes" in capsys.readouterr().err
    assert quick(place, "stopped", "label=other", "bench.prompts=3") == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    ours, theirs = saved_by(place / "stopped"), saved_by(whole)
    assert ours["global_step"] == theirs["global_step"] == 6
    assert all(torch.equal(value, theirs["state_dict"][name]) for name, value in ours["state_dict"].items())


def test_a_finished_run_without_its_draft_writes_it_again(
    place: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its checkpoint; without that, it says what to type."""
    copy = shutil.copytree(whole, tmp_path / "copy")
    (copy / "draft" / "model.safetensors").unlink()
    capsys.readouterr()
    assert quick(place, str(copy)) == 0
    said = capsys.readouterr().out
    assert f"{copy / 'draft'}: model.safetensors is missing: the draft is written again" in said
    assert (copy / "draft" / "model.safetensors").read_bytes() == (whole / "draft" / "model.safetensors").read_bytes()
    shutil.rmtree(copy / "draft")
    shutil.rmtree(copy / "checkpoints")
    assert quick(place, str(copy)) == 1
    assert f"there is no folder {copy / 'draft'}, and no checkpoint is left" in capsys.readouterr().err


def test_a_finished_run_can_become_longer_and_nothing_else(
    place: Path,
    whole: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert quick(place, "whole", "optimizer.lr=0.5", "label=x") == 1
    said = capsys.readouterr().err
    assert "optimizer.lr=0.001 (now 0.5)" in said and "label" not in said
    assert quick(place, "whole", "label=x") == 0 and "the new label had no effect" in capsys.readouterr().out
    (whole / "draft" / "report.json").write_text("{}")  # as of a measured draft
    assert quick(place, "whole", "trainer.steps=8") == 0 and saved_by(whole)["global_step"] == 8
    assert f"measured before is kept in {whole / 'draft-1'}" in capsys.readouterr().out
    assert (whole / "draft-1" / "report.json").exists() and not (whole / "draft" / "report.json").exists()
    assert quick(place, "whole") == 1 and "trainer.steps=8 (now 6)" in capsys.readouterr().err


def test_checkpoints_are_saved_by_time_unless_a_validation_saves_one(tmp_path: Path) -> None:
    saved: list[int] = []
    keeper = Keeper(tmp_path / "last.ckpt", 0.0, Signals())
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(total_batch_idx=0))
    trainer: Any = SimpleNamespace(world_size=1, should_stop=False, val_check_batch=4, fit_loop=loop)
    trainer.save_checkpoint = lambda path: saved.append(loop.epoch_loop.total_batch_idx)
    for index in range(8):
        loop.epoch_loop.total_batch_idx = index
        keeper.on_train_batch_end(trainer, None, None, {"group": (index % 2, 2)}, index)
    assert saved == [1, 5]  # behind the second batch of a step; 3 and 7 are validated
    later = Keeper(tmp_path / "last.ckpt", 60.0, Signals())
    later.saved = keeper.saved
    later.on_train_batch_end(trainer, None, None, {}, 5)
    assert saved == [1, 5]


def test_a_second_signal_ends_at_once() -> None:
    child = os.fork()
    if not child:
        signals = Signals()
        signals.deferring = True
        signals(signal.SIGINT)
        signals(signal.SIGINT)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130


def test_a_second_interrupt_ends_the_process_without_a_traceback() -> None:
    """Also while it exits."""
    program = (
        "import atexit, os, signal, sys; signal.signal(2, signal.default_int_handler); "  # ignored behind `&`
        "import cotrain.cli as cli; stop = lambda *_: os.kill(os.getpid(), 2); "
        "cli._hydra = stop; sys.argv = ['cotrain', 'bench']; atexit.register(stop); sys.exit(cli.main())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "cotrain bench: interrupted; nothing of it is kept\n")
