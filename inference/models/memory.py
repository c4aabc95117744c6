"""Bytes of keys and values that an engine holds."""

import torch
from transformers import PreTrainedConfig

from inference.models.lm import FIRST_SLOTS

MOST_SPARE = 8  # slots in which prompts wait, stored


def spare_slots(rows: int) -> int:
    """Slots of an engine after those of its rows, in which the next prompts wait: half as many, 8 at most."""
    return min((rows + 1) // 2, MOST_SPARE) if rows > 1 else 0


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Of the keys and values of one token in all layers, held in `dtype`."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * dtype.itemsize)


def cache_bytes(config: PreTrainedConfig, rows: int, length: int, dtype: torch.dtype) -> int:
    """Of an engine's keys and values once a row holds `length` tokens: every slot, spare ones too, has room for as many
    tokens, doubled until they fit and at most those of the model's context. A network without attention has none."""
    if not getattr(config.get_text_config(), "num_attention_heads", 0):
        return 0
    slots = FIRST_SLOTS
    while slots < length:
        slots *= 2
    slots = max(length, min(slots, config.get_text_config().max_position_embeddings))
    return (rows + spare_slots(rows)) * slots * token_bytes(config, dtype)
