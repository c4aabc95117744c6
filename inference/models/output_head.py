"""The head of a causal LM apart from the rest: logits of states, as the model itself makes them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def head_of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """States (..., D) behind the final norm -> logits (..., V); heads that cap or scale their logits are followed."""
    head: Any
    head, config = model.get_output_embeddings(), model.config.get_text_config().to_dict()
    cap, scale = config.get("final_logit_softcapping"), config.get("logit_scale") or 1.0

    def logits(states: Tensor) -> Tensor:
        out: Tensor = head(
            states.to(head.weight.dtype) if not torch.is_autocast_enabled(states.device.type) else states
        )
        out = out if scale == 1.0 else out * scale
        return torch.tanh(out / cap) * cap if cap else out

    return logits
