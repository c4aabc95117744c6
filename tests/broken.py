"""JSON files with one thing wrong in them."""

import copy
import math
from collections.abc import Iterator
from typing import Any

ODD = (None, True, "x", [], {}, [None], ["x"], {"x": 1}, math.nan, math.inf, -1, 0.5, 10**400)


def broken(content: Any) -> Iterator[tuple[str, Any]]:
    """Every place of `content` with each odd value in it, and every entry left out, with the words that say where."""
    yield from ((f"all is {odd!r:.20}", copy.deepcopy(odd)) for odd in ODD)
    yield from _inside(content, "")


def _inside(content: Any, where: str) -> Iterator[tuple[str, Any]]:
    keys = list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        for odd in ODD:
            changed = copy.copy(content)
            changed[key] = copy.deepcopy(odd)
            yield f"{where}.{key} is {odd!r:.20}", changed
        changed = copy.copy(content)
        del changed[key]
        yield f"{where}.{key} left out", changed
        for words, part in _inside(content[key], f"{where}.{key}"):
            changed = copy.copy(content)
            changed[key] = part
            yield words, changed
