"""Quantisations of a target's weights, by name. A target is trained for and served in one of them."""

from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoConfig, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from inference.models.llama import INT8_ROWS, in_int8_rows
from inference.models.pretrained import load_model, weights_quantisation

QUANTISATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
    INT8_ROWS: {},  # by `in_int8_rows`
}
PACKS = "support_avx512bf16_for_cpu"  # attribute of bitsandbytes' 4-bit layers


def refuse_quantisation(path: str, quantisation: str, config: PretrainedConfig) -> None:
    """Raise ValueError for a quantisation that is unknown or not installed, and for any quantisation of a checkpoint
    that is already quantised. path: the checkpoint's, for messages. config: the checkpoint's config."""
    if quantisation not in QUANTISATIONS:
        raise ValueError(f"quantisation must be one of {', '.join(QUANTISATIONS)}, not {quantisation!r}")
    if quantisation == "none":
        return
    if weights_quantisation(config):
        raise ValueError(f"quantisation: {path} is already quantised; set quantisation=none")
    if QUANTISATIONS[quantisation] and find_spec("bitsandbytes") is None:
        raise ValueError(
            f"quantisation={quantisation} needs bitsandbytes: type pip install bitsandbytes, or set quantisation=none"
        )


def options_of(quantisation: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a quantisation, by name. For "none" there are none:
    quantization_config=None would drop the checkpoint's own."""
    settings = QUANTISATIONS[quantisation]
    return {"quantization_config": BitsAndBytesConfig(**settings)} if settings else {}


def unpack(model: PreTrainedModel) -> None:
    """Prevent bitsandbytes from packing the model's 4-bit weights for passes on a CPU, by changing its layers in place.
    After the model's state has been read, for example by a checksum, packing goes wrong and changes the distribution
    (total variation 0.50 was observed)."""
    for module in model.modules():
        if hasattr(module, PACKS):
            setattr(module, PACKS, False)


def load_as(
    path: str,
    quantisation: str,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """Return the model at a path, loaded in a quantisation. A checkpoint that is already quantised is loaded as it is.
    dtype: of the weights; None for the checkpoint's own, or float32 on a CPU that would emulate it. device: None for
    the CPU. Raises ValueError for a quantisation that is unknown or needs bitsandbytes."""
    if quantisation == "none" or weights_quantisation(config := AutoConfig.from_pretrained(path)):
        return load_model(path, dtype, device=device)
    refuse_quantisation(path, quantisation, config)
    model = load_model(path, dtype, device=device, **options_of(quantisation))
    unpack(model)
    return in_int8_rows(model) if quantisation == INT8_ROWS else model
