"""Known ways to break the exactness core, each with the test that must notice.

A row of `tests/planted/*.py` is (name, file, function, old, new, tests, what it stands for): within `function` (its
qualified name; "" is the whole file) the text `old`, which must occur there exactly once, is replaced by `new`, and one
of `tests` must then fail. The last field says what the bug is, or the number of a known pitfall of this field.
A row names no more than it needs, so that moving or rewording the lines around it costs nothing.
`python -m tests.run_mutants` plants them.
"""

import ast
import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests import planted


@dataclass(frozen=True)
class Mutant:
    """One planted bug: a name, the change of one function, the node ids that must fail, what it stands for."""

    name: str
    file: str
    function: str
    old: str
    new: str
    tests: list[str]
    pitfall: int | str

    def applied(self, root: Path) -> str:
        """The text of the file under `root` after the change. Raises ValueError naming what is wrong with the row."""
        path = root / self.file
        if not path.is_file():
            raise ValueError(f"{self.name}: no file {self.file}")
        text = path.read_text(encoding="utf-8")
        start, end = _span(text, self.function) if self.function else (0, len(text))
        count = text[start:end].count(self.old)
        if count != 1:
            raise ValueError(
                f"{self.name}: the old text occurs {count} times in {self.function or 'all'} of {self.file}, not once"
            )
        text = text[:start] + text[start:end].replace(self.old, self.new) + text[end:]
        if path.suffix == ".py":
            ast.parse(text, self.file)
        return text


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _span(text: str, function: str) -> tuple[int, int]:
    """Where the class or function of that qualified name stands in the text, decorators included; (0, 0) if absent."""
    node: ast.AST = _parsed(text)
    first = last = 0
    for name in function.split("."):
        bodies = [child for child in ast.walk(node) if getattr(child, "name", None) == name and child is not node]
        if not bodies:
            return 0, 0
        node = bodies[0]
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        last = node.end_lineno or first
    lines = text.splitlines(keepends=True)
    return len("".join(lines[: first - 1])), len("".join(lines[:last]))


PARTS = [importlib.import_module(f"{planted.__name__}.{part.name}") for part in pkgutil.iter_modules(planted.__path__)]
MUTANTS = [Mutant(*row) for part in PARTS for row in part.ROWS_OF_BUGS]
