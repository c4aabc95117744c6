"""Which changed settings continue a run and which make another."""

import json
from functools import partial
from pathlib import Path

import pytest

from cotrain.config.changes import change
from cotrain.config.drafts import DRAFTS
from cotrain.errors import UserError
from cotrain.run_folder import MARKER, refuse_folder
from tests.settings import composed, typed

EARLIER = Path(__file__).parent / "earlier_run.json"  # a marker of a version whose drafts all had all settings, by kind


@pytest.mark.parametrize("kind", json.loads(EARLIER.read_text())["drafts"])
def test_a_run_that_an_earlier_version_began_goes_on(kind: str, tmp_path: Path) -> None:
    stored = json.loads(EARLIER.read_text())
    stored["settings"]["draft"] = stored.pop("drafts")[kind]
    (tmp_path / MARKER).write_text(json.dumps(stored))
    settings = typed(composed(), f"draft.kind={kind}").model_dump(exclude={"output", "overwrite", "check", "overfit"})
    settings["target"]["weights"] = stored["settings"]["target"]["weights"]
    means = partial(change, draft=DRAFTS[kind])
    assert refuse_folder(tmp_path, settings=settings, kind=means) == "unfinished"
    settings["trainer"]["seed"] = 1
    with pytest.raises(UserError, match=r"has a run with trainer.seed=0 \(now 1\): name another"):
        refuse_folder(tmp_path, settings=settings, kind=means)
