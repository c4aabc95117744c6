"""Weights in 4 bits whose errors compensate one another (GPTQ: Frantar et al. 2022, 2210.17323), with which the
training of an early exit in 4 bits begins.

A projection is rounded input by input, with the scales that the network has. What rounding adds to its outputs on some
texts is taken from the weights of the inputs that are not rounded yet.

N tokens, D inputs of a projection.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.models.packing import GROUP, nearest
from inference.models.pretrained import decoder_layers
from inference.proposers.early_exit import ExitNetwork

TOKENS = 2**15  # enough texts to fit to
SHARED = 2**31  # bytes of the sums of one pass over the texts
DAMPED = 0.01  # of the mean square of the inputs
BLOCK = 2 * GROUP  # inputs after whose rounding all later ones are changed


@torch.no_grad()
def fit_rounding(network: ExitNetwork, target: PreTrainedModel, texts: Iterable[Tensor]) -> None:
    """Set the weights of an exit in 4 bits, in place, so that their products with what the target's projections read on
    these texts are near the target's. texts: token ids (n,) each."""
    ids = [text for text in texts if len(text)]
    blocks = decoder_layers(target)[: network.config.changed]
    largest = sum(inside**2 for _, inside in network.config.projections.values()) * 4
    step = max(1, SHARED // largest)
    for begin in range(0, len(blocks), step):
        some: dict[Any, Any] = {
            (at, name): block.get_submodule(name)
            for at, block in enumerate(blocks[begin : begin + step], begin)
            for name in network.config.projections
        }
        for (at, name), squares in products(target, some, ids).items():
            change = network.in_four_bits(at, name)
            change.begin(compensated(some[at, name].weight.float(), change.scale(), squares), change.scale())


def products(target: PreTrainedModel, modules: dict[Any, nn.Module], texts: list[Tensor]) -> dict[Any, Tensor]:
    """Return x^T x (D, D) in float32 of the inputs x (N, D) of each module, over the tokens of all texts. Modules that
    read the same tensor share a sum."""
    sums, first, last = dict[Any, Tensor](), dict[Any, Any](), list[Any]([None, None])

    def seen(name: Any, x: Tensor) -> None:
        if last[0] is not x:
            last[:] = x, name
            rows = x.flatten(0, -2).float()
            sums[name] = rows.T @ rows if name not in sums else sums[name].addmm_(rows.T, rows)
        first[name] = last[1]

    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: seen(name, args[0]))
        for name, module in modules.items()
    ]
    try:
        for text in texts:
            target.base_model(input_ids=text.unsqueeze(0).to(target.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: sums[first[name]] for name in modules}


def compensated(weight: Tensor, scales: Tensor, squares: Tensor) -> Tensor:
    """Return the weight (out, D) to round with these scales (out, groups), whose rounded outputs are near those of the
    given weight. weight (out, D), in float32. squares (D, D): x^T x of the inputs, the largest of which are rounded
    first, while most others can still make up for their errors."""
    order = squares.diagonal().argsort(descending=True)
    left, squares, scales = weight[:, order], squares[order][:, order].double(), scales.to(weight)
    mean = squares.diagonal().mean().clamp(min=1e-12)
    squares = squares + DAMPED * mean * torch.eye(len(squares), dtype=squares.dtype, device=squares.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(squares))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    to_round, groups = torch.empty_like(left), (order // (len(order) // scales.shape[1])).tolist()
    for begin in range(0, left.shape[1], BLOCK):
        end, errors = min(begin + BLOCK, left.shape[1]), []
        for at in range(begin, end):
            column, scale = left[:, at].clone(), scales[:, groups[at]]
            to_round[:, order[at]] = column
            errors.append((column - nearest(column / scale) * scale) / factor[at, at])
            left[:, at:end] -= errors[-1].unsqueeze(1) * factor[at, at:end]
        left[:, end:] -= torch.stack(errors, 1) @ factor[begin:end, end:]
    return to_round
