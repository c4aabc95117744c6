"""What a user installs: the wheel's contents, the declared dependencies, the folders beside the code."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout, built without the network."""
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("*.whl")
    return built


def files(name: str, pattern: str = "*") -> set[str]:
    """Paths of the files under the checkout's folder `name`, relative to it."""
    found = (path for path in (ROOT / name).rglob(pattern) if path.is_file())
    return {path.relative_to(ROOT / name).as_posix() for path in found if "__pycache__" not in path.parts}


@pytest.mark.thorough
def test_wheel_packs_conf_and_data_inside_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert files("conf") and files("data")
    expected = {f"cotrain/_conf/{path}" for path in files("conf")}
    expected |= {f"cotrain/_data/{path}" for path in files("data")}
    expected |= {f"{package}/{path}" for package in PACKAGES for path in files(package, "*.py")}
    assert expected - names == set()
    information = f"cotrain-{__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, information}


@pytest.mark.thorough
def test_wheel_finds_its_folders_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site packages")
    code = "from cotrain.paths import folder; print(folder('conf')); print(folder('data'))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site packages")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    package = (tmp_path / "site packages" / "cotrain").resolve()
    assert done.stdout.split("\n")[:2] == [str(package / "_conf"), str(package / "_data")]


@pytest.mark.thorough
def test_wheel_finds_its_drafts_by_name(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site packages")
    packed = (tmp_path / "site packages" / "cotrain").resolve() / "_data" / "drafts"
    (packed / "another").mkdir(parents=True)
    (packed / "another" / "config.json").touch()
    names = [one.parent.name for one in packed.glob("*/config.json")]
    code = f"from cotrain.paths import draft_folder; print(*map(draft_folder, {names}), sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site packages")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(packed / name) for name in names], done.stderr


def test_shipped_drafts_are_whole_and_small() -> None:
    for place in (ROOT / "data" / "drafts").glob("*/"):
        assert read(place).metadata is not None and load_tokenizer(place) is not None
        assert (place / "README.md").is_file() and (place / PROMPTS).is_file(), place
        assert sum(file.stat().st_size for file in place.rglob("*")) <= 25 * 2**20


def test_the_packed_folder_wins(tmp_path: Path) -> None:
    for place in ("conf", "cotrain/_conf"):
        (tmp_path / place).mkdir(parents=True)
    assert folder("conf", tmp_path / "cotrain") == tmp_path / "cotrain/_conf"


def test_the_checkout_folder_is_found_beside_the_package() -> None:
    assert folder("conf") == ROOT / "conf"


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
