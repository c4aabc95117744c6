"""What a user installs: the declared dependencies, the folders beside the code, the version."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cotrain import __version__
from cotrain.paths import folder
from inference.drafts.draft_folder import PROMPTS, load_tokenizer, read
from tests.project.test_walls import ARROWS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = ("cotrain", "inference")


def test_the_version_stands_in_one_place_and_heads_the_changelog() -> None:
    pages = [ROOT / name for name in ("pyproject.toml", "CITATION.cff", "README.md", "Makefile")]
    assert not [page.name for page in pages if re.search(rf"(?<![\d.=]){re.escape(__version__)}", page.read_text())]
    heads = re.findall(r"^## \[(.+)\] - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == __version__


def test_shipped_drafts_are_whole_and_small() -> None:
    for place in (ROOT / "data" / "drafts").glob("*/"):
        assert read(place).metadata is not None and load_tokenizer(place) is not None
        assert (place / "README.md").is_file() and (place / PROMPTS).is_file(), place
        assert sum(file.stat().st_size for file in place.rglob("*")) <= 25 * 2**20


def test_the_packed_folder_wins(tmp_path: Path) -> None:
    for place in ("conf", "cotrain/_conf"):
        (tmp_path / place).mkdir(parents=True)
    assert folder("conf", tmp_path / "cotrain") == tmp_path / "cotrain/_conf"


def test_a_missing_folder_names_both_places(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cotrain/_data nor .*/data exists"):
        folder("data", tmp_path / "cotrain")


def distribution(requirement: str) -> str:
    """The normalised name at the head of a requirement."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def test_every_import_is_declared() -> None:
    roots = {
        "hydra": "hydra-core",
        "huggingface_hub": "huggingface-hub",
        **dict.fromkeys((*PACKAGES, *sys.stdlib_module_names), ""),
    }
    lazy = {
        "gguf",
        "peft",
        "triton",
        "vllm",
        "vllm_repair",
        "wandb",
    }  # imported where asked for, never needed; the last is a file
    names = {name.partition(".")[0] for names in ARROWS.values() for name in names}
    used = {roots.get(name, name) for name in names} - {""}
    assert used - lazy <= {distribution(requirement) for requirement in PROJECT["dependencies"]}


def test_every_dependency_names_a_user_that_exists() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    rows = re.findall(r'^    "([a-z][\w-]*)[^"]*", *# (.*)$', text, re.MULTILINE)
    extras = [requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra]
    assert [name for name, _ in rows] == [distribution(r) for r in (*PROJECT["dependencies"], *extras)]
    for name, comment in rows:
        paths = re.findall(r"[\w./]+/[\w./]*", comment)
        assert paths or "make " in comment, f"{name}: the comment names no user"
        assert [path for path in paths if not (ROOT / path).exists()] == [], name


def test_constraints_pin_what_is_declared() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for requirement in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]):
        declared = Requirement(requirement)
        assert declared.specifier.contains(pins[distribution(requirement)]), requirement
