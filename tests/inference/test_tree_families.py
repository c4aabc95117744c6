"""Drafts on targets of twelve architectures: in float64, ragged, the greedy text is that of plain decoding, or an error
says why. Trees of drafts that read the target's states or run its layers, or draft in one pass; chains and trees of
block drafts. A draft of its own is in `test_families` and `test_tree_drafts`."""

from functools import cache
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.policy import Fixed
from inference.proposers.block import Block, BlockNetwork
from tests.inference import test_families as families
from tests.kinds import KINDS, block

TWELVE = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text", "Phi3", "GPT2", "GPTNeoX", "OPT", "StableLm",
          "Olmo2"]  # fmt: skip
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


@pytest.mark.parametrize("name", TWELVE)
def test_greedy_text_of_families(name: str) -> None:
    target, text = plain(name)
    for kind in ("medusa", "early_exit", "parallel, markov"):
        out = drafted(target, KINDS[kind].proposer(target, shape=SHAPE), "tree")
        assert out.tokens == text, kind
        assert sum(out.stats.accepted) > 3, kind


@torch.no_grad()
def copying(target: Any, text: list[list[int]], markov: bool, causal: bool) -> BlockNetwork:
    """A block draft whose masks copy the states that they attend to. Its Markov head has most pairs of the text."""
    size, width = target.config.vocab_size, target.config.hidden_size
    network = block(target, causal=causal, markov_rank=size if markov else 0, num_key_value_heads=2)
    for layer in network.layers:
        for weight in (layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight):
            weight.copy_(torch.eye(width))
    if markov:
        network.markov_head.markov_w1.weight.copy_(torch.eye(size))
        for before, after in [pair for one in text for pair in zip(one, one[1:], strict=False)][::2]:
            network.markov_head.markov_w2.weight[after, before] += 9.0
    return network


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("name", [*TWELVE, "Mpt"])
def test_greedy_text_of_families_with_block_drafts(name: str, causal: bool) -> None:
    """A pass that drafts a block reads the states of passes over rows of different lengths, and of a tree's path."""
    target, text = plain(name)
    for markov in (False, True):
        network = copying(target, text, markov, causal)
        chains = drafted(target, Block(network), "token")
        assert chains.tokens == text
        if name == "Mpt":
            with pytest.raises(ValueError, match="MptForCausalLM: its trees cannot be used here: its biases by dist"):
                drafted(target, Block(network, shape=SHAPE), "tree")
            continue
        trees = drafted(target, Block(network, shape=SHAPE), "tree")
        assert trees.tokens == text
        assert sum(trees.stats.accepted) > 6 * markov
        assert sum(chains.stats.accepted) > 6 or not markov  # copies are seldom right
