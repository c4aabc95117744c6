"""The embedded corpora: text that is on this machine or generated here, never downloaded.

`code` is Python source (the standard library and the packages that this project installs), `prose` is English text
(help topics, package descriptions, docstrings), and `records` is JSON from a seeded generator. A hash of a document's
path decides whether it is a training or a held-out document, so all machines agree. The shipped prompts are parts of
held-out documents.
"""

import ast
import inspect
import json
import pydoc_data.topics
import random
import re
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cotrain.data.splits import text_hash
from cotrain.paths import folder

DOMAINS = ("code", "prose", "records")
PROMPTS, SOURCES = "prompts.jsonl", "sources.jsonl"  # in data/: shipped prompts, and sources of `sequence_tasks`
HELD_OUT_PERCENT = 5
SKIPPED = {"test", "tests", "idle_test", "testing", "site-packages", "dist-packages", "_vendor", "__pycache__"}
FILE_BYTES = (400, 120_000)  # shorter files have little text, longer ones are mostly tables
DOCSTRING_LENGTH = 160  # characters; shorter texts are not used
PIECE = 400  # characters, about 120 tokens; each piece of a document starts with a prompt
ALL = 10**9
# words that records are composed of
FIRST = "Ada Ben Chloe Dmitri Elena Farid Grace Hiro Ines Jonas Kavya Liam Mei Noor Omar Priya Quinn Rosa".split()
LAST = "Almeida Brandt Costa Dubois Eriksen Fischer Garcia Haddad Ivanov Jensen Kim Lopez Meyer Novak Okafor".split()
CITY = "Berlin Lagos Lima Osaka Oslo Paris Porto Quito Riga Rome Seoul Split Tunis Turin Vienna Zurich".split()
ITEM = "anchor basket candle drill easel filter gasket hammer inkwell kettle lantern mallet needle pulley".split()
WORD = "urgent fragile returned gift insured express sealed checked late partial renewed manual draft".split()


@dataclass(frozen=True)
class Document:
    """A text and its path relative to its root directory. The hash of the path decides whether it is a training or a
    held-out document."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        return text_hash(self.path) % 100 < HELD_OUT_PERCENT


def embedded(domain: str, split: str, max_bytes: int) -> list[Document]:
    """Return distinct documents of a domain, in a fixed order, until their total size reaches `max_bytes` of UTF-8
    text.

    domain: one of `DOMAINS`. split: "train" or "held_out". Raises ValueError for any other domain or split, or if there
    is no document.
    """
    sources = {"code": _code, "prose": _prose, "records": _records}
    if domain not in sources:
        raise ValueError(
            f"data.bytes, data.held_out_bytes: there is no embedded corpus {domain!r}: use only {', '.join(DOMAINS)}"
        )
    if split not in ("train", "held_out"):
        raise ValueError(f"split: {split!r} is neither 'train' nor 'held_out'")
    documents, seen, size = [], set(), 0
    for document in sources[domain](split == "held_out"):
        key = text_hash(document.text)
        if key in seen:
            continue
        seen.add(key)
        size += len(document.text.encode())
        documents.append(document)
        if size >= max_bytes:
            break
    if not documents:
        raise ValueError(
            f"data.bytes, data.held_out_bytes: the corpus {domain!r} has no text of the split {split!r} on this "
            "machine: leave it out of both, or give texts with data.path="
        )
    return documents


def text_pieces(text: str) -> list[str]:
    """Cut a text at line ends into pieces of at least `PIECE` characters. The last piece may be shorter. Blank pieces
    are dropped."""
    cuts, lines, size = [], list[str](), 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= PIECE:
            cuts.append("".join(lines))
            lines, size = [], 0
    return [piece for piece in [*cuts, "".join(lines)] if piece.strip()]


def _code(held_out: bool) -> Iterator[Document]:
    for path, file in _source_files():
        if Document(path, "").held_out == held_out:
            with suppress(UnicodeDecodeError):  # a source in a legacy encoding
                yield Document(path, file.read_text(encoding="utf-8"))


def _prose(held_out: bool) -> Iterator[Document]:
    """Yield documents of English text: help topics, then package descriptions, then the docstrings of each source file.
    held_out: True for held-out documents, False for training documents."""
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
    """Return pairs (path relative to its root directory, file) for every usable source file, ordered by the hash of the
    path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [(str(file.relative_to(root)), file) for file in root.rglob("*.py")]
    for name in _distributions():
        for entry in metadata.distribution(name).files or ():
            if entry.suffix == ".py":
                files.append((str(entry), Path(str(entry.locate()))))
    usable = {path: file for path, file in files if _usable(path, file)}
    return sorted(usable.items(), key=lambda item: text_hash(item[0]))


