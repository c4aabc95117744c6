"""Cases of a test over many kinds or families: some run in `make test`, the rest in `make test-thorough`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

# between them every way to draft: a model and its cache, the target's states, one pass, heads, the target's own layers
EACH_WAY = {"independent", "eagle", "block", "medusa", "early_exit"}


def often(cases: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """The cases, those for which `kept` is false marked as thorough."""
    return [
        case
        if kept(case)
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough)
        for case in cases
    ]
