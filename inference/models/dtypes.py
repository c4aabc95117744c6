"""Which dtypes a machine computes natively.

A CPU without instructions for half precision emulates it: products of forty rows in bfloat16 took seven times what they
took in float32 on one with AVX2 alone, and twice to four times on one with AVX-512 that lacks those for bfloat16.
Weights of a checkpoint are the same numbers in float32.
"""

import copy
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

SUPPORTED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def emulated(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU computes in a dtype by converting to float32 and back."""
    if dtype not in SUPPORTED:
        return False
    kernels = torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, SUPPORTED[dtype])()
    return not kernels or (dtype == torch.bfloat16 and _converting())


def _converting() -> bool:
    """oneDNN has kernels in bfloat16 for every CPU with AVX-512; instructions for it came later."""
    return torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()


def half(device: str) -> torch.dtype:
    """bfloat16, or float32 on a CPU that would emulate it."""
    return torch.float32 if device == "cpu" and emulated(torch.bfloat16) else torch.bfloat16


def quantised(config: PretrainedConfig) -> dict[str, Any] | None:
    """How a model's weights are quantised, None where they are not."""
    return config.to_dict().get("quantization_config")


def quantisation_of(config: PretrainedConfig) -> str:
    """In a word: none, int8 and nf4 as bitsandbytes makes them, else the method that the checkpoint names."""
    found = quantised(config)
    if not found:
        return "none"
    if found.get("load_in_8bit"):
        return "int8"
    return str((found.get("load_in_4bit") and found.get("bnb_4bit_quant_type")) or found.get("quant_method", "unknown"))


def widened(model: PreTrainedModel, copied: bool = False) -> PreTrainedModel:
    """The model itself, its weights now in float32 if it is on a CPU that would emulate their dtype. Quantised ones
    stay as they are. copied: those of a copy are, and the model stays."""
    if quantised(model.config) or model.device.type != "cpu" or not emulated(model.dtype):
        return model
    return cast(copy.deepcopy(model) if copied else model, torch.float32)


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model itself, its weights now in a dtype. Buffers that no checkpoint holds (rotary frequencies) stay what
    they are, as in a model loaded in it: rounded ones turn by other angles, half a radian away after 200 tokens."""
    made = [(m, name, m._buffers[name]) for m in model.modules() for name in m._non_persistent_buffers_set]
    torch.nn.Module.to(model, dtype)
    for module, name, buffer in made:
        module._buffers[name] = buffer
    return model
