"""A draft's weights rounded to fewer bits: to train it as it will be served, and to measure the cost of rounding."""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.proposers.quantised import BITS, round_bits

QUANTISATIONS = ("none", "int8", "nf4")


def quantised(weight: Tensor, quantisation: str) -> Tensor:
    """weight (out, in) rounded to numbers of a quantisation, in its own dtype, see `round_bits`. Raises ValueError for
    an unknown one."""
    if quantisation == "none":
        return weight
    if quantisation in BITS:
        return round_bits(weight, quantisation)
    raise ValueError(f"matrix.drafts: {quantisation!r} is none of {', '.join(QUANTISATIONS)}")


@torch.no_grad()
def rounded(draft: PreTrainedModel, quantisation: str) -> PreTrainedModel:
    """A copy with rounded projections, and the head as it is served: in int8 rounded as on a CPU here, in nf4 whole as
    by bitsandbytes. Its embeddings stay whole, tied to the head or not."""
    network = copy.deepcopy(draft)
    head = network.get_output_embeddings()
    for weight in projections(network).values():
        weight.copy_(quantised(weight, quantisation))
    if quantisation == "int8" and head is not None:  # a new tensor: embeddings tied to the head stay whole
        head.weight = nn.Parameter(quantised(head.weight, quantisation), requires_grad=False)
    return network


def projections(draft: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of its linear layers except the head, by name."""
    head = draft.get_output_embeddings()
    linear = [(name, module) for name, module in draft.named_modules() if isinstance(module, nn.Linear)]
    return {name: module.weight for name, module in linear if module is not head}


def refuse_unknown(draft: PreTrainedModel, key: str = "draft.quantisation") -> None:
    """Raise ValueError, beginning with the key, for a draft with matrices that are no `nn.Linear`, as those of GPT-2 or
    fused experts: they would stay whole here, while a serving engine rounds or rejects them."""
    known = {id(weight) for weight in projections(draft).values()}
    known |= {id(module.weight) for module in draft.modules() if isinstance(module, nn.Embedding)}
    if (head := draft.get_output_embeddings()) is not None:  # kinds that share the target's head have none
        known.add(id(head.weight))
    others = [name for name, weight in draft.named_parameters() if weight.ndim > 1 and id(weight) not in known]
    if others:
        raise ValueError(f"{key}: {type(draft).__name__} has {len(others)} matrices that are no nn.Linear, whose "
                         f"rounding is not known ({others[0]}): ask for none")  # fmt: skip
