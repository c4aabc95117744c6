"""Weights & Biases beside TensorBoard, on a look-alike of its package that keeps what it is told."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import wandb as lightning_wandb

from cotrain.board import curves, tags
from cotrain.config.groups import Trainer
from cotrain.config.settings import TrainConfig
from tests.cotrain.commands.test_train import events_of, job, place  # noqa: F401 - a fixture


class Run:
    """One run: its settings, figures in order, and how it ended."""

    def __init__(self, **asked: Any) -> None:
        self.asked, self.name, self.id = asked, asked["name"], asked["id"]
        self.logged: list[dict[str, float]] = []
        self.settings: dict[str, Any] = {}
        self.config = SimpleNamespace(update=lambda result, allow_val_change: self.settings.update(result))
        self.ended: int | None = None

    def log(self, figures: dict[str, float]) -> None:
        self.logged.append(figures)

    def define_metric(self, name: str, **_: Any) -> None:
        pass

    def finish(self, exit_code: int = 0) -> None:
        self.ended = exit_code


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands where the package would: `runs` are those that were begun."""
    package, library, runs = ModuleType("wandb"), ModuleType("wandb.sdk.lib"), list[Run]()

    class Error(Exception):
        """The package's own."""

    def init(**asked: Any) -> Run:
        runs.append(Run(**asked))
        return runs[-1]

    package.__spec__ = ModuleSpec("wandb", None)
    vars(package).update(init=init, run=None, Error=Error, runs=runs)
    vars(library).update(RunDisabled=type("RunDisabled", (), {}))
    run_module = ModuleType("wandb.wandb_run")
    vars(run_module).update(Run=Run)
    parts = {
        "wandb": package,
        "wandb.sdk": ModuleType("wandb.sdk"),
        "wandb.sdk.lib": library,
        "wandb.wandb_run": run_module,
    }
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(lightning_wandb, "_WANDB_AVAILABLE", True)
    return package


def test_wandb_gets_the_curves_of_tensorboard(
    place: Path,  # noqa: F811
    wandb: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    settings = "measure=false rollout.temperatures=[1.0] trainer.validations=1 trainer.corpus_steps=0".split()
    assert job(place, "watched", "trainer.logger=wandb", "label=mine", *settings) == 0
    (run,) = wandb.runs
    assert (run.asked["project"], run.name, run.ended) == ("cotrain", "mine", 0)
    assert run.settings["optimizer"]["lr"] > 0 and run.settings["trainer"]["logger"] == "wandb"
    result = {(name, int(row["trainer/global_step"])): value for row in run.logged for name, value in row.items()}
    events = events_of(place / "watched")
    for name in (tags.ACCEPTANCE, tags.LOSS, tags.RATE, "4_held_out/acceptance_T1"):
        curve = {(name, event.step): event.value for event in events.Scalars(name)}
        assert curve and all(result[place] == pytest.approx(value, rel=1e-5) for place, value in curve.items())
    assert result["8_final/acceptance", 5] > 0


def test_a_resumed_run_is_the_same_one_and_a_failed_one_says_so(tmp_path: Path, wandb: Any) -> None:
    built = TrainConfig(trainer=Trainer(logger="wandb"))
    with pytest.raises(KeyboardInterrupt), curves.other_loggers(built, tmp_path):
        raise KeyboardInterrupt
    with curves.other_loggers(built, tmp_path):
        pass
    first, second = wandb.runs
    assert first.id == second.id and (first.ended, second.ended) == (1, 0)
    assert first.asked["resume"] == "allow" and first.name == tmp_path.name


def test_a_run_that_the_service_rejects_is_an_error_of_one_line(
    place: Path,  # noqa: F811
    wandb: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rejected(**_: Any) -> Run:
        raise wandb.Error("api_key not configured\n(no-tty)")

    wandb.init = rejected
    assert job(place, "refused", "trainer.logger=wandb") == 1
    said = capsys.readouterr().err
    assert said == (
        "cotrain train: trainer.logger=wandb: api_key not configured (no-tty); log in with `wandb login`, or set "
        "WANDB_MODE=offline\n"
    )


def test_a_missing_package_is_named_before_files_are_written(
    place: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("cotrain.training.preconditions.find_spec", lambda name: None)
    assert job(place, "none", "trainer.logger=wandb") == 1
    assert capsys.readouterr().err == "cotrain train: trainer.logger=wandb: it needs wandb: pip install wandb\n"
    assert not (place / "none").exists()
