"""What `cotrain report issue=true` prints: versions, machine, settings and figures, and nothing of the user's."""

from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any, cast, get_args

import numpy
import pytest
import torch
from pydantic import ValidationError

from cotrain import __version__
from cotrain.cli import main
from cotrain.commands.report import changed
from cotrain.config.base import Settings
from cotrain.config.settings import SCHEMAS
from tests.pages import folder, full_report
from tests.settings import composed

SECRET = "acme"
# names of ours and formulas, which what reads them checks
OURS = """engine layout loss.first loss.then quantisation.kind trainer.precision trainer.strategy""".split()


def owners(schema: type[Settings], before: str = "") -> Iterator[tuple[str, type[Settings]]]:
    yield before, schema
    for name, field in schema.model_fields.items():
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, Settings):
                yield from owners(inner, f"{before}{field.alias or name}.")


def takes(owner: type[Settings], name: str, value: object) -> bool:
    try:
        owner.model_validate({name: value})
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("command", sorted(SCHEMAS))
def test_a_setting_that_takes_any_text_is_hidden(command: str) -> None:
    texts = (SECRET, [SECRET], {SECRET: SECRET}, {SECRET: 0.5})
    free = [
        (f"{before}{name}", value)
        for before, owner in owners(SCHEMAS[command])
        for name in owner.model_fields
        for value in texts
        if takes(owner, name, value)
    ]
    assert free
    for key, value in free:
        settings = reduce(lambda inner, group: {group: inner}, reversed(key.split(".")), cast(Any, value))
        assert key in OURS or changed(command, settings) == [f"{key}=(hidden)"], key


def test_an_issue_has_versions_settings_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = full_report(SECRET)
    report["settings"]["target"] = f"/home/me/{SECRET}"
    report["extra"] |= {"said": [], "moved": {"kl": 0.01, "original": SECRET}}
    settings = composed("draft=eagle", f"target.path=org/{SECRET}", f"label={SECRET}", "trainer.steps=7").model_dump()
    settings["data"] |= {"path": f"{SECRET}.jsonl", "shares": {SECRET: 0.25}}
    marker = {"cotrain": "0.0.9", "command": "train", "state": "unfinished", "settings": settings}
    path = folder(tmp_path / "run", report, run=marker)
    assert main(["report", "issue=true", f"run={path}"]) == 0
    said = capsys.readouterr().out
    assert SECRET not in said and not (tmp_path / "run" / "report.html").exists()
    assert f"cotrain {__version__}, " in said and f"torch {torch.__version__}, " in said
    assert f"numpy {numpy.__version__}," in said
    assert "run of cotrain train 0.0.9, unfinished" in said
    assert "draft.kind=eagle" in said and "trainer.steps=7" in said and "data.shares=(hidden)" in said
    assert "verdict: faster, 2.13x [1.87, 2.46]" in said and "(c) acceptance at depth 1: 0.8571" in said


def test_an_issue_needs_no_run_and_writes_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "issue=true"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["report", "issue=true", f"page={tmp_path}/page.html"]) == 1
    assert "page.html: issue=true writes no page" in capsys.readouterr().err
