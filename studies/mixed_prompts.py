"""Prompts of mixed kinds, for drafts that look up and drafts that do not: code edits, records, prose.

    python -m studies.mixed_prompts OUT.jsonl [--count 400]

A code edit is a piece of held-out code, and behind it the first half of the same piece with one name changed, as an
editor's model is asked to write on. Records and prose are starts of held-out texts. So many of each kind, kinds in
turn, one JSON object {"prompt", "domain"} a line, for data.path=.
"""

import argparse
import json
import keyword
import random
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from cotrain.data.corpora import embedded, text_pieces
from inference.drafts.atomic import write_atomic

BYTES = 4_000_000  # of held-out text that is looked through
START = 200  # characters of a text of records or prose
NAME = re.compile(r"\b[a-z_][a-z_0-9]{3,}\b")


def edit(piece: str, rng: random.Random) -> str | None:
    """A piece of code, and the first half of its lines anew, with the name that comes most often changed; None where no
    name comes twice or where the piece is one line."""
    lines = piece.splitlines(keepends=True)
    names = [name for name in NAME.findall(piece) if not keyword.iskeyword(name)]
    name = max(sorted(set(names)), key=names.count, default="")
    if names.count(name) < 2 or len(lines) < 2:
        return None
    new = f"{name}_{rng.choice('abcdefgh')}"
    renamed = re.sub(rf"\b{name}\b", new, "".join(lines[: len(lines) // 2]))
    return f"# before\n{piece}\n# after, with {name} renamed to {new}\n{renamed}"


def edits(rng: random.Random) -> Iterator[str]:
    for document in embedded("code", "held_out", BYTES):
        yield from (found for piece in text_pieces(document.text) if (found := edit(piece, rng)))


def starts(domain: str) -> Iterator[str]:
    for document in embedded(domain, "held_out", BYTES):
        for piece in text_pieces(document.text):
            yield piece[:START]


def mixed(count: int, seed: int = 0) -> list[dict[str, str]]:
    """`count` prompts of each kind, kinds in turn, each prompt once. Raises ValueError where there are fewer."""
    kinds = {"code edits": edits(random.Random(seed)), "records": starts("records"), "prose": starts("prose")}
    found = {name: list(islice(dict.fromkeys(texts), count)) for name, texts in kinds.items()}
    if few := [name for name, texts in found.items() if len(texts) < count]:
        raise ValueError(f"--count {count}: there are {len(found[few[0]])} of {few[0]}")
    return [{"prompt": found[name][i], "domain": name} for i in range(count) for name in found]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.mixed_prompts")
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=400)
    asked = parser.parse_args(arguments)
    write_atomic(asked.out, "".join(json.dumps(row) + "\n" for row in mixed(asked.count)))


if __name__ == "__main__":
    main(sys.argv[1:])
