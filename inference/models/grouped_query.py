"""Grouped-query attention under a mask on an accelerator: query heads that share keys become rows of one longer query.

Torch's flash kernel takes no mask and its memory-efficient one no groups; with both asked for, most GPUs run a product,
a softmax and a product over keys and values that were copied for every head. With the heads of a group side by side in
the query length nothing is grouped any more: one kernel, keys and values read once a group.

A rows, n ids a row, H query heads, G key/value heads, D head size, L slots read; H/G heads of a group.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

ALIGNED = 16  # the kernel copies a mask whose rows do not begin at multiples of so many elements


def folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q (A, H, n, D), k and v (A, G, L, D), mask from `folded_mask`, None: all is seen -> (A, n, H D)."""
    A, H, n, D = q.shape
    G = k.shape[1]
    found = F.scaled_dot_product_attention(q.reshape(A, G, -1, D), k, v, mask, scale=scale)
    return found.unflatten(2, (H // G, n)).permute(0, 3, 1, 2, 4).reshape(A, n, -1)


def folded_mask(mask: Tensor, heads: int) -> Tensor:
    """mask (A, 1, n, L), added to scores -> (A, 1, heads n, L), the same for each of the heads of a group."""
    A, _, n, L = mask.shape
    wide = torch.zeros(A, heads, n, -(-L // ALIGNED) * ALIGNED, dtype=mask.dtype, device=mask.device)
    wide[..., :L] = mask
    return wide.flatten(1, 2).unsqueeze(1)[..., :L]
