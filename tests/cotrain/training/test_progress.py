"""A budget of time: what training gets of it, when it ends, and how it is resumed."""

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from cotrain.cli import main
from cotrain.commands import train as commands
from cotrain.config.changes import change
from cotrain.evaluation.held_out import HeldOut
from cotrain.training import fit as fits
from cotrain.training import module as modules
from cotrain.training import progress as progresses
from cotrain.training.deadline import Deadline
from cotrain.training.module import Distillation
from cotrain.training.progress import Progress
from tests.cotrain.training.test_interrupts import quick, saved_by


def test_training_ends_with_its_minutes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that says a second a batch, and a hundred a validation, which do not count: of six seconds, three steps
    of two batches, and a validation at each half."""
    ticks, judged = count(), list[int]()
    monkeypatch.setattr(progresses, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    true = Distillation.judge

    def judge(self: Any) -> None:
        judged.append(self.global_step)
        for _ in range(100):
            next(ticks)
        true(self)

    monkeypatch.setattr(Distillation, "judge", judge)
    assert quick(place, "minutes", "trainer.minutes=0.1", "trainer.steps=1000") == 0
    checkpoint = saved_by(place / "minutes")
    assert checkpoint["global_step"] == 3 and judged == [0, 2, 3] and checkpoint["callbacks"]["Clock"]["elapsed"] == 6.0
    figures = json.loads((place / "minutes" / "held_out.json").read_text())
    assert figures["steps"] == 3  # of those that were taken, not of those asked for
    assert checkpoint["lr_schedulers"][0]["_last_lr"] == [pytest.approx(1e-3 * (1 - 5 / 6) / 0.4)] * 2
    assert main(["train", "target.path=nowhere", f"output={place / 'no'}", "trainer.minutes=0"]) == 1


@pytest.mark.thorough
def test_a_run_leaves_time_for_what_follows_its_training(
    place: Path,
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

    monkeypatch.setattr(progresses, "time", SimpleNamespace(monotonic=monotonic))
    for module in (fits, commands):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Distillation, "judge", judge)
    settings = "minutes=1.0 trainer.steps=1000 trainer.validations=1 measure=false".split()
    assert quick(place, "in time", *settings) == 0
    clock = saved_by(place / "in time")["callbacks"]["Clock"]
    assert 60 * clock["left"] == pytest.approx(40, abs=3)
    assert 60 * clock["left"] <= clock["elapsed"] <= 60 * clock["left"] + 2


BUDGET = {"trainer": {"minutes": None, "validations": 2}, "bench": {"minutes": 1.5}, "minutes": 10.0, "measure": True}


@pytest.mark.parametrize(
    ("settings", "minutes"),
    [
        ({}, 10 - 2 - 0.5 - 2 * 20 / 60 - 1.5),
        ({"bench": {"minutes": 0.25}}, 10 - 2 - 0.5 - 2 * 20 / 60 - 5 * 10 / 60),
        ({"measure": False}, 10 - 2 - 2 * 0.5),
        ({"trainer": {"minutes": 3.0, "validations": 2}}, 3),
        ({"trainer": {"minutes": 30.0, "validations": 2}}, 10 - 2 - 0.5 - 2 * 20 / 60 - 1.5),
        ({"minutes": 5.0}, 0.75),
        ({"minutes": None}, None),
        ({"minutes": None, "trainer": {"minutes": 3.0, "validations": 2}}, 3),
    ],
)
def test_training_has_what_the_rest_of_the_run_leaves(settings: dict[str, Any], minutes: float | None) -> None:
    """Two minutes are spent before the first step, twenty seconds of each validation on judging and ten on measuring.
    With a measurement one validation is afforded besides the first, without one both. A full measurement takes at least
    five of those at a checkpoint. Training has 15 % whatever else takes."""
    cfg: Any = OmegaConf.create(BUDGET | settings)
    progress = Progress(100, cfg.trainer.minutes, deadline=Deadline(cfg.minutes))
    if cfg.minutes:
        progress.deadline.left = progress.deadline.training(cfg, 120.0, 20.0, 10.0)
    assert progress.minutes == (minutes and pytest.approx(minutes))


def test_minutes_added_later_belong_to_the_training() -> None:
    progress = Progress(100, deadline=Deadline(20.0))
    progress.resume({"elapsed": 7.0, "left": 4.0, "whole": 10.0})
    assert (progress.elapsed, progress.minutes) == (7.0, 14.0)
    assert progress.state() == {"elapsed": 7.0, "left": 14.0, "whole": 20.0, "texts": None}
    without = Progress(100, 3.0)
    without.resume({"elapsed": 7.0, "left": 4.0, "whole": 10.0})
    assert without.minutes == 3.0 and change("minutes", 10.0, 20.0) == change("minutes", 10.0, None) == "longer"


def test_the_budget_of_training_and_of_the_run_both_limit_it() -> None:
    """Twice: a checkpoint's state is read by the run and by its clock. What is kept is what the run left, uncut."""
    capped = Progress(100, 5.0, deadline=Deadline(60.0, left=40.0))
    assert (capped.minutes, capped.state()["left"]) == (5.0, 40.0)
    for asked, minutes in ((20.0, 20.0), (60.0, 40.0), (None, 40.0)):
        progress = Progress(100, asked, deadline=Deadline(60.0))
        for _ in range(2):
            progress.resume({"elapsed": 300.0, "left": 40.0, "whole": 60.0})
        assert progress.minutes == minutes and progress.at(0) == pytest.approx(5 / minutes)


