"""The layout of the two packages: what a newcomer relies on to find the one file to open."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [path for top in ("cotrain", "inference") for path in sorted((ROOT / top).rglob("*.py"))]
MOST = {"cotrain": 12, "inference": 14}  # files at the top of each


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> set[str]:
    """Our modules that a file imports when it is itself imported."""
    names = {module(other) for other in FILES}
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    packages = {".".join(name.split(".")[:n]) for name in found for n in range(1, name.count(".") + 1)}
    own = {".".join(module(path).split(".")[:n]) for n in range(1, module(path).count(".") + 1)}
    return (found | packages - own) & names


@pytest.mark.parametrize("top", MOST)
def test_few_files_lie_at_the_top(top: str) -> None:
    assert len(list((ROOT / top).glob("*.py"))) <= MOST[top]


def test_no_imports_go_in_a_circle() -> None:
    arrows = {module(path): imported(path) - {module(path)} for path in FILES}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name in done:
            return
        for other in sorted(arrows[name]):
            visit(other, (*way, name))
        done.add(name)

    for name in arrows:
        visit(name, ())


@pytest.mark.parametrize("top", MOST)
def test_every_package_says_what_lives_there(top: str) -> None:
    folders = {path.parent for path in FILES if path.is_relative_to(ROOT / top)}
    assert not [folder for folder in folders if not ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))]
