"""overfit=true: a text is learnt until its drafts are accepted and the engine drafts so, or the run says otherwise."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from cotrain.cli import main
from cotrain.config.drafts import DRAFTS
from cotrain.students.heads import HydraStudent
from cotrain.students.independent import IndependentStudent
from cotrain.training import overfit
from cotrain.training.module import Distillation
from tests.folders import run_paths, target_and_texts
from tests.often import often


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = target_and_texts(tmp_path_factory.mktemp("overfit"), 60)
    return [
        *run_paths(place, "run"),
        *"data.block=64 rollout.prompt_tokens=8 rollout.new_tokens=6 overfit=true".split(),
    ]


# a large rate is enough for one short text; few depths keep heads smaller than this target
RATE = "optimizer.lr=0.01"
KINDS = {
    "independent": "init.layers=[0]",
    "conditioned": "init.layers=[0] draft.temperatures=[0.0,1.0]",
    "eagle": "init.layers=[0] draft.depths=2",
    "p_eagle": "init.layers=[0] draft.depths=2",
    "early_exit": "draft.layers=1 draft.depths=2",
    "block": "draft.depths=2",
    "parallel": "init.layers=[0] draft.depths=2",
    "medusa": "draft.depths=2",
    "hydra": "draft.depths=2",
    "hybrid": "init.layers=[0]",
    "hybrid_exit": "draft.layers=1 draft.depths=2",
}


def test_every_kind_that_learns_is_here() -> None:
    assert {*KINDS} == {kind for kind, one in DRAFTS.items() if one.trained}


@pytest.fixture(autouse=True)
def often_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few steps are needed that 20 more are dear."""
    monkeypatch.setattr(overfit, "EVERY", 10)


@pytest.mark.parametrize("kind", often(KINDS, {"eagle", "independent", "medusa"}.__contains__))
def test_every_kind_learns_its_text_and_drafts_so(
    kind: str, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's sizes are not used, and nothing is written to output=."""
    sizes = ["trainer.steps=1", "rollout.texts=9", "measure=true"]
    assert main(["train", *given, f"draft={kind}", *KINDS[kind].split(), RATE, *sizes]) == 0
    said = capsys.readouterr().out
    bar = 0.7 if kind == "medusa" else 0.95
    curve = [float(value) for value in re.findall(r"overfit: step \d+, acceptance (\S+)", said)]
    assert curve[-1] >= bar >= max(curve[:-1])  # they are rounded
    assert re.search(
        r"overfit: acceptance \S+ after \d+ steps on 1 texts, \d+ s: the draft learns what it is shown", said
    )
    assert not Path(given[2].partition("=")[2]).exists()
    assert ("its drafts in the engine give the same tau" in said) is not kind.startswith("hybrid")


SHIFTED: dict[
    str, tuple[Any, str, Any]
] = {  # a state late by one: each draft learns another position than the one at which it is served
    "independent": (
        IndependentStudent,
        "everywhere",
        lambda real, self, states, *rest: real(self, states.roll(1, 1), *rest),
    ),
    "hydra": (HydraStudent, "head_states", lambda real, *given: [states.roll(1, 1) for states in real(*given)]),
}


@pytest.mark.parametrize("kind", SHIFTED)
def test_a_draft_that_learns_for_another_position_is_an_error(
    kind: str, given: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, shifted = SHIFTED[kind]
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: shifted(real, *arguments))
    assert main(["train", *given, f"draft={kind}", *KINDS[kind].split(), RATE]) == 1
    said = capsys.readouterr()
    assert re.search(rf"in the engine its drafts give tau .* draft={kind} is not trained for the positions", said.err)


def test_a_draft_that_does_not_learn_is_an_error(
    given: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overfit, "STEPS", 4)
    monkeypatch.setattr(overfit, "EVERY", 2)
    assert main(["train", *given, "init.layers=[0]", "optimizer.lr=1e-9"]) == 1
    said = capsys.readouterr().err
    assert re.search(
        r"acceptance 0\.\d+ after 4 steps on 1 texts, .* and not 0.95: .* optimizer.lr=1e-09 does not fit", said
    )


def test_an_interrupted_try_does_not_say_that_it_goes_on(
    given: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    true = Distillation.on_validation_epoch_end

    def ends(self: Distillation) -> None:
        true(self)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Distillation, "on_validation_epoch_end", ends)
    assert main(["train", *given, "init.layers=[0]"]) == 130
    said = capsys.readouterr().err
    assert "interrupted; overfit=true keeps nothing" in said and "resumes" not in said


@pytest.mark.parametrize("wrong", ["draft=retrieval", "mode=joint", "objective=greedy_draft"])
def test_what_cannot_be_judged_so_is_refused(wrong: str, given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *given, wrong]) == 1
    assert "cotrain train: overfit=true: it is for a draft that is trained alone" in capsys.readouterr().err
