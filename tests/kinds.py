"""Kinds of drafts, as small as a test can afford: every kind in this table passes the conformance suites."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from inference.proposers import Independent, NGram
from inference.proposers.base import Proposer
from tests.tiny import near

CONTRIBUTING = Path(__file__).resolve().parent.parent / "CONTRIBUTING.md"


@dataclass(frozen=True)
class Kind:
    """proposer: made for a tiny target, so that its drafts are often right and not always."""

    proposer: Callable[[LlamaForCausalLM], Proposer]


def example_code() -> str:
    """The code of CONTRIBUTING.md."""
    (code,) = re.findall(r"```python\n(# inference/.*?)```", CONTRIBUTING.read_text(encoding="utf-8"), re.S)
    return str(code)


@cache
def example() -> dict[str, Any]:
    """What it defines."""
    found: dict[str, Any] = {}
    exec(compile(example_code(), str(CONTRIBUTING), "exec"), found)
    return found


def next_head(target: LlamaForCausalLM) -> Proposer:
    """A head for the token after the next, from the target's own: enough to be right now and then."""
    head = torch.nn.Linear(target.config.hidden_size, target.config.vocab_size, bias=False, dtype=target.dtype)
    with torch.no_grad():
        head.weight.copy_(0.5 * target.lm_head.weight)
    made: Proposer = example()["NextHead"](head)
    return made


KINDS = {
    "independent": Kind(lambda target: Independent(near(target, 0.15))),
    "independent, greedy": Kind(lambda target: Independent(near(target, 0.15), greedy=True)),
    "ngram": Kind(lambda target: NGram()),
    "example": Kind(next_head),
}
