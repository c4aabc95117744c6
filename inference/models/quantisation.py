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
    """Raise ValueError for a quantisation that is unknown, that is not available, or that the checkpoint cannot have
    because it is quantised itself. path, config: those of the checkpoint."""
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
    """Return the arguments of `from_pretrained` for a quantisation. There are none for "none", since None as a
    quantization_config would drop the checkpoint's own."""
    settings = QUANTISATIONS[quantisation]
    return {"quantization_config": BitsAndBytesConfig(**settings)} if settings else {}


def unpack(model: PreTrainedModel) -> None:
    """Prevent bitsandbytes from packing the model's 4-bit weights for passes on a CPU, by changing its layers in place.
    Once the state has been read, as a fingerprint does, packing goes wrong and changes the distribution (observed total
    variation 0.50)."""
    for module in model.modules():
        if hasattr(module, PACKS):
            setattr(module, PACKS, False)


def load_as(
    path: str,
    quantisation: str,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """Return the model that `load_model` loads from a path, in a quantisation. A checkpoint that is quantised itself is
    loaded as it is. dtype, device: as in `load_model`. Raises ValueError for a quantisation that is unknown or needs
    bitsandbytes."""
    if quantisation == "none" or weights_quantisation(config := AutoConfig.from_pretrained(path)):
        return load_model(path, dtype, device=device)
    refuse_quantisation(path, quantisation, config)
    model = load_model(path, dtype, device=device, **options_of(quantisation))
    unpack(model)
    return in_int8_rows(model) if quantisation == INT8_ROWS else model
