"""Sequence tasks from the embedded corpora, for encoder-decoder targets: pairs of an encoder input and its output.

`signature`: the docstring of a function -> its first line. `summary`: the code of a function, without its docstring ->
the first sentence of the docstring. `sentence`: a JSON record -> an English sentence.

The split of a pair is its document's in `corpora`. A training pair is dropped if it shares its code, first sentence or
record with a held-out pair. So no encoder input is in two splits, and neither is the output of its other task.
"""

import ast
import copy
import inspect
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets

from cotrain.data.corpora import ALL, embedded, text_pieces

CORPORA = {"signature": "code", "summary": "code", "sentence": "records"}  # the corpus of each task
TASKS = tuple(CORPORA)
FIRST_SENTENCE = (15, 150)  # characters; shorter ones say little, longer ones are no summaries
SIGNATURE = 150  # characters at most
CODE = (40, 600)  # characters of a function without its docstring
LONGEST = 192  # tokens of a source; few are longer, with the bundled tokenizer
MONTHS = "January February March April May June July August September October November December".split()
# phrasings of the records of a kind
PERSON = (
    "{name} from {city} has the number {id} and reads mail at {email}.",
    "Customer {id}, {name}, lives in {city} and is reached at {email}.",
)
ORDER = (
    "On {day} {who} ordered {lines}; order {number}{tags}, {total} in total, {paid}.",
    "Order {number}{tags}, made by {who} on {day}, {paid}: {lines}, which is {total} in total.",
)
READING = (
    "Sensor {sensor} read {values} {unit} on {day}; the maximum, {max}, is {state}.",
    "On {day} sensor {sensor} measured {values} {unit}, at most {max}, which is {state}.",
)
EVENT = (
    "At {clock} on {day} {service} logged {level}: {path} took {latency_ms} ms for {who}.",
    "The service {service} logged {level} on {day} at {clock}, since {who} waited {latency_ms} ms for {path}.",
)


@dataclass(frozen=True)
class SequencePair:
    """An encoder input (`source`) and the output that a target should give for it. task: one of `TASKS`. keys: texts
    that a training pair must not share with a held-out pair."""

    task: str
    source: str
    output: str
    keys: tuple[str, ...]


def embedded_pairs(max_bytes: dict[str, int], split: str) -> datasets.Dataset:
    """Return rows (source, output, domain) of a split, with distinct sources. The domain is the task.

    max_bytes: how many bytes of documents to read, keyed by corpus: "code" and "records"; other corpora have no tasks.
    split: "train" or "held_out". Raises ValueError for any other split or corpus, and if there is no pair.
    """
    held_out = set()
    if split == "train":
        every = max_bytes | {"code": ALL if max_bytes.get("code") else 0}
        held_out = {key for pair in _pairs(every, "held_out") for key in pair.keys}
    seen, rows = set[str](), []
    for pair in _pairs(max_bytes, split):
        if pair.source not in seen and held_out.isdisjoint(pair.keys):
            seen.add(pair.source)
            rows.append({"source": pair.source, "output": pair.output, "domain": pair.task})
    if not rows:
        raise ValueError(
            f"data.bytes={max_bytes}: the texts have no sequence task of the split {split}: raise the bytes of code or "
            "records"
        )
    return datasets.Dataset.from_list(rows)


def _pairs(max_bytes: dict[str, int], split: str) -> Iterator[SequencePair]:
    for corpus, pairs_in in (("code", functions), ("records", sentences)):
        if size := max_bytes.get(corpus, 0):
            for document in embedded(corpus, split, size):
                yield from pairs_in(document.text)


def functions(source: str) -> Iterator[SequencePair]:
    """Yield the pairs `signature` and `summary` for each public function in a Python source file. source: its text."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a template or a file of another Python version
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        docstring = inspect.cleandoc(ast.get_docstring(node) or "")
        first = _first_sentence(docstring)
        if not FIRST_SENTENCE[0] <= len(first) <= FIRST_SENTENCE[1]:
            continue
        signature, code = _without_docstring(node)
        keys = (first, code) if code else (first,)  # many functions have no code but a docstring
        if len(signature) <= SIGNATURE:
            yield SequencePair("signature", f"signature: {text_pieces(docstring)[0].strip()}", signature, keys)
        if CODE[0] <= len(code) <= CODE[1]:
            yield SequencePair("summary", f"summary: {code}", first, keys)


def _first_sentence(docstring: str) -> str:
    """Return the first paragraph on one line, up to the first full stop that is followed by a space."""
    return re.split(r"(?<=[.!?])\s", " ".join(docstring.partition("\n\n")[0].split()), maxsplit=1)[0]


def _without_docstring(node: ast.FunctionDef) -> tuple[str, str]:
    """Return the first line of a function, and the function without its docstring and decorators ("" if nothing
    remains), both as `ast.unparse` writes them."""
    bare = copy.copy(node)
    bare.body, bare.decorator_list = [ast.Pass()], []
    signature = ast.unparse(bare).partition("\n")[0]
    bare.body = node.body[1:]
    return signature, ast.unparse(bare) if bare.body else ""


def sentences(text: str) -> Iterator[SequencePair]:
    """Yield one pair of the task `sentence` for each record in a document. text: the document, from `corpora.records`;
    it consists of JSON objects separated by line ends."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        record, end = decoder.raw_decode(text, at)
        source = json.dumps(record)
        yield SequencePair("sentence", f"sentence: {source}", sentence(record, random.Random(source)), (source,))
        at = end + 1  # a line end stands between two records


def sentence(record: dict[str, Any], rng: random.Random) -> str:
    """Return an English sentence with the content of a record. record: one JSON object of a document from
    `corpora.records`. rng chooses the phrasing."""
    if "order" in record:
        return _order(record, rng)
    if "sensor" in record:
        return _reading(record, rng)
    if "service" in record:
        return _event(record, rng)
    return rng.choice(PERSON).format(**record)


def _order(record: dict[str, Any], rng: random.Random) -> str:
    words = {
        "who": record["customer"]["name"],
        "day": _day(record["date"]),
        "number": record["order"],
        "lines": _list([f"{line['quantity']} {line['sku']} at {line['price']}" for line in record["lines"]]),
        "total": record["total"],
        "tags": f", {_list(record['tags'])}" if record["tags"] else "",
        "paid": "has been paid" if record["paid"] else "is not paid yet",
    }
    return rng.choice(ORDER).format(**words)


def _reading(record: dict[str, Any], rng: random.Random) -> str:
    values = _list([str(value) for value in record["values"]])
    state = "as it should be" if record["ok"] else "too much"
    return rng.choice(READING).format(**record | {"values": values, "day": _day(record["at"]), "state": state})


def _event(record: dict[str, Any], rng: random.Random) -> str:
    user = record["user"]
    who = f"{user['name']} of {user['city']}" if user else "an unknown user"
    level = {"INFO": "a note", "WARNING": "a warning", "ERROR": "an error"}[record["level"]]
    words = {"clock": record["time"][11:16], "day": _day(record["time"]), "who": who, "level": level}
    return rng.choice(EVENT).format(**record | words)


def _day(date: str) -> str:
    year, month, day = date[:10].split("-")
    return f"{int(day)} {MONTHS[int(month) - 1]} {year}"


def _list(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
