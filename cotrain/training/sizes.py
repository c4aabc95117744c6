"""How large a model is, from its parameters' shapes."""

from typing import NamedTuple

from transformers import PreTrainedModel

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
CHOSEN = "num_experts_per_tok"


class Size(NamedTuple):
    """parameters: of the whole model. active: those that one token is multiplied with, which is what a pass costs: the
    head, and of experts those that are chosen; an embedding that is only looked up is not among them."""

    parameters: int
    active: int


def size_of(model: PreTrainedModel) -> Size:
    """Of a model, on the meta device too."""
    config = model.config.get_text_config()
    share = next((getattr(config, CHOSEN) / getattr(config, key) for key in EXPERTS
                  if getattr(config, key, None) and getattr(config, CHOSEN, None)), 1.0)  # fmt: skip
    looked_up, head = model.get_input_embeddings(), model.get_output_embeddings()
    total, active = 0, 0.0
    for name, weight in model.named_parameters():
        total += weight.numel()
        if looked_up is not None and weight is looked_up.weight and (head is None or head.weight is not weight):
            continue
        active += weight.numel() * (share if ".experts." in name else 1.0)
    return Size(total, int(active))
