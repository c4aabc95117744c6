"""What the documents tell a reader to type: every `cotrain` command composes, every file they name is there."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotrain.cli import COMMANDS
from cotrain.config.drafts import DRAFTS, OF_KINDS
from cotrain.config.overrides import quote
from cotrain.students.base import KINDS
from tests.settings import composed

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LAUNCHERS = ("torchrun", "srun")


def fenced(page: Path) -> list[str]:
    """Lines of code blocks, continuations joined, comments left out."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def typed(page: Path) -> Iterator[list[str]]:
    """NAME and settings of each `cotrain NAME key=value ...` in a code block, its launcher left out."""
    for line in fenced(page):
        if not re.match(rf"(\S*cotrain|{'|'.join(LAUNCHERS)})\s", line):
            continue
        words = shlex.split(line)
        places = [i for i, word in enumerate(words) if word.endswith("cotrain")]
        yield words[places[-1] + 1 :]


COMMAND_LINES = [(page.name, words) for page in PAGES for words in typed(page)]


@pytest.mark.parametrize(("page", "words"), COMMAND_LINES, ids=[f"{p}: {' '.join(w)}" for p, w in COMMAND_LINES])
def test_a_command_of_the_documents_composes(page: str, words: list[str]) -> None:
    command, *settings = words
    assert command in COMMANDS
    settings = [re.split(r",(?![^[]*\])", setting)[0] for setting in settings if setting != "-m"]
    composed(*quote(settings), command=command)


def test_the_main_pages_hold_commands() -> None:
    assert {"README.md", "choosing.md", "engines.md", "distributed.md"} <= {page for page, _ in COMMAND_LINES}


@pytest.mark.parametrize("key", sorted(OF_KINDS))
def test_a_row_that_names_kinds_names_all_that_take_its_setting(key: str) -> None:
    rows = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8").splitlines()
    for row in rows:
        named = set(re.findall(r"`(\w+)`", row)) & KINDS.keys()
        if row.startswith(f"| `draft.{key}=") and named:
            assert named == {kind for kind in KINDS if key in DRAFTS[kind].model_fields}


def test_the_site_has_each_page_once() -> None:
    named = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(ROOT)) for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert not [link for link in links if not (page.parent / link).exists()]
    tops = "outputs/results|inference|cotrain|tests|conf|data"
    named = re.findall(rf"`((?:{tops})/[\w./-]+\.(?:json|py|yaml|md|svg|txt))`", text)
    assert not [name for name in named if not (ROOT / name).exists()]
    reports = re.findall(r"`(\w+\.json)`", text)
    known = {path.name for path in ROOT.glob("outputs/results/*.json")} | {"report.json", "cotrain.json", "config.json"}
    known |= {"generation_config.json"}
    assert not [name for name in reports if name not in known]
    modules = re.findall(r"python -m (tests\.[\w.]+)", text.replace("\n", " "))
    assert not [name for name in modules if not (ROOT / (name.replace(".", "/") + ".py")).is_file()]
