"""Faults of a forward that show late in a text alone: each is planted with a monkeypatch."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inference.models import forward, llama

LATE, NEW, V = 512, 340, 16  # positions of the model, tokens that reach past the faults, tokens of its vocabulary


def angles_modulo_256(patch: pytest.MonkeyPatch) -> None:
    plain = llama.angles

    def wrapped(model: Any, slots: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = plain(model, slots, like)
        at = torch.arange(slots) % 256
        return cos[at], sin[at]

    patch.setattr(llama, "angles", wrapped)


def a_cache_that_forgets_past_300(patch: pytest.MonkeyPatch) -> None:
    def mask(self: forward.Lean, window: Any) -> torch.Tensor:
        slots = torch.arange(window.limit)
        seen = forward.visible(window, self.model.device)
        lost = (slots >= 300) & (slots != window.positions.unsqueeze(-1))
        return forward.additive(seen & ~lost.unsqueeze(1), self.shape.held)

    patch.setattr(forward.Lean, "mask", mask)


def rope_scaling_left_out(patch: pytest.MonkeyPatch) -> None:
    plain = llama.angles

    def unscaled(model: Any, slots: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = plain(model, slots, like)
        half = cos.shape[-1] // 2
        inverse = 10_000.0 ** -(torch.arange(half) / half)
        round = (torch.arange(slots)[:, None] * inverse).repeat(1, 2)
        signs = torch.tensor([-1.0] * half + [1.0] * half)
        return round.cos().to(cos), (round.sin() * signs).to(sin)

    patch.setattr(llama, "angles", unscaled)


FAULTS = [angles_modulo_256, a_cache_that_forgets_past_300, rope_scaling_left_out]


def scaled(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A random Llama of one layer whose slow rotations are scaled (llama3), as those of long contexts are."""
    torch.manual_seed(3)
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LATE,
        initializer_range=0.6,
        rope_parameters={**rope, "original_max_position_embeddings": 64, "rope_theta": 10_000.0},
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype).eval()
