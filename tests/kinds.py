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
from inference.proposers.hydra import Hydra
from inference.proposers.hydra_network import HydraConfig, HydraNetwork
from inference.proposers.medusa import Medusa
from inference.proposers.medusa_network import MedusaConfig, MedusaNetwork
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


def medusa(target: LlamaForCausalLM, noise: float = 0.1) -> MedusaNetwork:
    """Two blocks a head, of which all heads say nearly what the target's own says."""
    torch.manual_seed(7)
    network = MedusaNetwork(MedusaConfig(**_sizes(target), num_hidden_layers=2))
    return _noisy(network, target, noise)


def hydra(target: LlamaForCausalLM, noise: float = 0.1) -> HydraNetwork:
    torch.manual_seed(7)
    network = HydraNetwork(HydraConfig(**_sizes(target)))
    return _noisy(network, target, noise)


def _sizes(target: LlamaForCausalLM) -> dict[str, int]:
    return {"hidden_size": target.config.hidden_size, "vocab_size": target.config.vocab_size, "num_heads": 3}


def _noisy(network: Any, target: LlamaForCausalLM, noise: float) -> Any:
    network = network.to(target.dtype)
    with torch.no_grad():
        for weight in network.parameters():
            weight += noise * torch.randn_like(weight)
    return network.eval().to(target.device)


KINDS = {
    "independent": Kind(lambda target: Independent(near(target, 0.15))),
    "independent, greedy": Kind(lambda target: Independent(near(target, 0.15), greedy=True)),
    "medusa": Kind(lambda target: Medusa(medusa(target))),
    "medusa, greedy": Kind(lambda target: Medusa(medusa(target), greedy=True)),
    "hydra": Kind(lambda target: Hydra(hydra(target))),
    "ngram": Kind(lambda target: NGram()),
    "example": Kind(next_head),
}
