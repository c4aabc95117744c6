"""Kinds with look-up, through `cotrain train` at tiny size: from a datastore and texts to a folder that decodes."""

import json
from pathlib import Path

import pytest

from cotrain.cli import main
from inference import Engine, Sampling, load
from inference.proposers.early_exit import EarlyExit
from inference.proposers.hybrid import Gate, Hybrid
from inference.proposers.retrieval import Retrieval
from inference.report.build import validate
from tests.cotrain.commands.test_train import job
from tests.folders import run_paths, target_and_texts
from tests.student_kinds import STUDENTS
from tests.tiny import tiny


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and own texts."""
    return target_and_texts(tmp_path_factory.mktemp("lookup"))


@pytest.fixture(scope="module")
def store(place: Path) -> Path:
    where = place / "store"
    assert main(["datastore", *run_paths(place, where), "overwrite=true"]) == 0
    return where


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["retrieval", "hybrid", "hybrid_exit", "hybrid_quantised"])
def test_kinds_with_look_up_are_trained_measured_and_served(kind: str, place: Path, store: Path) -> None:
    settings = (f"draft={kind}", f"draft.datastore={store}", "draft.shortest=1", "trainer.steps=2", "overwrite=true")
    assert job(place, kind, *settings) == 0
    folder = place / kind / "draft"
    report, config = (json.loads((folder / name).read_text()) for name in ("report.json", "config.json"))
    validate(report)
    assert report["exactness"]["passed"], report["exactness"]["lines"]
    engine = load(folder, rows=2)
    proposer = engine.proposer
    retrieval = proposer.retrieval if isinstance(proposer, Hybrid) else proposer
    assert isinstance(retrieval, Retrieval) and retrieval.shortest == 1
    assert retrieval.datastore.about.documents > 100
    if kind != "retrieval":
        assert proposer.gate == Gate.of_json(config["lookup"]["gate"]) != Gate.uncalibrated()
        assert len(proposer.gate.lookup[1][3]) == 2  # of the longest drafts that are timed
    greedy = {"max_new_tokens": 16, "sampling": Sampling(temperature=0)}
    plain = Engine(engine.target.model, tokenizer=engine.tokenizer, rows=2)
    assert engine.generate(["0001 ", "on"], **greedy).tokens == plain.generate(["0001 ", "on"], **greedy).tokens


def test_an_exit_beside_look_up_drafts_as_it_is_asked() -> None:
    student = STUDENTS["hybrid_exit"](tiny())
    drawn, likeliest = (student.proposer(greedy=greedy) for greedy in (False, True))
    assert isinstance(drawn.model, EarlyExit) and (drawn.greedy, likeliest.greedy) == (False, True)
    assert not drawn.shortens  # before its gate is counted


def test_a_folder_without_a_datastore_fails(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert job(place, "none", "draft=retrieval", f"draft.datastore={place / 'target'}") == 1
    assert "is no datastore" in capsys.readouterr().err and not (place / "none").exists()
