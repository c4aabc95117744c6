"""Tiny random models that every test can afford."""

import copy
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def compiles(test: Callable[..., None]) -> Callable[..., None]:
    """A thorough test that needs torch.compile, whose first run takes minutes on a busy machine."""
    found = any(map(shutil.which, ("g++", "clang++", "c++")))
    patient = pytest.mark.timeout(600)
    test = pytest.mark.thorough(test)
    return patient(pytest.mark.skipif(not found, reason="no C++ compiler")(test))


def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.compile` traces runs as it is. Which graphs there are, what is an input of them and what is baked in
    shows there; code for this machine, which takes many times as long, is generated where a test has `compiles`."""
    torch._dynamo.utils.counters.clear()  # of graphs of earlier tests
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr("inference.models.replay.Compiled.failed", False)


def tiny(
    vocab: int = 32,
    layers: int = 2,
    hidden: int = 16,
    heads: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    eos: int | None = None,
    positions: int = 256,
) -> LlamaForCausalLM:
    """A random Llama whose distributions are far from uniform, in eval mode."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def near(model: LlamaForCausalLM, noise: float = 0.1, seed: int = 1) -> LlamaForCausalLM:
    """A copy with noise of that deviation on its weights: a draft that often agrees, not always."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight += noise * torch.randn_like(weight)
    return other


def continued(model: LlamaForCausalLM, prompt: list[int], n: int, **settings: Any) -> list[int]:
    """The n tokens, or fewer, that transformers' own greedy generate appends to the prompt alone."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=n,
        pad_token_id=0,
        **settings,
    )
    return out[0, len(prompt) :].tolist()
