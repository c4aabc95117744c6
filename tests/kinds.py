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
from inference.proposers.parallel import Parallel
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


def masked(target: LlamaForCausalLM, noise: float = 0.15, depths: int = 4) -> LlamaForCausalLM:
    """A model near the target that reads its last id as a mask: at depth 0 often right, behind it now and then."""
    model = near(target, noise)
    model.config.pard_token, model.config.pard_depths = target.config.vocab_size - 1, depths
    return model


def parallel(target: LlamaForCausalLM, greedy: bool = False, compile: bool = False) -> Parallel:
    return Parallel(masked(target), greedy, compile=compile)


KINDS = {
    "independent": Kind(lambda target: Independent(near(target, 0.15))),
    "independent, greedy": Kind(lambda target: Independent(near(target, 0.15), greedy=True)),
    "parallel": Kind(parallel),
    "parallel, greedy": Kind(lambda target: parallel(target, greedy=True)),
    "ngram": Kind(lambda target: NGram()),
    "example": Kind(next_head),
}
