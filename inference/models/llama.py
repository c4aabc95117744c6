"""The Llama family's forward in few operations, as a function of tensors.

A pass over a few ids is bound by how many operations it launches, not by their size: stock modules launch some sixty
a layer. Here a layer is two norms, four matrix products (query, key and value in one, gate and up in one), one
rotation and one attention, on the model's own weights: projections that are applied together are laid side by side in
memory once, and the model's parameters become views of them, so nothing is held twice and training still sees them.
Being a function of tensors alone, it is compiled once for all models of a shape (`compiled`).

A rows, n ids a row, H query heads, G key/value heads, D head size, L slots read.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from inference.models.passes import LAST

Keep = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Linear(NamedTuple):
    """weight (out, in); scale (out,) when it is in int8, else None: row r stands for scale[r] * weight[r]. packed: the
    weight once more, as a CPU's kernel reads it, which would else arrange it at every call."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None
    packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
            return found
        if self.scale is None:
            return F.linear(x, self.weight, self.bias)
        flat = torch._weight_int8pack_mm(x.flatten(0, -2), self.weight, self.scale)
        wide = flat.view(*x.shape[:-1], -1)
        return wide if self.bias is None else wide + self.bias


class Layer(NamedTuple):
    """Weights of one decoder layer; `qkv` and `gate_up` are projections side by side."""

    first: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    second: Tensor
    gate_up: Linear
    down: Linear


class Weights(NamedTuple):
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Linear


class Shape(NamedTuple):
    """heads H, groups G, size D, scale of the attention scores, eps of the norms; held: dtype of keys and values."""

    heads: int
    groups: int
    size: int
    scale: float
    eps: float
    held: torch.dtype


def states(
    ids: Tensor,
    weights: Weights,
    shape: Shape,
    cos: Tensor,
    sin: Tensor,
    keep: Keep,
    attend: Attend,
    layers: Collection[int] = (LAST,),
    stored: bool = False,
) -> dict[int, Tensor]:
    """ids (A, n) -> states (A, n, W) of `layers`, see `passes`; what is behind the last of them is not run.

    cos, sin (A or 1, n, 1, D): see `angles`. keep(i, k, v): stores layer i's new keys and values (A, G, n, D), returns
    all it may read (A, G, L, D). attend(q, k, v): of `flash`, `batched` or
    `grouped_query.folded`, queries (A, H, n, D) -> (A, n, H D). stored: all keys and values are kept nevertheless, of
    the last decoder layer nothing more.
    """
    x, found = F.embedding(ids, weights.embedding), {}
    needed = len(weights.layers) if LAST in layers else max(layers, default=0)
    for i, w in enumerate(weights.layers if stored else weights.layers[:needed]):
        if i in layers:
            found[i] = x
        A, n, _ = x.shape
        turned = w.qkv(_norm(x, w.first, shape.eps)).view(A, n, -1, shape.size).to(shape.held)
        q, k, v = (part.transpose(1, 2) for part in _rotated(turned, w, shape, cos, sin))
        k, v = keep(i, k, v)
        if stored and i + 1 == len(weights.layers) > needed:
            return found
        x = x + w.out(attend(q, k, v).to(x.dtype))
        gate, up = w.gate_up(_norm(x, w.second, shape.eps)).chunk(2, -1)
        x = x + w.down(F.silu(gate) * up)
    if needed in layers:
        found[needed] = x
    if LAST in layers:
        found[LAST] = _norm(x, weights.norm, shape.eps)
    return found


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: Shape) -> Tensor:
    """Attention (A, n, H D) by torch's own kernels; mask (A, 1, n, L) is added to the scores, None: all is seen."""
    grouped = shape.heads != shape.groups
    found = F.scaled_dot_product_attention(q, k, v, mask, scale=shape.scale, enable_gqa=grouped)
    return found.transpose(1, 2).flatten(2)


def batched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, shape: Shape) -> Tensor:
    """The same in two batched products, heads of a group side by side: for a few ids a row on a CPU, whose kernel
    takes half as long again. mask (A G, H/G n, L), see `grouped`."""
    A, H, n, D = q.shape
    queries = q.reshape(A * shape.groups, -1, D)
    scores = torch.baddbmm(mask, queries, k.flatten(0, 1).transpose(1, 2), alpha=shape.scale)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(A, H, n, D).transpose(1, 2).flatten(2)


def grouped(mask: Tensor, shape: Shape) -> Tensor:
    """(A, 1, n, L) -> (A G, H/G n, L), one for every head."""
    A, _, n, L = mask.shape
    return mask.expand(A, shape.heads, n, L).reshape(A * shape.groups, -1, L)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm with the rounding of transformers' modules: float32 inside, the weight applied after."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotated(states: Tensor, w: Layer, shape: Shape, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(A, n, H+2G, D) -> queries (A, n, H, D), keys and values (A, n, G, D)."""
    turned, v = states.split((shape.heads + shape.groups, shape.groups), 2)
    if w.q_norm is not None and w.k_norm is not None:
        q, k = turned.split((shape.heads, shape.groups), 2)
        turned = torch.cat((_norm(q, w.q_norm, shape.eps), _norm(k, w.k_norm, shape.eps)), 2)
    turned = turned * cos + turned.roll(shape.size // 2, -1) * sin
    q, k = turned.split((shape.heads, shape.groups), 2)
    return q, k, v


def angles(model: PreTrainedModel, slots: int) -> tuple[Tensor, Tensor]:
    """cos and sin (slots, D) of all positions, as the model's own rotary module gives them; sin carries the sign of
    the rotation by `roll`."""
    body: Any = model.base_model
    like = torch.empty((), dtype=model.dtype, device=model.device)
    cos, sin = body.rotary_emb(like, torch.arange(slots, device=model.device)[None])
    half = sin.shape[-1] // 2
    return cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
