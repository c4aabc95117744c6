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
from inference.proposers.early_exit import EarlyExit
from inference.proposers.early_exit_network import ExitNetwork, begun
from inference.proposers.quantised import Quantised
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
    sizes = target.config.hidden_size, target.config.vocab_size
    head = torch.nn.Linear(*sizes, bias=False, dtype=target.dtype, device=target.device)
    with torch.no_grad():
        head.weight.copy_(0.5 * target.lm_head.weight)
    made: Proposer = example()["NextHead"](head)
    return made


def exit_network(target: LlamaForCausalLM, rank: int = 2) -> ExitNetwork:
    """An exit behind the first layer but the last, changed at random."""
    torch.manual_seed(4)
    network = begun(target, max(len(target.model.layers) - 1, 1), rank, 3).to(target.device, target.dtype)
    with torch.no_grad():
        for weight in network.layers.parameters():
            weight.normal_(std=0.2)
    return network


KINDS = {
    "independent": Kind(lambda target: Independent(near(target, 0.15))),
    "early_exit": Kind(lambda target: EarlyExit(exit_network(target), target)),
    "quantised": Kind(Quantised),
    "ngram": Kind(lambda target: NGram()),
    "example": Kind(next_head),
}
