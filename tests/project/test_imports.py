"""Imports point one way: `inference` ships and runs without `cotrain` and its libraries."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = {"cotrain", "lightning", "pytorch_lightning", "hydra", "omegaconf", "datasets"}
SCRIPTS = ("vllm_serve.py", "vllm_worker.py")  # run by path inside a vLLM installation
FILES = sorted((ROOT / "inference").rglob("*.py"))


def imported(source: str) -> set[str]:
    """Top-level names that `source` imports anywhere, inside functions and under conditions too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names


def test_the_walk_sees_every_form_of_import() -> None:
    source = "import a.b as c, d\nfrom e.f import g\nfrom . import h\ndef k():\n    if 1:\n        import l"
    assert imported(source) == {"a", "d", "e", "l"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_inference_names_no_training_library(path: Path) -> None:
    assert imported(path.read_text(encoding="utf-8")) & FORBIDDEN == set()


def test_importing_inference_loads_no_training_library() -> None:
    files = [path for path in FILES if path.name not in SCRIPTS]
    modules = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)
    code = f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert {"inference", "torch"} <= loaded
    assert loaded & FORBIDDEN == set()


def packages(path: Path) -> tuple[str, set[str]]:
    """The package of cotrain that a file is in, and those that it imports when it runs. The sequence losses' formulas
    are `cotrain.acceptance`, which is counted with them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = {part for node in ast.walk(tree) for part in of_cotrain(node)}
    own = path.relative_to(ROOT / "cotrain").parts[0].removesuffix(".py")
    return named(own), {named(part) for part in found} - {named(own)}


def of_cotrain(node: ast.AST) -> list[str]:
    if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("cotrain"):
        return []
    parts = str(node.module).split(".")
    found = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
    return [name for name in found if name != "__version__"]


def named(package: str) -> str:
    return "losses" if package == "acceptance" else package


def test_packages_of_cotrain_import_one_way() -> None:
    uses: dict[str, set[str]] = {}
    for path in (ROOT / "cotrain").rglob("*.py"):
        own, found = packages(path)
        uses.setdefault(own, set()).update(found)
    assert {"training", "data", "bench", "losses"} <= uses.keys() and "data" in uses["training"]
    order: list[str] = []
    while left := {name: found - set(order) for name, found in uses.items() if name not in order}:
        free = sorted(name for name, found in left.items() if not found)
        assert free, f"a circle among {left}"
        order += free
