"""Bytes of keys and values that an engine holds."""

import json
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from inference.models.cache import SlotCache, Window
from inference.models.limits import positions_of
from inference.models.lm import FIRST_SLOTS

MOST_SPARE = 8  # slots in which prompts wait, stored


def spare_slots(rows: int) -> int:
    """Slots of an engine after those of its rows, in which the next prompts wait: half as many, 8 at most."""
    return min((rows + 1) // 2, MOST_SPARE) if rows > 1 else 0


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Of the keys and values of one token in all layers, held in `dtype`."""
    kind: Any = type(config)
    try:
        return _stored(kind, config.to_json_string()) * dtype.itemsize
    except (RuntimeError, ValueError):  # experts that read values; a config that names no model
        return _written(config.get_text_config()) * dtype.itemsize


@lru_cache(64)
def _stored(kind: Any, said: str) -> int:
    """Numbers that a model without storage stores of one token: its code knows which layers share those of others."""
    config = kind.from_dict(json.loads(said))
    with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.inference_mode():
        model = AutoModelForCausalLM.from_config(config).eval()
        cache = SlotCache(config.get_text_config().num_hidden_layers, 1, 1)
        ids = torch.zeros(1, 1, dtype=torch.int64)
        cache.aim(Window(0, 1, ids, 0, 1))
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        model(input_ids=ids, position_ids=ids, attention_mask=seen, past_key_values=cache, use_cache=True)
    stores = [store for store in cache.stores if store.is_initialized]
    return sum(store.keys.numel() + store.values.numel() for store in stores)


def _written(config: PreTrainedConfig) -> int:
    """The same by what a config says."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size)


def cache_bytes(config: PreTrainedConfig, rows: int, length: int, dtype: torch.dtype) -> int:
    """Of an engine's keys and values once a row holds `length` tokens: every slot, spare ones too, has room for as many
    tokens, doubled until they fit and at most those of the model's context. A network without attention has none."""
    if not getattr(config.get_text_config(), "num_attention_heads", 0):
        return 0
    slots = FIRST_SLOTS
    while slots < length:
        slots *= 2
    slots = max(length, min(slots, positions_of(config.get_text_config())))
    return (rows + spare_slots(rows)) * slots * token_bytes(config, dtype)
