"""Fractions of a training and its budget of time, signals, checkpoints by time, and runs that go on."""

import json
import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from cotrain.cli import main
from cotrain.commands import train as commands
from cotrain.config.resume import kind
from cotrain.training import clock as clocks
from cotrain.training import fit as fits
from cotrain.training import job as jobs
from cotrain.training import progress as schedules
from cotrain.training import run_budget, training_bar
from cotrain.training.interrupts import Keeper, Signals
from cotrain.training.module import Distillation
from cotrain.training.progress import Progress, trapezoid
from tests.cotrain.commands.test_train import job, place  # noqa: F401 - a fixture

QUICK = ("measure=false", "rollout.temperatures=[1.0]", "trainer.corpus_steps=0", "trainer.accumulate=2")
LAST = Path("checkpoints") / "last.ckpt"


def rates(steps: int, warmup: float, decay: float, seconds: float = 0.0) -> list[float]:
    """Of every step, each of which takes so many seconds of a budget of a minute."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    progress = Progress(steps, 1.0 if seconds else None)
    schedule, found = trapezoid(optimizer, progress, warmup, decay), []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        progress.elapsed += seconds
        schedule.step()
    return found


def test_warm_up_and_decay_are_fractions_of_any_length() -> None:
    assert rates(10, 0.4, 0.3) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 2 / 3, 1 / 3])
    for steps in (10, 200, 2300):
        assert max(rates(steps, 0.02, 0.5)) == 1
    assert rates(4, 0.0, 0.0) == [1, 1, 1, 1]


def test_a_budget_of_time_ends_the_schedule_with_it() -> None:
    found = rates(1000, 0.0, 0.5, seconds=6.0)  # ten steps a minute
    assert found[:11] == pytest.approx([1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0]) and not any(found[11:])
    assert rates(4, 0.0, 0.5, seconds=6.0) == pytest.approx([1, 1, 1, 0.5])  # steps are the nearer end
    assert Progress(100, 1.0, 30.0).expected(10) == 20 and Progress(100).expected(10) == 100


@pytest.mark.parametrize(
    ("warmup", "decay", "said"),
    [(50, 0.5, "warmup: .* 50 of 200 steps are optimizer.warmup=0.25"), (0.1, -1, "optimizer.decay: .* not -1")],
)
def test_steps_are_no_fractions(warmup: float, decay: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        schedules.refuse(warmup, decay, 200)


def test_only_what_changes_weights_makes_another_run() -> None:
    assert {kind(key, 1, 2) for key in ("label", "bench.rows", "trainer.validations", "trainer.threads")} == {"free"}
    assert {kind(key, 1, 2) for key in ("optimizer.lr", "trainer.batch", "data.path")} == {"other"}
    assert {kind(key, 1, 2) for key in ("policy.k", "objective", "verify")} == {"other"}  # what ranks checkpoints
    assert [kind("trainer.steps", *pair) for pair in ((5, 8), (8, 5))] == ["longer", "other"]
    minutes = ((1.0, 2.0), (1.0, None), (None, 1.0))
    assert [kind("trainer.minutes", *pair) for pair in minutes] == ["longer", "longer", "other"]
    assert {kind(key, 1, 2, rounds=2) for key in ("trainer.steps", "trainer.validations")} == {"other"}


def quick(place: Path, output: str, *settings: str) -> int:  # noqa: F811
    return job(place, output, *QUICK, f"rollout.folder={place / 'quick texts'}", "trainer.steps=6", *settings)


def kept(folder: Path) -> dict[str, Any]:
    return torch.load(folder / LAST, weights_only=True)


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:  # noqa: F811
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
    place: Path,  # noqa: F811
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun: list[tuple[int, int]] = []
    true = training_bar.Bar.on_train_start

    def noted(self: Any, *arguments: Any) -> None:
        true(self, *arguments)
        begun.append((self.display.begun, self.display.done))

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(training_bar.Bar, "on_train_start", noted)
        at(patch, Distillation, "learn", lambda module: module.global_step == 1, signal.SIGTERM)
        assert quick(place, "stopped") == 143
    assert "cotrain train: interrupted at step 2, kept; the same command resumes" in capsys.readouterr().err
    assert kept(place / "stopped")["global_step"] == 2
    with monkeypatch.context() as patch:
        patch.setattr(training_bar.Bar, "on_train_start", noted)
        at(patch, Distillation, "judge", lambda module: module.global_step == 3, signal.SIGINT)
        assert quick(place, "stopped") == 130
    assert "interrupted at step 3, kept" in capsys.readouterr().err
    assert begun == [(0, 0), (2, 2)]
    assert quick(place, "stopped", "label=other", "bench.prompts=3") == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    ours, theirs = kept(place / "stopped"), kept(whole)
    assert ours["global_step"] == theirs["global_step"] == 6
    assert all(torch.equal(value, theirs["state_dict"][name]) for name, value in ours["state_dict"].items())


def test_a_finished_run_is_made_longer_and_no_other(
    place: Path,  # noqa: F811
    whole: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert quick(place, "whole", "optimizer.lr=0.5", "label=x") == 1
    said = capsys.readouterr().err
    assert "optimizer.lr=0.001 (now 0.5)" in said and "label" not in said
    assert quick(place, "whole", "label=x") == 0 and "label came too late" in capsys.readouterr().out
    assert quick(place, "whole", "trainer.steps=8") == 0 and kept(whole)["global_step"] == 8
    assert quick(place, "whole") == 1 and "trainer.steps=8 (now 6)" in capsys.readouterr().err


def test_training_ends_with_its_minutes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A clock that says a second a batch, and a hundred a validation, which do not count: of six seconds, three steps
    of two batches, and a validation at each half."""
    ticks, judged = count(), list[int]()
    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    true = Distillation.judge

    def judge(self: Any) -> None:
        judged.append(self.global_step)
        for _ in range(100):
            next(ticks)
        true(self)

    monkeypatch.setattr(Distillation, "judge", judge)
    assert quick(place, "minutes", "trainer.minutes=0.1", "trainer.steps=1000") == 0
    found = kept(place / "minutes")
    assert found["global_step"] == 3 and judged == [0, 2, 3] and found["callbacks"]["Clock"]["elapsed"] == 6.0
    figures = json.loads((place / "minutes" / "held_out.json").read_text())
    assert figures["steps"] == 3  # of those that were taken, not of those asked for
    assert found["lr_schedulers"][0]["_last_lr"] == [pytest.approx(1e-3 * (1 - 5 / 6) / 0.4)] * 2
    assert main(["train", "target.path=nowhere", f"output={place / 'no'}", "trainer.minutes=0"]) == 1