def test_as_many_validations_as_their_share_affords() -> None:
    cfg: Any = OmegaConf.create(BUDGET | {"trainer": {"minutes": None, "validations": 8}})
    assert [Deadline(10.0).validations(cfg, seconds) for seconds in (0.0, 1.0, 20.0, 60.0)] == [8, 8, 3, 1]
    assert Deadline().validations(cfg, 60.0) == 8


@pytest.mark.thorough
def test_a_judging_reads_the_texts_that_fit_its_share(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which a text takes three seconds. A judging may take 600 * 0.2 / 6 = 20 seconds: six texts; a run that
    is resumed judges as many, however slow its machine is now."""
    now, counts = [0.0], list[int]()
    true = modules.evaluate

    def evaluate(held: HeldOut, *rest: Any) -> Any:
        now[0] += 3.0 * len(held)
        counts.append(len(held))
        return true(held, *rest)

    monkeypatch.setattr(modules, "evaluate", evaluate)
    monkeypatch.setattr(modules, "time", SimpleNamespace(monotonic=lambda: now[0]))
    settings = """minutes=10.0 trainer.validations=1 rollout.held_out_texts=12 measure=false
    rollout.prompt_tokens=24""".split()
    assert quick(place, "judged", *settings, "trainer.steps=2") == 0
    texts = saved_by(place / "judged")["callbacks"]["Clock"]["texts"]
    first, timed, *validations = [count for count in counts if count > 1]  # points between validations are of one text
    assert (first, timed, texts, set(validations)) == (modules.FEW, modules.FEW, 6, {6})
    counts.clear()
    assert quick(place, "judged", *settings, "trainer.steps=4") == 0
    assert max(counts) == 6 and modules.FEW not in counts


def test_the_first_texts_warm_up_and_a_batch_is_timed_if_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: thirty seconds for the first texts, which compile, then a second a call and .01 a text. Where a
    batch fits the budget, the time of a text is that in a batch, else that among few; never that of the first ones."""
    now, calls = [0.0], list[int]()

    def on(held: Any) -> None:
        now[0] += (1.0 if calls else 30.0) + 0.01 * len(held)
        calls.append(len(held))

    monkeypatch.setattr(modules, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(modules, "within", lambda _, call: call())
    held = SimpleNamespace(spread=range)
    trainer = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda each: each))
    for budget, each, batches in ((20.0, 2.32 / 16, [4, 4, 4, 4, 16, 16]), (3.0, 2.08 / 4, [4, 4, 4, 4])):
        calls.clear()
        # two temperatures, whose texts are evaluated one after the other
        module: Any = SimpleNamespace(held_out={1.0: held, 0.5: held}, draft=None, on=on, trainer=trainer)
        start = now[0]
        assert Distillation._seconds_a_text(module, budget) == pytest.approx(each)
        assert calls == batches and module.trial == pytest.approx(now[0] - start)


def test_one_clock_decides_how_many_passes_every_process_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process, much slower by its own clock, follows the first: passes of a sharded draft are collective."""
    passes = []
    for slow in (1.0, 50.0):
        now, count = [0.0], [0]

        def on(held: Any, now: list[float] = now, count: list[int] = count, slow: float = slow) -> None:
            now[0] += slow * 0.1 * len(held)
            count[0] += 1

        monkeypatch.setattr(modules, "time", SimpleNamespace(monotonic=lambda now=now: now[0]))
        monkeypatch.setattr(modules, "within", lambda _, call: call())
        trainer = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda each: 0.1))  # of the first process
        module: Any = SimpleNamespace(held_out={1.0: SimpleNamespace(spread=range)}, draft=None, on=on, trainer=trainer)
        assert Distillation._seconds_a_text(module, 5.0) == 0.1
        passes.append(count[0])
    assert passes == [3, 3]
