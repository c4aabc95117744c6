"""Properties of a transformers model: dtypes and quantisation, limits of its config, its head, states of its layers.

A CPU without instructions for half precision emulates it. Products of forty rows then take longer in bfloat16 than in
float32: seven times as long with AVX2, two to four times as long with AVX-512 but without bfloat16 instructions.
Converting a checkpoint to float32 changes no weight, and `packing` reads its weights in 16 bits.

A rows, n ids per row, D width, V vocabulary.
"""

import copy
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)

from inference.models.passes import LAST

SUPPORTED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
MASKED_ATTENTION = ("sdpa", "eager")
# layer types, of `layer_types` or `attention_layers`, for which masks can be made
LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions")  # config keys
UNLIMITED = 2048  # most tokens of a text, if a config has none of these keys
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
TIED = "tied"  # a key of quantization_config: tie_word_embeddings before quantisation, if that has changed it


def load_model(
    path: str,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Return a causal LM or an encoder-decoder in eval mode, from a folder or hub id, from safetensors only.

    dtype: of the weights; None for the checkpoint's own, or float32 where `widened` casts to it. trust_remote_code:
    whether code in the folder may run. device: None for the CPU. options: further arguments of `from_pretrained`.
    Raises ValueError for an unknown dtype, for a device that this machine lacks, for a model that writes no text, and
    if the weights' sizes differ from config.json.
    """
    if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype) and dtype != "auto":
        raise ValueError(f"dtype must be auto, float32, bfloat16, float16 or float64, not {dtype!r}")
    model_class = _auto_class_at(path, trust_remote_code)
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"device={device!r}: {str(error).splitlines()[0]}; give a device of this machine, such as cpu"
            ) from error
        options["device_map"] = device
    try:
        model: PreTrainedModel = model_class.from_pretrained(
            path, dtype=dtype or "auto", use_safetensors=True, trust_remote_code=trust_remote_code, **options
        ).eval()
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"{path}: its weights have other sizes than its config.json says: use the config.json that belongs to them"
        ) from error
    return model if dtype else widened(model)


def _auto_class_at(path: str, trust_remote_code: bool) -> Any:
    try:
        return auto_class(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))
    except OSError:  # the folder of an adapter has no config of a model; of any other, loading says what is missing
        return AutoModelForCausalLM


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that makes the language model of a config. Raises ValueError for a model that
    writes no text (such as a model of images), and for an encoder that sees later tokens (such as BERT)."""
    spoken = type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
    sequences = AutoModelForSpeechSeq2Seq if spoken else AutoModelForSeq2SeqLM
    model_class: Any = sequences if config.is_encoder_decoder else AutoModelForCausalLM
    if type(config) not in model_class._model_mapping and model_class.__name__ not in (
        getattr(config, "auto_map", None) or {}
    ):
        raise ValueError(
            f"{config.name_or_path} is a model of type {config.model_type}, which writes no text: name a "
            "causal language model, or an encoder-decoder that writes text"
        )
    encoder = model_class is AutoModelForCausalLM and type(config) in AutoModelForMaskedLM._model_mapping
    if encoder and getattr(config, "is_decoder", True) is False:
        raise ValueError(
            f"{config.name_or_path} is a masked language model ({config.model_type} with is_decoder "
            "false in its config.json), whose tokens see later ones: name a causal language "
            "model"
        )
    return model_class


# Dtypes and quantisation


def emulated(dtype: torch.dtype) -> bool:
    """Return whether this machine's CPU has no fast instructions for a dtype, so that it converts to float32 and
    back."""
    if dtype not in SUPPORTED:
        return False
    kernels = torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, SUPPORTED[dtype])()
    # oneDNN has kernels in bfloat16 for every CPU with AVX-512; instructions for it came later
    converts = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    return not kernels or (dtype == torch.bfloat16 and converts)


def half(device: str) -> torch.dtype:
    """Return bfloat16, or float32 if `device` is "cpu" and this machine's CPU would emulate bfloat16."""
    return torch.float32 if device == "cpu" and emulated(torch.bfloat16) else torch.bfloat16


