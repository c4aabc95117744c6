"""overfit=true: one text is learnt until its drafts are accepted, or the run says that they are not."""

import re
from pathlib import Path

import pytest

from cotrain.cli import main
from cotrain.training import overfit
from tests.folders import own_texts, target_folder


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("overfit")
    target_folder(place / "target")
    own_texts(place / "own.jsonl", 60)
    paths = [f"target.path={place / 'target'}", f"data.path={place / 'own.jsonl'}", f"output={place / 'run'}"]
    return [*paths, *"data.block=64 rollout.prompt_tokens=8 rollout.new_tokens=16 init.layers=[0] overfit=true".split()]


@pytest.mark.thorough
def test_a_draft_that_learns_ends_when_its_text_is_learnt(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The user's sizes are not used, and nothing is written to output=."""
    assert main(["train", *given, "trainer.steps=1", "rollout.texts=9", "measure=true"]) == 0
    said = capsys.readouterr().out
    curve = [float(value) for value in re.findall(r"overfit: step \d+, acceptance (\S+)", said)]
    assert curve[-1] >= 0.95 > max(curve[:-1])
    assert re.search(
        r"overfit: acceptance \S+ after \d+ steps on 1 texts, \d+ s: the draft learns what it is shown", said
    )
    assert not Path(given[2].partition("=")[2]).exists()


def test_a_draft_that_does_not_learn_is_an_error(
    given: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overfit, "STEPS", 4)
    monkeypatch.setattr(overfit, "EVERY", 2)
    assert main(["train", *given, "optimizer.lr=1e-9"]) == 1
    said = capsys.readouterr().err
    assert re.search(
        r"acceptance 0\.\d+ after 4 steps on 1 texts, .* and not 0.95: .* optimizer.lr=1e-09 does not fit", said
    )


@pytest.mark.parametrize("wrong", ["draft=retrieval", "mode=joint", "objective=greedy_draft"])
def test_what_cannot_be_judged_so_is_refused(wrong: str, given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    settings = given if wrong != "draft=retrieval" else [one for one in given if not one.startswith("init.")]
    assert main(["train", *settings, wrong]) == 1
    assert "cotrain train: overfit=true: it is for a draft that is trained alone" in capsys.readouterr().err
