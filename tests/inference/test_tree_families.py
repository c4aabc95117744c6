"""Drafts on targets of twelve architectures: in float64, ragged, the greedy text is that of plain decoding, or an error
says why. Trees of drafts that read the target's states or run its layers, or draft in one pass; chains and trees of
block drafts. A draft of its own is in `test_families` and `test_tree_drafts`."""

from functools import cache
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.policy import Fixed
from tests.inference import test_families as families
from tests.kinds import KINDS
from tests.often import often

TWELVE = [
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Gemma2",
    "Gemma3Text",
    "Phi3",
    "GPT2",
    "GPTNeoX",
    "OPT",
    "StableLm",
    "Olmo2",
]
SETTINGS = {name: settings for name, settings, *_ in [*families.SUPPORTED, *families.BEHAVING]}
PROMPTS = [[3, 5, 7, 3, 5], [7, 7], [1], [12, 13, 14, 15, 16, 17, 18]]
SHAPE = (-1, -1, 0, 1, 0)
# three rows of four texts, over the edge of every window, whose ends differ
WHOLE: dict[str, Any] = {"max_new_tokens": [8, 10, 5, 9], "sampling": Sampling(0), "ignore_eos": True}


@cache
def plain(name: str) -> tuple[Any, list[list[int]]]:
    """The target, and its text."""
    with torch.inference_mode(False):
        target = families.build(name, SETTINGS[name])
    return target, Engine(target, rows=3).generate(PROMPTS, **WHOLE).tokens


def drafted(target: Any, proposer: Any, verify: str) -> Any:
    return Engine(target, proposer, verify=verify, policy=Fixed(2), rows=3).generate(PROMPTS, **WHOLE)


# windows in all layers, in some, none
@pytest.mark.parametrize("name", often(TWELVE, {"Llama", "Gemma3Text", "Phi3", "GPT2"}.__contains__))
def test_greedy_text_of_families(name: str) -> None:
    target, text = plain(name)
    for kind in ("medusa", "early_exit", "parallel, markov"):
        out = drafted(target, KINDS[kind].proposer(target, shape=SHAPE), "tree")
        assert out.tokens == text, kind
        assert sum(out.stats.accepted) > 3, kind