def weights_quantisation(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the quantization_config in a model's config, or None if its weights are not quantised."""
    return config.to_dict().get("quantization_config")


def quantisation_of(config: PreTrainedConfig) -> str:
    """Return the name of the weights' quantisation: none, int8 or nf4 (bitsandbytes), or the method that the checkpoint
    names."""
    settings = weights_quantisation(config)
    if not settings:
        return "none"
    if settings.get("load_in_8bit"):
        return "int8"
    in_4bit = settings.get("load_in_4bit") and settings.get("bnb_4bit_quant_type")
    return str(in_4bit or settings.get("quant_method", "unknown"))


def widened(model: PreTrainedModel, copied: bool = False) -> PreTrainedModel:
    """Cast the model's weights to float32, in place, if it is on a CPU that would emulate their dtype. Quantised
    weights are not cast. Return the model. copied: whether to cast and return a copy instead."""
    if weights_quantisation(model.config) or model.device.type != "cpu" or not emulated(model.dtype):
        return model
    return cast(copy.deepcopy(model) if copied else model, torch.float32)


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast the model's weights to a dtype, in place, and return the model. Buffers that checkpoints do not store
    (rotary frequencies) are not cast, as in a model loaded in this dtype: rounded frequencies would be wrong by half a
    radian after 200 tokens."""
    buffers = [(m, name, m._buffers[name]) for m in model.modules() for name in m._non_persistent_buffers_set]
    nn.Module.to(model, dtype)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer
    return model


# What passes over rows of different lengths support


def refuse_unsupported(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise ValueError for a model whose state cannot be rolled back, or whose attention cannot use one mask per row.
    config: the model's text config."""
    settings, name = config.to_dict(), type(model).__name__
    if config._attn_implementation not in MASKED_ATTENTION:
        raise ValueError(
            f"{name}: its attention {config._attn_implementation!r} accepts no 4-d mask; load the model with "
            "attn_implementation='sdpa'"
        )
    if model._is_stateful:
        raise ValueError(
            f"{name}: its state cannot be rolled back after a rejected draft; use a model whose only state is keys and "
            "values"
        )
    types = {*(settings.get("layer_types") or ()), *(settings.get("attention_layers") or ())}
    if types - LAYER_TYPES:
        raise ValueError(
            f"{name}: its layers of type {', '.join(sorted(types - LAYER_TYPES))} cannot use one mask "
            f"per row; use a model whose layers are of type {', '.join(sorted(LAYER_TYPES))}"
        )


def whole_tensor(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return all values of an entry (`name`, `tensor`) of a module's state_dict(). accelerate may keep them elsewhere
    than in the module. A sharded tensor is gathered, which all processes must do together."""
    sharded: Any = tensor
    if hasattr(sharded, "full_tensor"):
        return sharded.full_tensor()
    if not tensor.is_meta:
        return tensor
    from accelerate.utils import align_module_device  # type: ignore[import-untyped]  # takes long, and is rarely needed

    module, _, part = name.rpartition(".")
    owner = model.get_submodule(module)
    with align_module_device(owner):
        return getattr(owner, part).detach()


def head_weight(model: PreTrainedModel) -> Tensor:
    """Return the weight (V, D) of the model's head, wherever accelerate keeps it."""
    head: Any = model.get_output_embeddings()
    return whole_tensor(head, "weight", head.weight.detach())


def layers_of(config: PreTrainedConfig) -> int:
    """Return the number of decoder layers in a config."""
    own = config.get_text_config()
    keys = ("num_decoder_layers", "decoder_layers") if own.is_encoder_decoder else ()
    return int(next((count for key in keys if (count := getattr(own, key, None))), own.num_hidden_layers))


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Return the number of last tokens that a sliding layer sees, or None if the model has no such layer."""
    settings = config.to_dict()
    width: int | None = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    types = settings.get("layer_types")
    return width if width and (not types or "sliding_attention" in types) else None


def biased_by_slots(config: PreTrainedConfig) -> bool:
    """Return whether attention is biased by the distance of slots, as in MPT. The biases are so small that in half
    precision a comparison of logits would not detect wrong ones."""
    settings = config.get_text_config().to_dict()
    return bool(settings.get("alibi") or (settings.get("attn_config") or {}).get("alibi"))


def longest_text(config: PreTrainedConfig) -> int:
    """Return the longest text, in tokens, that a pass over rows of different lengths supports.

    For LongRoPE and for Llama 4 this is the end of the first range of positions. Past it, the longest row would decide
    the rotation (LongRoPE) or the attention scale (Llama 4) of all rows.
    """
    whole = config.get_text_config()
    settings = whole.to_dict()
    rope, limit = settings.get("rope_parameters") or {}, length_of(whole)
    if rope.get("rope_type") == "longrope":
        limit = min(rope["original_max_position_embeddings"], limit)
    if "max_seq_len" in settings:
        limit -= 1  # MPT's biases are a table of so many slots, and padding needs one of them
    if settings.get("attn_temperature_tuning") and settings.get("floor_scale"):
        limit = min(settings["floor_scale"] - 1, limit)
    return limit


def id_of(config: PreTrainedConfig, name: str) -> Any:
    """Return the token id, or list of ids, under a key of a config, or None if the config lacks the key. Some families
    lack it. name: the key."""
    return getattr(config, name, None)


def special_ids(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the special ids of a config, see `id_of`, by the keys `SPECIAL`."""
    return {name: id_of(config, name) for name in SPECIAL}


def length_of(config: PreTrainedConfig) -> int:
    """Return the longest text that a config allows, in tokens."""
    lengths = [getattr(config, key, None) for key in LENGTHS]
    return next((length for length in lengths if length and length > 0), UNLIMITED)  # XLNet's is -1


# The head


def head_of(model: PreTrainedModel, ids: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function from states (..., D) after the final norm to logits (..., V). The function caps and scales the
    logits as the model's config says, and adds the bias of BART's logits. ids (n,): the tokens whose logits (..., n)
    are computed, for a head that is an `nn.Linear`; None for all."""
    head: Any
    head, config = model.get_output_embeddings(), model.config.get_text_config().to_dict()
    cap, scale = config.get("final_logit_softcapping"), _logit_scale(config)
    before = config["d_model"] ** -0.5 if config.get("scale_decoder_outputs") else 1.0  # T5's, of the states
    bias: Tensor | None = getattr(model, "final_logits_bias", None)
    if ids is not None:
        whole, head = head, torch.nn.utils.skip_init(torch.nn.Linear, head.in_features, len(ids), device="meta")
        rows = [
            None if one is None else one.detach()[ids.to(one.device)].to(ids.device)
            for one in (whole.weight, whole.bias)
        ]
        head.weight, head.bias = (None if one is None else torch.nn.Parameter(one, requires_grad=False) for one in rows)
        bias = None if bias is None else bias[:, ids.to(bias.device)].to(ids.device)

    def logits(states: Tensor) -> Tensor:
        states = states if before == 1.0 else states * before
        out: Tensor = head(
            states.to(head.weight.dtype) if not torch.is_autocast_enabled(states.device.type) else states
        )
        out = out if bias is None else out + bias[0]
        out = out if scale == 1.0 else out * scale
        return (torch.tanh(out / cap) * cap if cap else out).to(states.device)  # the head may be on another device

    return logits


def _logit_scale(config: dict[str, Any]) -> float:
    """Return the factor of the logits. Granite divides by the number in its config; HyperCLOVA multiplies by the number
    under the same key."""
    scale = float(config.get("logit_scale") or config.get("logits_scaling") or 1.0)
    return 1 / scale if str(config.get("model_type")).startswith("granite") else scale


@torch.no_grad()
def own_logits(model: PreTrainedModel, at: list[int], **inputs: Tensor) -> Tensor:
    """Return logits (n, V) of one text, from the model's own forward without a cache. at: the n positions (0-based)
    after which logits are returned; the head reads only these if the model's code can. inputs: arguments of the
    forward."""
    rows = torch.tensor(at, device=model.device)
    spread = hasattr(model, "_hf_hook")  # over devices: the rows would be on the first, the states on the last
    if not spread and "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits: Tensor = model(**inputs, use_cache=False, logits_to_keep=rows).logits[0]
        return logits if len(logits) == len(at) else logits[rows]
    return model(**inputs, use_cache=False).logits[0, rows]


# States of layers, by hooks that are on the model only during a pass. transformers' `output_hidden_states` is not used:
# it never removes its hooks, and returns no residual stream after the last decoder layer.


@contextmanager
def tapped(model: PreTrainedModel, layers: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """Yield a dictionary. A pass of the model or of its body, within the `with` block, puts the states (A, n, D) of
    `layers` into it, by layer (0: the embeddings, i: after i decoder layers, `LAST`: the input of the head).

    Raises ValueError if the model's decoder layers cannot be identified.
    """
    states: dict[int, Tensor] = {}
    device = model.device  # a layer may be on another one

    def store(layer: int) -> Callable[[Tensor], None]:
        return lambda value: states.update({layer: value.to(device)})

    handles = [_hooked(model, layer, store(layer)) for layer in layers]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _hooked(model: PreTrainedModel, layer: int, use: Callable[[Tensor], None]) -> Any:
    """Add a hook that passes the states (A, n, D) of a layer to `use` during each pass, and return the hook's handle.
    layer: 0 for the embeddings, i after i decoder layers, `LAST` for the input of the head."""
    if layer == LAST:
        body = model.get_decoder()  # both the model and its `base_model` run this body
        if body is model:
            return model.get_output_embeddings().register_forward_pre_hook(lambda _, args: use(args[0]))
        return body.register_forward_hook(lambda _, __, out: use(out[0]))
    blocks = decoder_layers(model)
    if layer == len(blocks):
        return blocks[-1].register_forward_hook(lambda _, __, out: use(out[0] if isinstance(out, tuple) else out))

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        use(args[0] if args else kwargs["hidden_states"])

    return blocks[layer].register_forward_pre_hook(before, with_kwargs=True)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the model's decoder layers in order: the first list of modules in its body that has as many entries as the
    config has layers.

    Raises ValueError if there is no such list.
    """
    count = layers_of(model.config)
    body = model.get_decoder() if model.config.is_encoder_decoder else model.base_model
    layers = next((m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)
    if layers is None:
        raise ValueError(
            f"{type(model).__name__}: it has no list of the {count} decoder layers that its config names, so their "
            "states cannot be read: use another model, or a draft that reads no states"
        )
    return layers