def test_a_run_leaves_time_for_what_comes_behind_its_training(
    place: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that says a second a batch and ten a validation. The run has 60 seconds: ten were spent before the first
    step, and one validation follows; training has 60 - 10 - 10, up to ticks between."""
    now, true = [0.0], Distillation.judge

    def monotonic() -> float:
        now[0] += 1.0
        return now[0]

    def judge(self: Any) -> None:
        now[0] += 10.0
        true(self)

    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(fits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(commands, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Distillation, "judge", judge)
    settings = ("minutes=1.0", "trainer.steps=1000", "trainer.validations=1", "measure=false")
    assert quick(place, "in time", *settings) == 0
    clock = kept(place / "in time")["callbacks"]["Clock"]
    assert 60 * clock["left"] == pytest.approx(40, abs=3)
    assert 60 * clock["left"] <= clock["elapsed"] <= 60 * clock["left"] + 2


BUDGET = {"trainer": {"minutes": None, "validations": 2}, "bench": {"minutes": 1.5}, "minutes": 10.0, "measure": True}


@pytest.mark.parametrize(
    ("settings", "minutes"),
    [
        ({}, 10 - 2 - 4.5 * 0.5 - 1.5),
        ({"measure": False}, 10 - 2 - 2 * 0.5),
        ({"trainer": {"minutes": 3.0, "validations": 2}}, 3),
        ({"trainer": {"minutes": 30.0, "validations": 2}}, 10 - 2 - 4.5 * 0.5 - 1.5),
        ({"minutes": 5.0}, 1),
        ({"minutes": None}, None),
        ({"minutes": None, "trainer": {"minutes": 3.0, "validations": 2}}, 3),
    ],
)
def test_training_has_what_the_rest_of_the_run_leaves(settings: dict[str, Any], minutes: float | None) -> None:
    """Two minutes are spent before the first step, half of one on each validation; a fifth is the training's whatever
    else takes."""
    cfg: Any = OmegaConf.create(BUDGET | settings)
    progress = Progress(100, cfg.trainer.minutes, whole=cfg.minutes)
    if cfg.minutes:
        progress.leave(run_budget.left_of(cfg, 120.0, 30.0))
    assert progress.minutes == (minutes and pytest.approx(minutes))


def test_minutes_that_a_run_is_given_later_are_its_training_s() -> None:
    progress = Progress(100, whole=20.0)
    progress.resume({"elapsed": 7.0, "left": 4.0, "whole": 10.0})
    assert (progress.elapsed, progress.minutes) == (7.0, 14.0)
    assert progress.state() == {"elapsed": 7.0, "left": 14.0, "whole": 20.0}
    without = Progress(100, 3.0)
    without.resume({"elapsed": 7.0, "left": 4.0, "whole": 10.0})
    assert without.minutes == 3.0 and kind("minutes", 10.0, 20.0) == kind("minutes", 10.0, None) == "longer"


def test_a_raised_budget_of_training_counts_beside_the_run_s() -> None:
    """Twice: a checkpoint's state is read by the run and by its clock. What is kept is what the run left, uncut."""
    capped = Progress(100, 5.0, whole=60.0)
    capped.leave(40.0)
    assert (capped.minutes, capped.state()["left"]) == (5.0, 40.0)
    for asked, minutes in ((20.0, 20.0), (60.0, 40.0), (None, 40.0)):
        progress = Progress(100, asked, whole=60.0)
        for _ in range(2):
            progress.resume({"elapsed": 300.0, "left": 40.0, "whole": 60.0})
        assert progress.minutes == minutes and progress.at(0) == pytest.approx(5 / minutes)


def test_minutes_that_measuring_takes_alone_are_refused() -> None:
    cfg: Any = OmegaConf.create(BUDGET | {"bench": {"minutes": 9.0}, "rollout": {"rounds": 1}})
    with pytest.raises(ValueError, match="minutes: 10, of which bench.minutes=9 leaves training less than a fifth"):
        run_budget.refuse(cfg)
    cfg.measure = False
    run_budget.refuse(cfg)


def test_checkpoints_are_kept_by_time_but_where_a_validation_keeps_one(tmp_path: Path) -> None:
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
