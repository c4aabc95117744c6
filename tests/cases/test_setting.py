"""Cases of settings that were read otherwise than they say."""

from pathlib import Path

import pytest

from cotrain.cli import main
from tests.cases import case
from tests.folders import target_folder


@case("layers of an eagle")
def test_layers_of_an_eagle_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = target_folder(tmp_path / "target")
    capsys.readouterr()  # progress of writing it
    for kind in ("eagle", "p_eagle"):
        typed = [f"target.path={target}", f"draft={kind}", "draft.layers=5", f"output={tmp_path / 'out'}"]
        assert main(["train", *typed]) == 1
        said = capsys.readouterr().err
        assert said == f"cotrain train: draft.layers=5: {kind} drafts do not have it; draft.layers=null\n"
    assert not (tmp_path / "out").exists()
