"""The embedded corpora: text found on this machine or made here, never downloaded.

`code` is Python source (the standard library and the packages this project installs), `prose` is the
English in it (docstrings, help topics, package descriptions), `records` is JSON from a seeded generator.
A document belongs to train or held-out by a hash of its file's path relative to its root, so machines agree.
"""

import ast
import hashlib
import inspect
import pydoc_data.topics
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cotrain.data.records import records

DOMAINS = ("code", "prose", "records")
HELD_OUT_PERCENT = 5
SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "testing",
    "site-packages",
    "dist-packages",
    "_vendor",
    "__pycache__",
}
FILE_BYTES = (400, 120_000)  # shorter files say nothing, longer ones are tables
DOCSTRING_LENGTH = 160
PIECE = 400  # characters, about 120 tokens: what a prompt is the start of


@dataclass(frozen=True)
class Document:
    """A text with the path that decides its split; the path is relative to its root."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        return _hash(self.path) % 100 < HELD_OUT_PERCENT


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def embedded(domain: str, split: str, max_bytes: int) -> list[Document]:
    """Documents of a domain up to the one that reaches `max_bytes` of UTF-8, without repeated texts.

    Raises ValueError for an unknown domain or split, or when nothing was found.
    """
    sources = {"code": _code, "prose": _prose, "records": _records}
    if domain not in sources:
        raise ValueError(f"data.bytes: no embedded corpus {domain!r}; there are {', '.join(DOMAINS)}")
    if split not in ("train", "held_out"):
        raise ValueError(f"split: {split!r} is neither 'train' nor 'held_out'")
    documents, seen, size = [], set(), 0
    for document in sources[domain](split == "held_out"):
        key = _hash(document.text)
        if key in seen:
            continue
        seen.add(key)
        size += len(document.text.encode())
        documents.append(document)
        if size >= max_bytes:
            break
    if not documents:
        raise ValueError(f"embedded corpus {domain!r}: no text found on this machine for split {split!r}")
    return documents


def pieces(text: str) -> list[str]:
    """A text cut where lines start, each piece of at least `PIECE` characters but the last; none that is blank."""
    found, lines, size = [], list[str](), 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= PIECE:
            found.append("".join(lines))
            lines, size = [], 0
    return [piece for piece in [*found, "".join(lines)] if piece.strip()]


def manifest(documents: Iterable[Document]) -> dict[str, int | str]:
    """Number of files, bytes of UTF-8 and a hash of the texts in order."""
    digest, files, size = hashlib.blake2b(digest_size=16), 0, 0
    for document in documents:
        data = document.text.encode()
        digest.update(data)
        files, size = files + 1, size + len(data)
    return {"files": files, "bytes": size, "hash": digest.hexdigest()}


def _code(held_out: bool) -> Iterator[Document]:
    for path, file in _source_files():
        if Document(path, "").held_out == held_out and (text := _read(file)) is not None:
            yield Document(path, text)


def _prose(held_out: bool) -> Iterator[Document]:
    """Help topics first, then package descriptions, then the docstrings of each source file."""
    for name, text in sorted(pydoc_data.topics.topics.items()):
        document = Document(f"topics/{name}", text)
        if document.held_out == held_out:
            yield document
    for name in _distributions():
        description = (metadata.distribution(name).read_text("METADATA") or "").partition("\n\n")[2]
        document = Document(f"descriptions/{name}", description.strip())
        if document.held_out == held_out and len(document.text) > DOCSTRING_LENGTH:
            yield document
    for source in _code(held_out):
        if text := "\n\n".join(_docstrings(source.text)):
            yield Document(source.path, text)


def _records(held_out: bool) -> Iterator[Document]:
    for number in range(1_000_000):
        document = Document(f"records/{number}", "")
        if document.held_out == held_out:
            yield Document(document.path, records(number))


def _docstrings(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a template or a file of another Python version
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and len(text) > DOCSTRING_LENGTH:
            yield inspect.cleandoc(text)


def _source_files() -> list[tuple[str, Path]]:
    """(path relative to its root, file) of every usable source file, in the order of the path's hash."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [(str(file.relative_to(root)), file) for file in root.rglob("*.py")]
    for name in _distributions():
        for entry in metadata.distribution(name).files or ():
            if entry.suffix == ".py":
                files.append((str(entry), Path(str(entry.locate()))))
    usable = {path: file for path, file in files if _usable(path, file)}
    return sorted(usable.items(), key=lambda item: _hash(item[0]))


def _usable(path: str, file: Path) -> bool:
    if SKIPPED.intersection(Path(path).parts) or path.startswith("..") or path.endswith("topics.py"):
        return False
    return file.is_file() and FILE_BYTES[0] <= file.stat().st_size <= FILE_BYTES[1]


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:  # a source in a legacy encoding
        return None


def _distributions() -> list[str]:
    """Names of the installed distributions that this project needs, found by walking requirements."""
    found: set[str] = set()
    queue = ["cotrain"]
    while queue:
        name = queue.pop()
        try:
            requires = metadata.distribution(name).requires or ()
        except metadata.PackageNotFoundError:  # a requirement of another platform
            continue
        if name != "cotrain":
            found.add(name)
        names = [_canonical(need) for need in requires if "extra ==" not in need]
        queue += [need for need in names if need not in found]
    return sorted(found)


def _canonical(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", match.group(0)).lower() if match else ""
