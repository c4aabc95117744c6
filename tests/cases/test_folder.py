"""Cases of folders."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cotrain.cli import main
from cotrain.students.base import KINDS
from tests.cases import case
from tests.draft_folders import draft_folder
from tests.folders import target_folder

EVERY: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS} | {"eagle": {"vocabulary": 100, "head_rank": 8}}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target") / "target")


@pytest.mark.parametrize("kind", EVERY)
@case("own folders")
def test_a_folder_that_was_not_touched_passes_the_check(
    kind: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one that lacks a tensor does not."""
    folder = draft_folder(tmp_path / "draft", target, kind, **EVERY[kind])
    assert main(["export", f"check={folder}"]) == 0, capsys.readouterr().err
    weights = load_file(folder / "model.safetensors")
    if len(weights) > 1:  # some kinds have none, but for a constant
        dropped = max(weights, key=lambda key: weights[key].numel())
        save_file({key: one for key, one in weights.items() if key != dropped}, folder / "model.safetensors",
                  {"format": "pt"})  # fmt: skip
        assert main(["export", f"check={folder}"]) == 1
        assert f"tensor {dropped} is missing" in capsys.readouterr().err
