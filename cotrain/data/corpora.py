"""The embedded corpora: text found on this machine or made here, never downloaded.

`code` is Python source (the standard library and the packages this project installs), `prose` is the
English in it (docstrings, help topics, package descriptions), `records` is JSON from a seeded generator.
A document belongs to train or held-out by a hash of its file's path relative to its root, so machines agree. The
shipped prompts are parts of held-out documents.
"""

import ast
import hashlib
import inspect
import json
import pydoc_data.topics
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cotrain.paths import folder
from inference.drafts.atomic import write_atomic

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
PROMPT_LENGTH = 400  # characters, about 120 tokens: benches cut them to their own prompt length
ALL = 10**9
# what records are put together from
FIRST = "Ada Ben Chloe Dmitri Elena Farid Grace Hiro Ines Jonas Kavya Liam Mei Noor Omar Priya Quinn Rosa".split()
LAST = "Almeida Brandt Costa Dubois Eriksen Fischer Garcia Haddad Ivanov Jensen Kim Lopez Meyer Novak Okafor".split()
CITY = "Berlin Lagos Lima Osaka Oslo Paris Porto Quito Riga Rome Seoul Split Tunis Turin Vienna Zurich".split()
ITEM = "anchor basket candle drill easel filter gasket hammer inkwell kettle lantern mallet needle pulley".split()
WORD = "urgent fragile returned gift insured express sealed checked late partial renewed manual draft".split()


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
    cuts, lines, size = [], list[str](), 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= PIECE:
            cuts.append("".join(lines))
            lines, size = [], 0
    return [piece for piece in [*cuts, "".join(lines)] if piece.strip()]


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
    needed: set[str] = set()
    queue = ["cotrain"]
    while queue:
        name = queue.pop()
        try:
            requires = metadata.distribution(name).requires or ()
        except metadata.PackageNotFoundError:  # a requirement of another platform
            continue
        if name != "cotrain":
            needed.add(name)
        names = [_canonical(need) for need in requires if "extra ==" not in need]
        queue += [need for need in names if need not in needed]
    return sorted(needed)


def _canonical(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", match.group(0)).lower() if match else ""


def _person(rng: random.Random) -> dict[str, Any]:
    first, last = rng.choice(FIRST), rng.choice(LAST)
    mail = f"{first}.{last}@example.org".lower()
    return {"id": rng.randrange(10**6), "name": f"{first} {last}", "email": mail, "city": rng.choice(CITY)}


def _line(rng: random.Random) -> dict[str, Any]:
    return {"sku": f"{rng.choice(ITEM)}-{rng.randrange(100):02d}", "quantity": rng.randint(1, 9),
            "price": round(rng.uniform(1, 200), 2)}  # fmt: skip


def _order(rng: random.Random) -> dict[str, Any]:
    lines = [_line(rng) for _ in range(rng.randint(1, 4))]
    total = round(sum(line["quantity"] * line["price"] for line in lines), 2)
    return {"order": rng.randrange(10**8), "date": _date(rng), "customer": _person(rng), "lines": lines,
            "total": total, "tags": rng.sample(WORD, rng.randint(0, 3)), "paid": rng.random() < 0.8}  # fmt: skip


def _reading(rng: random.Random) -> dict[str, Any]:
    values = [round(rng.gauss(20, 4), 1) for _ in range(rng.randint(3, 8))]
    return {"sensor": f"s{rng.randrange(40):03d}", "unit": rng.choice(["C", "kPa", "%"]), "at": _date(rng),
            "values": values, "max": max(values), "ok": max(values) < 27}  # fmt: skip


def _event(rng: random.Random) -> dict[str, Any]:
    return {"time": _date(rng), "level": rng.choice(["INFO", "INFO", "WARNING", "ERROR"]),
            "service": rng.choice(["auth", "billing", "search", "mail"]), "user": rng.choice([None, _person(rng)]),
            "latency_ms": rng.randrange(1, 2000), "path": f"/{rng.choice(ITEM)}s/{rng.randrange(999)}"}  # fmt: skip


def _date(rng: random.Random) -> str:
    day = f"{rng.randint(2015, 2025)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    return f"{day}T{rng.randrange(24):02d}:{rng.randrange(60):02d}:00Z"


def records(number: int) -> str:
    """Document `number`: some records of one kind, one JSON object a line or indented."""
    rng = random.Random(number)
    make = rng.choice([_person, _order, _reading, _event])
    indent = rng.choice([None, 2])
    return "\n".join(json.dumps(make(rng), indent=indent) for _ in range(rng.randint(2, 8))) + "\n"


def shipped() -> list[dict[str, str]]:
    """Rows {"domain", "text"}, domains in turn, so that any first n are spread over them."""
    lines = (folder("data") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def shipped_ids(tokenizer: PreTrainedTokenizerBase, tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """The shipped prompts cut to `tokens` ids, each once: a third to rank checkpoints and draft lengths, the rest to
    time what is exported; domains in turn in both."""
    places: dict[tuple[int, ...], int] = {}
    for place, row in enumerate(shipped()):
        places.setdefault(tuple(tokenizer(row["text"])["input_ids"][:tokens]), place // len(DOMAINS))
    ranking = [list(ids) for ids, place in places.items() if place % 3 == 0]
    return ranking, [list(ids) for ids, place in places.items() if place % 3]


def write_prompts(count: int, path: Path, seed: int = 0) -> None:
    """Write `count` prompts a domain; the shipped ones are write_prompts(80, Path("data/prompts.jsonl"))."""
    rng = random.Random(seed)
    texts = {domain: _texts(domain) for domain in DOMAINS}
    chosen = {domain: [_cut(rng, rng.choice(texts[domain])) for _ in range(count)] for domain in DOMAINS}
    rows = [{"domain": domain, "text": chosen[domain][i]} for i in range(count) for domain in DOMAINS]
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


def _texts(domain: str) -> list[str]:
    """Held-out documents that may be passed on: those of Python itself, and our own records."""
    documents = embedded(domain, "held_out", 300_000 if domain == "records" else ALL)
    return [d.text for d in documents if len(d.text) > 2 * PROMPT_LENGTH and (domain == "records" or _of_python(d))]


def _of_python(document: Document) -> bool:
    root = Path(sysconfig.get_paths()["stdlib"])
    return document.path.startswith("topics/") or (root / document.path).is_file()


def _cut(rng: random.Random, text: str) -> str:
    """PROMPT_LENGTH characters from the start of some line."""
    starts = [0] + [i + 1 for i, c in enumerate(text) if c == "\n" and i + 1 < len(text) - PROMPT_LENGTH]
    start = rng.choice(starts)
    return text[start : start + PROMPT_LENGTH]
