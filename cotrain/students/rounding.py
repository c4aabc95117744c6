"""A draft's weights as numbers of fewer bits: to train it as it will be served, and to measure what rounding costs."""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.proposers.quantised import BITS, in_bits

KINDS = ("none", "int8", "nf4")


def quantised(weight: Tensor, kind: str) -> Tensor:
    """weight (out, in) as numbers that `kind` can hold, in its own dtype, see `quantised.in_bits`. Raises ValueError
    for another kind."""
    if kind == "none":
        return weight
    if kind in BITS:
        return in_bits(weight, kind)
    raise ValueError(f"matrix.drafts: {kind!r} is none of {', '.join(KINDS)}")


@torch.no_grad()
def rounded(draft: PreTrainedModel, kind: str) -> PreTrainedModel:
    """A copy whose projections are held so, the head as bitsandbytes leaves it: in int8 as a CPU serves it here, in nf4
    whole. Its embeddings keep their numbers, tied to the head or not."""
    made = copy.deepcopy(draft)
    head = made.get_output_embeddings()
    for weight in projections(made).values():
        weight.copy_(quantised(weight, kind))
    if kind == "int8" and head is not None:
        head.weight = nn.Parameter(quantised(head.weight, kind), requires_grad=False)  # not the embeddings tied to it
    return made


def projections(draft: PreTrainedModel) -> dict[str, Tensor]:
    """Weights of its matrix products, but the head's, by name."""
    head = draft.get_output_embeddings()
    linear = [(name, module) for name, module in draft.named_modules() if isinstance(module, nn.Linear)]
    return {name: module.weight for name, module in linear if module is not head}


def refuse_unknown(draft: PreTrainedModel, key: str = "draft.quantisation") -> None:
    """Raise ValueError, beginning with the key, for a draft with matrices that are no `nn.Linear`, as those of GPT-2 or
    fused experts: they would stay whole here, and be rounded, or refused, where it is served."""
    known = {id(weight) for weight in projections(draft).values()}
    known |= {id(module.weight) for module in draft.modules() if isinstance(module, nn.Embedding)}
    if (head := draft.get_output_embeddings()) is not None:  # heads that read a target's states have none
        known.add(id(head.weight))
    others = [name for name, weight in draft.named_parameters() if weight.ndim > 1 and id(weight) not in known]
    if others:
        raise ValueError(f"{key}: {type(draft).__name__} has {len(others)} matrices that are no nn.Linear, whose "
                         f"rounding is not known ({others[0]}): ask for none")  # fmt: skip
