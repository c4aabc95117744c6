"""Tiny random models that every test can afford."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


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
    """A random Llama whose laws are far from uniform, in eval mode."""
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
