"""One word has one meaning, and it is the field's: names that say nothing of the thing are not used again."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for top in ("cotrain", "inference") for path in sorted((ROOT / top).rglob("*.py"))]
TEXTS = [
    *SOURCES,
    *sorted((ROOT / "conf").rglob("*.yaml")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "studies").rglob("*.py")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
# participles that name a variable or a function without its noun
WORDS = ("found", "told", "taken", "made", "kept", "settled", "begun", "refused", "law", "laws")
LEFT = {"made": 1}  # `lookup.corpus.About.made`, a key of a datastore's file


def names(tree: ast.AST) -> list[str]:
    """Names that a source defines: variables, arguments, attributes that are set, functions and classes."""
    defined = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            defined.append(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            defined.append(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.append(node.name)
    return defined


def words_of(name: str) -> set[str]:
    return set(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_"))


def test_words_of_a_name_are_seen() -> None:
    source = "def was_found(told): made = 1\nclass KeptTexts: law: int = 0\nx.settled = 2\ntaken"
    met = {word for name in names(ast.parse(source)) for word in words_of(name) & set(WORDS)}
    assert met == {"found", "told", "made", "kept", "law", "settled"}  # `taken` is only read


def test_names_say_what_a_thing_is() -> None:
    met: Counter[str] = Counter()
    where: dict[str, set[str]] = {}
    for path in SOURCES:
        for name in names(ast.parse(path.read_text(encoding="utf-8"))):
            for word in words_of(name) & set(WORDS):
                met[word] += 1
                where.setdefault(word, set()).add(f"{path.relative_to(ROOT)}: {name}")
    more = {word: sorted(where[word])[:20] for word, count in met.items() if count > LEFT.get(word, 0)}
    assert not more
    assert not {word: number for word, number in LEFT.items() if met[word] < number}, "lower the numbers"


def test_no_two_public_classes_share_a_name() -> None:
    classes = Counter(
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name for name, count in classes.items() if count > 1}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_probabilities_are_called_so(path: Path) -> None:
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.endswith("# a key of older files")
    ]
    assert not re.search(r"\blaws?\b", "\n".join(lines), re.I)


SETTINGS = (ROOT / "cotrain" / "config" / "groups.py").read_text(encoding="utf-8")
PACKAGES = {path.parent.name for path in SOURCES} - {"cotrain", "inference"}


def referenced(text: str) -> list[str]:
    """Dotted names in backticks that begin with a package of ours, as `losses.batch.shares`."""
    names = re.findall(r"`((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*)(?:\(\))?`", text)
    return [name for name in names if name.split(".")[0] in PACKAGES | {"cotrain", "inference"}]


def exists(name: str) -> bool:
    """Whether a module of that name is there, and what is named in it; so are files and settings."""
    if name.endswith(".json") or name == "inference.load":
        return True
    if re.search(rf"^    {name.split('.')[1]}: ", SETTINGS, re.M):
        return True
    for top in ("", "inference.", "cotrain."):
        parts = (top + name).split(".")
        for n in range(len(parts), 1, -1):
            file, package = ROOT.joinpath(*parts[:n]).with_suffix(".py"), ROOT.joinpath(*parts[:n], "__init__.py")
            source = file if file.is_file() else package
            if source.is_file():
                text = source.read_text(encoding="utf-8")
                if all(re.search(rf"\b{part}\b", text) for part in parts[n:]):
                    return True
                break
    return False


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_docstrings_lead_somewhere(path: Path) -> None:
    assert not [name for name in referenced(path.read_text(encoding="utf-8")) if not exists(name)]
