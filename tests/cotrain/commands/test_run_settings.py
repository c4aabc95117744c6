"""At every moment `run.json` says the settings that the run is made with: what is killed is resumed as what it was."""

import json
from pathlib import Path
from typing import Any

import pytest

from cotrain.run_folder import claim

OLD: dict[str, Any] = {"trainer": {"steps": 4}, "label": "a", "optimizer": {"lr": 0.1}}
LONGER = OLD | {"trainer": {"steps": 9}}
RENAMED = OLD | {"label": "b"}


def judge(key: str, old: object, new: object) -> str:
    return {"trainer.steps": "longer", "label": "free"}.get(key, "other")


def written(path: Path) -> dict[str, Any]:
    marker = json.loads((path / "run.json").read_text(encoding="utf-8"))
    return {"settings": marker["settings"], "state": marker["state"]}


@pytest.mark.parametrize("end", ["finished", "killed"])
@pytest.mark.parametrize(
    ("settings", "overwrite"),
    [
        (OLD, False),
        (LONGER, False),
        (RENAMED, False),
        (LONGER | {"label": "b"}, False),
        ({"optimizer": {"lr": 9}}, True),
    ],
    ids=["same", "longer", "renamed", "longer and renamed", "replaced"],
)
def test_what_is_killed_has_left_its_settings(settings: Any, overwrite: bool, end: str, tmp_path: Path) -> None:
    with claim(tmp_path, settings=OLD, kind=judge) as run:  # type: ignore[arg-type]
        (tmp_path / "work").write_text("done")
        assert written(tmp_path) == {"settings": OLD, "state": "unfinished"}
        if end == "finished":
            run.finish()
    with claim(tmp_path, overwrite, settings, judge) as run:  # type: ignore[arg-type]
        if run.state == "finished":
            assert settings in (OLD, RENAMED) and written(tmp_path)["settings"] == OLD  # its figures are of these
        else:
            assert written(tmp_path) == {"settings": settings, "state": "unfinished"}  # what a kill leaves
