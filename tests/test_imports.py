"""Imports point one way: `inference` ships and runs without `cotrain` and its libraries."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
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
