"""What a command answers: words for people, or one JSON object for machines."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

Answer = Callable[[Mapping[str, Any], str], None]  # what was found, and the words for it


@contextmanager
def answering(as_json: bool) -> Iterator[Answer]:
    """What gives a command's answer to standard output. Where that is JSON, whatever else is printed until the block
    ends goes to standard error."""
    if not as_json:
        yield lambda _, words: print(words)
        return
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        yield lambda found, _: print(json.dumps(strict(found)), file=out, flush=True)


def strict(found: Any) -> Any:
    """The same without NaN and infinity, which are no JSON: null in their places."""
    if isinstance(found, Mapping):
        return {key: strict(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [strict(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found