def _usable(path: str, file: Path) -> bool:
    if SKIPPED.intersection(Path(path).parts) or path.startswith("..") or path.endswith("topics.py"):
        return False
    return file.is_file() and FILE_BYTES[0] <= file.stat().st_size <= FILE_BYTES[1]


def _distributions() -> list[str]:
    """Return the names of the installed distributions that this project requires, directly or indirectly."""
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
    return {
        "sku": f"{rng.choice(ITEM)}-{rng.randrange(100):02d}",
        "quantity": rng.randint(1, 9),
        "price": round(rng.uniform(1, 200), 2),
    }


def _order(rng: random.Random) -> dict[str, Any]:
    lines = [_line(rng) for _ in range(rng.randint(1, 4))]
    total = round(sum(line["quantity"] * line["price"] for line in lines), 2)
    return {
        "order": rng.randrange(10**8),
        "date": _date(rng),
        "customer": _person(rng),
        "lines": lines,
        "total": total,
        "tags": rng.sample(WORD, rng.randint(0, 3)),
        "paid": rng.random() < 0.8,
    }


def _reading(rng: random.Random) -> dict[str, Any]:
    values = [round(rng.gauss(20, 4), 1) for _ in range(rng.randint(3, 8))]
    return {
        "sensor": f"s{rng.randrange(40):03d}",
        "unit": rng.choice(["C", "kPa", "%"]),
        "at": _date(rng),
        "values": values,
        "max": max(values),
        "ok": max(values) < 27,
    }


def _event(rng: random.Random) -> dict[str, Any]:
    return {
        "time": _date(rng),
        "level": rng.choice(["INFO", "INFO", "WARNING", "ERROR"]),
        "service": rng.choice(["auth", "billing", "search", "mail"]),
        "user": rng.choice([None, _person(rng)]),
        "latency_ms": rng.randrange(1, 2000),
        "path": f"/{rng.choice(ITEM)}s/{rng.randrange(999)}",
    }


def _date(rng: random.Random) -> str:
    day = f"{rng.randint(2015, 2025)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    return f"{day}T{rng.randrange(24):02d}:{rng.randrange(60):02d}:00Z"


def records(number: int) -> str:
    """Return the text of the generated document `number`: two to eight JSON objects with the same keys (persons,
    orders, sensor readings or events). Each object is on one line, or indented over several lines."""
    rng = random.Random(number)
    make = rng.choice([_person, _order, _reading, _event])
    indent = rng.choice([None, 2])
    return "\n".join(json.dumps(make(rng), indent=indent) for _ in range(rng.randint(2, 8))) + "\n"


def shipped(name: str = PROMPTS) -> list[dict[str, str]]:
    """Return the rows of the file data/`name`, each {"domain", "text"}. The domains alternate, so the first n rows have
    texts of all domains."""
    return [json.loads(line) for line in (folder("data") / name).read_text(encoding="utf-8").splitlines()]


def shipped_ids(
    tokenizer: PreTrainedTokenizerBase, tokens: int, encoder: bool = False
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of the distinct shipped prompts, as two lists of prompts. The first list, a third of them,
    is for ranking checkpoints and draft lengths. The second is for timing the exported draft. Domains alternate in
    both.

    tokens: prompts are cut to this many tokens. encoder: whether the target has an encoder. The prompts are then the
    shipped inputs for encoders, which are short and not cut.
    """
    places: dict[tuple[int, ...], int] = {}
    for place, (ids, _) in enumerate(_shipped_prompts(tokenizer, tokens, encoder)):
        places.setdefault(ids, place // len(DOMAINS))
    ranking = [list(ids) for ids, place in places.items() if place % 3 == 0]
    return ranking, [list(ids) for ids, place in places.items() if place % 3]


def shipped_domains(
    tokenizer: PreTrainedTokenizerBase, tokens: int, encoder: bool = False
) -> dict[tuple[int, ...], str]:
    """Return the domain of each shipped prompt, keyed by the prompt's token ids. tokens: prompts are cut to this many
    tokens. encoder: whether the target has an encoder; the prompts are then the shipped inputs for encoders, which are
    not cut."""
    return dict(_shipped_prompts(tokenizer, tokens, encoder))


def _shipped_prompts(
    tokenizer: PreTrainedTokenizerBase, tokens: int, encoder: bool
) -> Iterator[tuple[tuple[int, ...], str]]:
    for row in shipped(SOURCES if encoder else PROMPTS):
        ids = tokenizer(row["text"])["input_ids"]
        yield tuple(ids if encoder else ids[:tokens]), row["domain"]
