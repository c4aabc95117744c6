"""Kinds that draft with the target in fewer bits, through `cotrain train`, `bench`, `generate`, `export` and the
page."""

import json
from pathlib import Path

import pytest

from cotrain.cli import main
from cotrain.config.groups import Init
from cotrain.students.base import student_class
from inference import Engine, Sampling, load
from inference.proposers.quantised import Quantised
from inference.proposers.two_levels import TwoLevels
from inference.report.build import validate
from tests.cotrain.commands.test_train import BENCH, job
from tests.cotrain.commands.test_train import quickly as quickly  # a fixture
from tests.draft_folders import bare, draft_folder
from tests.folders import network, target_and_texts


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, own texts, a small draft and one that reads the target."""
    place = target_and_texts(tmp_path_factory.mktemp("levels"))
    draft_folder(place / "small", place / "target", "independent")
    for kind in ("medusa", "early_exit", "retrieval"):
        draft_folder(place / kind, place / "target", kind)
    return place


@pytest.mark.parametrize(("bits", "name"), [(4, "nf4"), (8, "int8")])
def test_bits_and_guesses_are_those_that_are_asked_for(bits: int, name: str, place: Path) -> None:
    target = network()
    for kind in ("quantised", "two_levels"):
        path = str(place / "small") if kind == "two_levels" else None
        asked = bare(kind, bits=bits, **({"inner": 2, "path": path} if path else {}))
        made = student_class(kind).initial(asked, Init(kind="scratch", layers=[]), target)
        proposer = student_class(kind)(made, target).proposer()
        assert isinstance(proposer, TwoLevels if path else Quantised)
        assert (proposer.model if isinstance(proposer, TwoLevels) else proposer).bits == name
        assert getattr(proposer, "guesses", 2) == 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "bits", "name"),
    [pytest.param("quantised", 4, "nf4", marks=pytest.mark.thorough), ("two_levels", 8, "int8")],
)
def test_bits_reach_every_command(
    kind: str, bits: int, name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What draft.bits= says is what is measured, kept, loaded and decoded with; no engine is given it."""
    output = f"{kind}{bits}"
    named = [f"draft.path={place / 'small'}", "draft.inner=2"] if kind == "two_levels" else []
    assert job(place, output, f"draft={kind}", f"draft.bits={bits}", "rollout.temperatures=[1.0]", *named) == 0
    folder = place / output / "draft"
    report, config = (json.loads((folder / one).read_text()) for one in ("report.json", "config.json"))
    validate(report)
    assert report["exactness"]["passed"], report["exactness"]["lines"]
    assert (config if kind == "quantised" else config["two_levels"])["bits"] == name
    assert (place / output / "report.html").is_file() and report["extra"]["kind"] == kind
    engine = load(folder, rows=2)
    proposer = engine.proposer
    assert isinstance(proposer, TwoLevels if kind == "two_levels" else Quantised)
    found = proposer.model if isinstance(proposer, TwoLevels) else proposer
    assert found.bits == name and getattr(proposer, "guesses", 2) == 2
    settled = {"max_new_tokens": 16, "sampling": Sampling(temperature=0)}
    plain = Engine(engine.target.model, tokenizer=engine.tokenizer, rows=2)
    wanted = plain.generate(["0001 ", "on"], **settled)
    assert engine.generate(["0001 ", "on"], **settled).tokens == wanted.tokens
    capsys.readouterr()
    assert main(["generate", f"draft.path={folder}", "prompt=0001 ", "max_new_tokens=16", "regime=t0"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == (wanted.text or [""])[0].rstrip("\n")
    assert main(["export", f"draft.path={folder}", f"output={place / output}_export"]) == 1
    assert f"it loads no {kind} drafts; they are loaded by no engine of the table" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("draft=quantised quantisation=int8", "quantisation: draft=quantised rounds the target itself, but"),
        (
            "draft=two_levels draft.path=SMALL quantisation=nf4",
            "quantisation: draft=two_levels rounds the target itself",
        ),
        ("draft=two_levels", "draft.path=null: two_levels drafts with a small independent draft: name its folder"),
        ("draft=two_levels draft.path=SMALL draft.inner=null", "draft.inner=null: set how many tokens the small draft"),
        (
            "draft=two_levels draft.path=MEDUSA",
            "MEDUSA is of kind 'medusa', which drafts from the target's hidden "
            "states; two_levels needs one of kind independent instead",
        ),
        ("draft=two_levels draft.path=EXIT", "EXIT is of kind 'early_exit', which drafts from the target's hidden"),
        ("draft=two_levels draft.path=LOOKUP", "LOOKUP is of kind 'retrieval'; two_levels needs one of kind"),
        ("draft=two_levels draft.path=/nowhere", "draft.path: /nowhere is no model folder, and the hub"),
        ("draft=two_levels draft.path=BARE", "draft.path: BARE is no draft folder: it has no config.json"),
        ("draft=quantised draft.inner=3", "draft.inner=3: quantised drafts do not have it; they have draft."),
        (
            "draft=early_exit draft.layers=9",
            "draft.layers: the exit would be after 9 layers, but the target has 2: give 1 to 2",
        ),
    ],
)
def test_what_cannot_draft_is_refused_by_name(
    settings: str, message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is read or written. check=true refuses as runs do: `test_preconditions.py`."""
    places = {"SMALL": "small", "MEDUSA": "medusa", "EXIT": "early_exit", "LOOKUP": "retrieval", "BARE": "bare"}
    (place / "bare").mkdir(exist_ok=True)
    for word, name in places.items():
        settings, message = (text.replace(word, str(place / name)) for text in (settings, message))
    assert job(place, "none", *settings.split()) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (place / "none").exists()


def test_a_quantised_target_is_refused_before_it_is_loaded(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = draft_folder(place / "rounded", place / "target", "quantised")
    assert main(["bench", f"draft.path={folder}", *BENCH, "quantisation=int8", f"output={place / 'never'}"]) == 1
    said = "draft=quantised rounds the target itself, but the target is already in int8"
    assert said in capsys.readouterr().err
    assert not (place / "never").exists()
