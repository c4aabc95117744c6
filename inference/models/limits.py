"""Features of a model that passes over rows of different lengths cannot support, and its longest context."""

from transformers import PreTrainedConfig, PreTrainedModel

MASKED_ATTENTION = ("sdpa", "eager")
# kinds of layer, of `layer_types` or `attention_layers`, whose masks are known
KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")  # config keys
UNLIMITED = 2048  # tokens of a text where a config has none of them


def refuse_unsupported(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise ValueError for a model whose state cannot be cut back, or which overlooks a 4-d mask."""
    settings, name = config.to_dict(), type(model).__name__
    if config._attn_implementation not in MASKED_ATTENTION:
        raise ValueError(f"{name}: attention {config._attn_implementation!r} takes no 4-d mask; "
                         f"load it with attn_implementation='sdpa'")  # fmt: skip
    if model._is_stateful or config.is_encoder_decoder:
        raise ValueError(f"{name}: only the keys and values of a causal decoder can be rolled back here")
    kinds = {*(settings.get("layer_types") or ()), *(settings.get("attention_layers") or ())}
    if kinds - KINDS:
        raise ValueError(f"{name}: layers of kind {', '.join(sorted(kinds - KINDS))} cannot be given a mask a row; "
                         f"{', '.join(sorted(KINDS))} can")  # fmt: skip


def biased_by_slots(config: PreTrainedConfig) -> bool:
    """Whether attention is biased by the distance of slots, as MPT's: small biases, which the noise of half precision
    would hide from a comparison of logits."""
    settings = config.get_text_config().to_dict()
    return bool(settings.get("alibi") or (settings.get("attn_config") or {}).get("alibi"))


def positions_of(config: PreTrainedConfig) -> int:
    """Most tokens of a text. Past LongRoPE's first range a row's rotation would depend on the longest row's; Llama 4
    scales attention by one position for all rows, by 1 in the first range."""
    settings = config.to_dict()
    rope, limit = settings.get("rope_parameters") or {}, length_of(config)
    if rope.get("rope_type") == "longrope":
        limit = min(rope["original_max_position_embeddings"], limit)
    if "max_seq_len" in settings:
        limit -= 1  # MPT's biases are a table of so many slots, one of which is for padding
    if settings.get("attn_temperature_tuning") and settings.get("floor_scale"):
        limit = min(settings["floor_scale"] - 1, limit)
    return limit


def length_of(config: PreTrainedConfig) -> int:
    """The longest text that a config allows, in tokens."""
    lengths = [getattr(config, key, None) for key in LENGTHS]
    return next((length for length in lengths if length), UNLIMITED)
