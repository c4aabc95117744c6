"""The wheel and the sdist: what they hold, and that each runs where it is installed, away from the checkout.

`make dist` hands over what it has built (COTRAIN_DIST); without it both are built here.
"""

import email
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cotrain import __version__
from inference.report.build import validate

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1200)]
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cotrain", "inference")
INFORMATION = f"cotrain-{__version__}.dist-info"
BACKEND = "hatchling>=1.27"  # builds the sdist where it is installed
QUICK = """minutes=.5 trainer.steps=8 trainer.batch=2 rollout.temperatures=[1.0] policy.k=2 bench.minutes=0
bench.prompts=1 bench.quick_prompts=1 bench.prompt_tokens=8 bench.new_tokens=8
bench.parity_tokens=40 bench.depths=[2]""".split()  # the texts that are shipped stay, so that no corpus is read


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the wheel and the sdist, built without the network."""
    if "COTRAIN_DIST" in os.environ:
        return ROOT / os.environ["COTRAIN_DIST"]
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / f"cotrain-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    return built / f"cotrain-{__version__}.tar.gz"


def files(name: str, pattern: str = "*") -> set[str]:
    """Paths of the files under the checkout's folder `name`, relative to it."""
    found = (path for path in (ROOT / name).rglob(pattern) if path.is_file())
    return {path.relative_to(ROOT / name).as_posix() for path in found if "__pycache__" not in path.parts}


def closure(texts: list[str]) -> set[str]:
    """The distributions of these requirements and all that they require, by name."""
    names, todo = set[str](), [(text, "") for text in texts]
    while todo:
        text, extra = todo.pop()
        required = Requirement(text)
        if required.marker and not required.marker.evaluate({"extra": extra}):
            continue
        for one in required.extras or {""}:
            if f"{required.name}[{one}]" not in names:
                names.add(f"{required.name}[{one}]")
                todo += [(inner, one) for inner in distribution(required.name).requires or []]
    return {name.partition("[")[0] for name in names}


def environment(place: Path, requirements: list[str]) -> Path:
    """Make a virtual environment with links to what the requirements need, and no more. Return its python."""
    venv.create(place, symlinks=True)
    (site,) = place.glob("lib/python*/site-packages")
    for name in closure(requirements):
        of = distribution(name)
        for entry in {file.parts[0] for file in of.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / entry).exists():
                (site / entry).symlink_to(str(of.locate_file(entry)))
    return place / "bin" / "python"


def install(python: Path, file: Path) -> None:
    """Install a wheel or an sdist with pip, without the network."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    done = subprocess.run([*command, "--no-build-isolation", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def declared(wheel: Path) -> list[str]:
    """What the wheel says that it requires."""
    with zipfile.ZipFile(wheel) as archive:
        found = email.message_from_bytes(archive.read(f"{INFORMATION}/METADATA"))
    return found.get_all("Requires-Dist") or []


def run(python: Path, place: Path, *words: str) -> str:
    """Run `cotrain` of an environment in the folder `place`, which is no checkout. Return what it prints."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(python.parent / "cotrain"), *words]
    done = subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_packs_conf_and_data_inside_the_package_and_no_more(wheel: Path) -> None:
    assert wheel.stat().st_size < 60e6
    names = set(zipfile.ZipFile(wheel).namelist())
    assert files("conf") and files("data")
    expected = {f"cotrain/_conf/{path}" for path in files("conf")}
    expected |= {f"cotrain/_data/{path}" for path in files("data")}
    expected |= {f"{package}/{path}" for package in PACKAGES for path in files(package)}
    assert {name for name in names if not name.startswith(f"{INFORMATION}/")} == expected


def test_an_sdist_has_what_builds_and_tests_it_but_no_results(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        tops = {Path(name).parts[1] for name in archive.getnames()}
    needed = {*PACKAGES, "conf", "data", "docs", "tests", "pyproject.toml", "README.md", "LICENSE", "CITATION.cff"}
    assert tops >= needed
    assert not tops & {"outputs", ".ci", ".github", ".git", ".venv", "dist"}


def test_a_wheel_alone_runs_the_ten_minute_example(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "an environment", declared(wheel))
    install(python, wheel)
    place = tmp_path / "work"
    place.mkdir()
    assert run(python, place, "--version") == f"cotrain {__version__}\n"
    assert "cotrain NAME --help" in run(python, place, "--help")
    run(python, place, "train", "experiment=demo", *QUICK)
    found = json.loads((place / "outputs" / "demo" / "draft" / "report.json").read_text())
    validate(found)
    assert found["exactness"]["passed"] and found["environment"]["commit"] is None
    assert (place / "outputs" / "demo" / "report.html").stat().st_size > 1e5
    prompt = ("generate", "draft.path=outputs/demo/draft", "prompt=x =", "max_new_tokens=8")
    assert run(python, place, *prompt).strip()
    said = run(python, place, "report", "issue=true", "run=outputs/demo")
    assert f"cotrain {__version__}, installed; " in said and "exactness: passed" in said
    assert [path.name for path in place.iterdir()] == ["outputs"]


def test_an_installed_sdist_is_the_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", [BACKEND])
    install(python, sdist)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith("RECORD"):
                assert (site / name).read_bytes() == archive.read(name), name
    installed = {path.relative_to(site).as_posix() for top in PACKAGES for path in (site / top).rglob("*.*")}
    assert {name for name in installed if "__pycache__" not in name} <= set(zipfile.ZipFile(wheel).namelist())
    assert run(python, tmp_path, "--version") == f"cotrain {__version__}\n"


def test_a_wheel_finds_its_drafts_by_name(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site packages")
    packed = (tmp_path / "site packages" / "cotrain").resolve() / "_data" / "drafts"
    (packed / "another").mkdir(parents=True)
    (packed / "another" / "config.json").touch()
    names = [one.parent.name for one in packed.glob("*/config.json")]
    code = f"from cotrain.paths import draft_folder; print(*map(draft_folder, {names}), sep='\\n')"
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "site packages")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(packed / name) for name in names], done.stderr
