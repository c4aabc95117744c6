"""The head of a causal LM apart from the rest: logits of states, as the model itself makes them."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def head_of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """States (..., D) behind the final norm -> logits (..., V); heads that cap or scale their logits are followed."""
    head: Any
    head, config = model.get_output_embeddings(), model.config.get_text_config().to_dict()
    cap, scale = config.get("final_logit_softcapping"), _scale(config)

    def logits(states: Tensor) -> Tensor:
        out: Tensor = head(
            states.to(head.weight.dtype) if not torch.is_autocast_enabled(states.device.type) else states
        )
        out = out if scale == 1.0 else out * scale
        return torch.tanh(out / cap) * cap if cap else out

    return logits


def _scale(config: dict[str, Any]) -> float:
    """What a config has logits multiplied by; Granite's divide them by what HyperCLOVA's, under the same name, multiply
    them by."""
    scale = float(config.get("logit_scale") or config.get("logits_scaling") or 1.0)
    return 1 / scale if str(config.get("model_type")).startswith("granite") else scale


@torch.no_grad()
def own_logits(model: PreTrainedModel, at: list[int], **inputs: Tensor) -> Tensor:
    """Logits (n, V) after the ids `at` of one text, by the model's own forward without a cache. Where its code can, its
    head reads these rows alone."""
    rows = torch.tensor(at, device=model.device)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits: Tensor = model(**inputs, use_cache=False, logits_to_keep=rows).logits[0]
        return logits if len(logits) == len(at) else logits[rows]
    return model(**inputs, use_cache=False).logits[0, rows]
