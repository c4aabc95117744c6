"""Tiny random models that every test can afford."""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inference import Engine, Sampling
from inference.output import Emitted
from inference.sampling.noise import row_ids

TARGET = {"name": "the-target", "config": None, "tokenizer": None}  # of the metadata of a draft folder: without hashes
PROMPTS = [[i % 30 + 1 for i in range(n)] for n in (3, 9, 1, 6, 14)]


def record_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are recorded by the buckets of CUDA graphs, on a CPU without graphs, in slots that start few."""
    monkeypatch.setattr("inference.models.replay.Recorded.possible", lambda device: True)
    monkeypatch.setattr("inference.models.lm.FIRST_SLOTS", 8)
    monkeypatch.setattr("inference.models.replay.FEWEST", 8)
    monkeypatch.setattr("inference.proposers.eagle.FIRST_SLOTS", 8)


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


def emitted(
    engine: Engine,
    prompts: list[list[int]],
    n: int,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    seed: int = 5,
) -> Emitted:
    """Texts of n new tokens each, whose noise has the keys of a measurement: what a verdict judges."""
    keys = row_ids(prompts)
    out = engine.generate(prompts, max_new_tokens=n, sampling=sampling, seed=seed, ids=keys, ignore_eos=True)
    return Emitted(prompts, keys, out.tokens, out.stats.rows)
