"""A sum over chunks of positions whose gradients are made with its values: nothing is computed twice.

Recomputing a chunk in backward costs both heads once more, half as much again at a real vocabulary. The gradients of a
sum are known up to the one number that backward brings, so they are made while the chunk is there, and kept: as much as
the hidden states and the head's weights take (Hsu et al. 2024, 2410.10989, do so for cross-entropy).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# positions (n,), hidden states of these (n, D) -> values (n,) to be summed, and what else was found (n, F)
Part = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def summed(part: Part, hidden: Tensor, chunks: Sequence[Tensor], parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of all values, differentiable once in hidden (N, D) and `parameters`, and all that was found, not
    differentiable. Values must depend on nothing else that needs a gradient, on its own row of `hidden` each."""
    total, found = _Summed.apply(part, chunks, hidden, *parameters)
    return total, found


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Part, chunks: Sequence[Tensor], hidden: Tensor, *parameters: Tensor) -> Any:
        wanted = [p for p in parameters if p.requires_grad]
        slopes = [torch.zeros_like(tensor) for tensor in (hidden, *wanted)]
        total, found = None, []
        for i in chunks:
            with torch.enable_grad():
                rows = hidden[i].detach().requires_grad_()
                values, besides = part(i, rows)
                value = values.sum()
                here = torch.autograd.grad(value, [rows, *wanted])
            slopes[0].index_copy_(0, i, here[0])
            for slope, more in zip(slopes[1:], here[1:], strict=True):
                slope += more
            total = value.detach() if total is None else total + value.detach()
            found.append(besides.detach())
        ctx.save_for_backward(*slopes)
        ctx.wanted = [p.requires_grad for p in parameters]
        every = torch.cat(found)
        ctx.mark_non_differentiable(every)
        return total, every

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> Any:
        slopes = (made * slope.to(made.dtype) for made in ctx.saved_tensors)
        return None, None, next(slopes), *(next(slopes) if wanted else None for wanted in ctx.wanted)
