"""What the host of the code reads: the workflow beside `.ci/run`, forms for issues, the citation."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cotrain.cli import COMMANDS
from cotrain.config.overrides import quote
from tests.settings import composed

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[0-9]*.yml"))
# what GitHub takes: docs.github.com, "Syntax for GitHub's form schema"
ATTRIBUTES = {
    "markdown": {"value"},
    "input": {"label", "description", "placeholder", "value"},
    "textarea": {"label", "description", "placeholder", "value", "render"},
    "dropdown": {"label", "description", "options", "multiple", "default"},
}


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def scripts() -> list[str]:
    """Each `run` of the workflow, once for each entry of its matrix."""
    found = []
    for job in loaded(ROOT / ".github" / "workflows" / "ci.yml")["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            stages = matrix.get("stage", [""])
            found += [step["run"].replace("${{ matrix.stage }}", stage) for stage in stages if "run" in step]
    return found


def test_the_workflow_runs_the_stages_of_ci() -> None:
    made = {match for script in scripts() for match in re.findall(r"^make (\S+)", script, re.MULTILINE)}
    assert made == set(re.findall(r"^stage (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    for line in scripts():
        if line.startswith("make "):
            words = [word for word in shlex.split(line.replace("$TORCH_INDEX", "x")) if word != "make"]
            assert subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True).returncode == 0, line


def test_commands_of_the_workflow_compose() -> None:
    lines = [shlex.split(line) for script in scripts() for line in script.splitlines() if line.startswith("cotrain ")]
    names = [name for _, name, *_ in lines]
    assert names == ["--version", "train", "generate", "report"]
    for _, name, *settings in lines[1:]:
        assert name in COMMANDS
        composed(*quote(settings), command=name)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_that_github_takes(path: Path) -> None:
    form = loaded(path)
    assert form.keys() == {"name", "description", "labels", "body"}
    questions = [element for element in form["body"] if element["type"] != "markdown"]
    for element in form["body"]:
        assert element.keys() <= {"type", "id", "attributes", "validations"}
        assert {"label" if "id" in element else "value"} <= element["attributes"].keys() <= ATTRIBUTES[element["type"]]
        assert all(isinstance(text, str | list) and text for text in element["attributes"].values())
    ids = [element["id"] for element in questions]
    assert len(set(ids)) == len(ids) == len({element["attributes"]["label"] for element in questions})
    assert any("cotrain report issue=true" in element["attributes"]["label"] for element in questions)
    named = re.findall(r"`(docs/[\w.-]+)`", path.read_text(encoding="utf-8"))
    assert all((ROOT / name).is_file() for name in named)


def test_there_are_forms_for_bugs_speed_and_questions() -> None:
    assert [loaded(path)["labels"] for path in FORMS] == [["bug"], ["speed"], ["question"]]
    assert loaded(FORMS[0].parent / "config.yml") == {"blank_issues_enabled": False}


def test_the_citation_has_what_its_format_needs() -> None:
    citation = loaded(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() and citation["cff-version"] == "1.2.0"
    assert citation["authors"] == [{"name": "The cotrain developers"}] and citation["type"] == "software"
    assert citation["license"] == "Apache-2.0" and "version" not in citation  # which stands in cotrain/__init__.py
