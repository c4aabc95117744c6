"""A forward pass for the Llama family that launches few operations. This module decides which models can use it,
prepares their weights, and defines the pass as a function of tensors.

The time of a pass over a few ids depends on the number of operations, not on their size. transformers' modules launch
some sixty per layer. Here a layer is two norms, four matrix products, one rotation and one attention, on the model's
own weights. Query, key and value are one product, gate and up another. Projections that are applied together are copied
into one tensor once, and the model's parameters become views of it. So these weights are not stored twice, and training
still changes them. `packed` and `int8` add a second copy of each projection (see `packing`). The pass is a
function of tensors, so that `replay` can record it.

Letters in shapes: A = rows, n = ids per row, H = query heads, G = key/value heads, D = head size, L = slots that are
read (a slot stores one token's keys and values), W = width of the model. Each key/value head serves a group of H/G
query heads.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from inference.models import packing
from inference.models.checksum import changes
from inference.models.markov import markov_of
from inference.models.passes import LAST
from inference.models.pretrained import TIED, sliding_window
from inference.models.small_heads import LowRank, SmallHead, spread_logits

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
RECORDING = "transformers.utils.output_capturing"  # where hooks are from that only record
ROTATIONS = ("default", "linear", "llama3", "yarn")  # angles that depend on a token's own position alone

SCALES = "scales"  # the buffer of an `nn.Linear` whose weight 4 bits represent (`Linear.scales`)
INT8_ROWS = "int8_rows"  # the quantisation method in the config of a model that `in_int8_rows` has rounded
ALIGNED = 16  # an attention kernel copies a mask if its rows do not begin at multiples of so many elements

LARGE = 4096  # outputs of a head of which a draft reads 4 bits: of fewer, the likely ones are many
SHORT = 16  # ids a row: longer passes are prefills, bound by arithmetic and not by launches

Keep = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Network = TypeVar("Network", bound=nn.Module)


class Linear(NamedTuple):
    """A projection. weight (out, in). bias (out,), or None. packed: multiplies by a second copy of the weight, in the
    order in which a CPU kernel reads it, perhaps with fewer bits; None without a copy. scales (out, in / GROUP): of
    groups of inputs, if each weight is a whole number from -8 to 7 times one; else None."""

    weight: Tensor
    bias: Tensor | None
    packed: packing.Widened | None = None
    scales: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) if self.packed is None else self.packed(x)

    @property
    def read_bytes(self) -> int:
        """Return the bytes of the weight that one product reads."""
        return self.weight.nbytes if self.packed is None else self.packed.nbytes


class Layer(NamedTuple):
    """The weights of one decoder layer. first, second (W,): of the norms before attention and before the MLP. qkv: the
    joined projection of queries, keys and values. out: the projection after attention. gate_up: the MLP's gate and up,
    joined. down: the MLP's last projection. q_norm, k_norm (D,): of the norms of queries and keys, None without such
    norms."""

    first: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    second: Tensor
    gate_up: Linear
    down: Linear


class Small(NamedTuple):
    """The weights of a `SmallHead`. down: the first factor of a low-rank head, None for a full-rank head. up: from
    states, or from the results of `down`, to one logit per row of the head. known (Vd,): the token id of each row, None
    if all `size` ids have a row."""

    up: Linear
    down: Linear | None
    known: Tensor | None
    size: int

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.up(x if self.down is None else self.down(x))
        return logits if self.known is None else spread_logits(logits, self.known, self.size)


class Weights(NamedTuple):
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Linear | Small


class ModelShape(NamedTuple):
    """The shape of a model. heads: H. groups: G. size: D. scale: factor of the attention scores. eps: of the norms.
    held: dtype of the stored keys and values."""

    heads: int
    groups: int
    size: int
    scale: float
    eps: float
    held: torch.dtype


def states_of(
    ids: Tensor,
    weights: Weights,
    shape: ModelShape,
    cos: Tensor,
    sin: Tensor,
    keep: Keep,
    attend: Attend,
    layers: Collection[int] = (LAST,),
) -> dict[int, Tensor]:
    """Return the states (A, n, W) of `layers` for ids (A, n), by layer (0: the embeddings, i: after i decoder layers,
    `LAST`: the input of the head). If they do not need the last layer's, it stops after storing keys and values.

    cos, sin (A or 1, n, 1, D): of the angles of the ids' positions. keep(i, k, v): stores layer i's new keys and values
    (A, G, n, D), and returns all keys and values that the layer may read (A, G, L, D). attend(q, k, v): `flash`,
    `batched` or `folded`, from queries (A, H, n, D) to (A, n, H D). weights, shape: of the model.
    """
    x, states = F.embedding(ids, weights.embedding).to(weights.norm.dtype), {}
    needed = len(weights.layers) if LAST in layers else max(layers, default=0)
    for i, w in enumerate(weights.layers):
        if i in layers:
            states[i] = x
        A, n, _ = x.shape
        turned = w.qkv(_norm(x, w.first, shape.eps)).view(A, n, -1, shape.size).to(shape.held)
        q, k, v = (part.transpose(1, 2) for part in _rotated(turned, w, shape, cos, sin))
        k, v = keep(i, k, v)
        if i + 1 == len(weights.layers) > needed:
            return states
        x = x + w.out(attend(q, k, v).to(x.dtype))
        gate, up = w.gate_up(_norm(x, w.second, shape.eps)).chunk(2, -1)
        x = x + w.down(F.silu(gate) * up)
    if needed in layers:
        states[needed] = x
    if LAST in layers:
        states[LAST] = _norm(x, weights.norm, shape.eps)
    return states


def of_kernel(layers: Sequence[Layer], norm: Tensor) -> list[Tensor] | None:
    """Return the tensors that the operator `inference::layers` of `kernels.cpp` reads: 12 per layer, and the
    final norm (W,). Return None if a projection of a layer has no copy for it."""
    none, flat = torch.empty(0), []
    for w in layers:
        products = [w.qkv.packed, w.out.packed, w.gate_up.packed, w.down.packed]
        if not all(products):
            return None
        qkv, out, gate_up, down = ((product.weight, product.bias) for product in cast(list[packing.Widened], products))
        norms = [none if norm is None else norm for norm in (w.q_norm, w.k_norm)]
        flat += [w.first, *qkv, *norms, *out, w.second, *gate_up, *down]
    return [*flat, norm]


def of_shape(shape: ModelShape) -> tuple[int, int, int, float, float]:
    """Return a model's shape as the operators of `kernels.cpp` read it."""
    return shape.heads, shape.groups, shape.size, shape.scale, shape.eps


def in_kernel(
    x: Tensor,
    flat: list[Tensor],
    shape: ModelShape,
    angles: tuple[Tensor, Tensor],
    stored: tuple[Sequence[Tensor], Sequence[Tensor]],
    slots: Tensor,
    mask: Tensor | None,
    limit: int,
    low: int,
    layers: Collection[int] = (LAST,),
    beside: tuple[Tensor, Tensor] | None = None,
) -> dict[int, Tensor]:
    """Return what `states_of` returns, by one operator of `kernels.cpp`, for x (A, n, W).

    flat: what `of_kernel` returns, for the layers to run. angles: cos and sin. stored: the keys and the values of each
    of these layers, (rows, G, S, D); x[a] is of row low + a. slots (A, n): where new ones are written. mask (A, 1, n,
    limit): added to the scores of the slots [0, limit), None for none. beside (A, n, W) and its norm (W,): what the
    first layer's attention reads before x, None for nothing. shape: of the model.
    """
    none, wanted = x.new_empty(0), [*dict.fromkeys(layers)]
    states = torch.ops.inference.layers(
        x,
        *(beside or (none, none)),
        flat,
        *stored,
        *angles,
        slots,
        none if mask is None else mask,
        limit,
        low,
        *of_shape(shape),
        wanted,
    )
    return dict(zip(wanted, states, strict=True))


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: ModelShape) -> Tensor:
    """Return attention (A, n, H D), computed by torch's own kernels. q (A, H, n, D). k, v (A, G, L, D). mask (A, 1, n,
    L): the attention mask, added to the scores; None if all slots are visible. shape: gives the factor of the scores.
    """
    grouped = shape.heads != shape.groups
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=shape.scale, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)


def batched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, shape: ModelShape) -> Tensor:
    """Return attention (A, n, H D), computed by two batched products over each group of heads. q (A, H, n, D). k, v (A,
    G, L, D). mask (A G, H/G n, L): the mask that `grouped` returns. Use it for a few ids per row on a CPU; torch's
    kernel takes 1.5 times as long there."""
    A, H, n, D = q.shape
    queries = q.reshape(A * shape.groups, -1, D)
    scores = torch.baddbmm(mask, queries, k.flatten(0, 1).transpose(1, 2), alpha=shape.scale)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(A, H, n, D).transpose(1, 2).flatten(2)


def grouped(mask: Tensor, shape: ModelShape) -> Tensor:
    """Return an attention mask (A, 1, n, L) copied for every head: (A G, H/G n, L). shape: gives H and G."""
    A, _, n, L = mask.shape
    return mask.expand(A, shape.heads, n, L).reshape(A * shape.groups, -1, L)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x (..., W) divided by its root mean square, times weight (W,). It rounds as transformers' modules do: it
    divides in float32, then converts back, then applies the weight."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotated(states: Tensor, w: Layer, shape: ModelShape, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (A, n, H, D), keys and values (A, n, G, D). states (A, n, H+2G, D): all three, joined. Queries and
    keys are normalised if the layer has such norms, then rotated by the angles of their positions. cos, sin (A or 1, n,
    1, D): of these angles."""
    turned, v = states.split((shape.heads + shape.groups, shape.groups), 2)
    if w.q_norm is not None and w.k_norm is not None:
        q, k = turned.split((shape.heads, shape.groups), 2)
        turned = torch.cat((_norm(q, w.q_norm, shape.eps), _norm(k, w.k_norm, shape.eps)), 2)
    turned = turned * cos + turned.roll(shape.size // 2, -1) * sin
    q, k = turned.split((shape.heads, shape.groups), 2)
    return q, k, v


def folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return attention (A, n, H D) as `flash` does, for an accelerator. q (A, H, n, D). k, v (A, G, L, D). mask (A, 1,
    H/G n, L): from `folded_mask`, or None if all slots are visible.

    Torch's flash kernel supports no attention mask, and its memory-efficient kernel no groups of heads. For a call with
    a mask and groups, most GPUs run separate products and a softmax, over keys and values copied for every head. Here
    the heads of a group are laid out along the query length, so there are no groups, and one kernel reads keys and
    values once per group. scale: factor of the attention scores.
    """
    A, H, n, D = q.shape
    G = k.shape[1]
    out = F.scaled_dot_product_attention(q.reshape(A, G, -1, D), k, v, mask, scale=scale)
    return out.unflatten(2, (H // G, n)).permute(0, 3, 1, 2, 4).reshape(A, n, -1)


def folded_mask(mask: Tensor, heads: int) -> Tensor:
    """Return an attention mask (A, 1, n, L) copied for each of the H/G heads of a group: (A, 1, H/G n, L). heads:
    H/G."""
    A, _, n, L = mask.shape
    wide = torch.zeros(A, heads, n, -(-L // ALIGNED) * ALIGNED, dtype=mask.dtype, device=mask.device)
    wide[..., :L] = mask
    return wide.flatten(1, 2).unsqueeze(1)[..., :L]


def angles(model: PreTrainedModel, slots: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin (slots, D) of the rotary angles at positions 0 to slots - 1, from the model's own rotary
    module, in the dtype of `like`. `sin` already has the signs that a rotation by `roll` needs."""
    body: Any = model.base_model
    cos, sin = body.rotary_emb(like, torch.arange(slots, device=model.device)[None])
    half = sin.shape[-1] // 2
    return cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)


def applies(model: PreTrainedModel) -> bool:
    """Return whether this forward computes the same as the model's own. The model must be of a known family, with plain
    linear layers on one device, a plain rotation, and no hooks or replaced forwards."""
    config = model.config
    if not _known(model) or config.hidden_act not in ("silu", "swish"):
        return False
    if sliding_window(config):
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ROTATIONS or getattr(config, "pretraining_tp", 1) != 1:
        return False
    if any("forward" in vars(m) or hooked(m) for m in model.modules()):
        return False
    linears = [m for name, m in model.named_modules() if name.endswith(("_proj", "lm_head"))]
    plain = all(type(m) is nn.Linear or m is small_of(model) for m in linears)
    return plain and len({p.device for p in model.parameters()}) == 1


def hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks that may change what it computes. Hooks that a pass of transformers with
    `output_hidden_states` leaves behind only record; they do not count."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(getattr(hook, "__module__", None) != RECORDING for hook in hooks)


def small_of(model: PreTrainedModel) -> SmallHead | None:
    """Return the model's head if it is a `SmallHead` with matrices of known classes, else None."""
    head = model.get_output_embeddings()
    return head if type(head) is SmallHead and type(head.projection) in (nn.Linear, LowRank) else None


def _known(model: PreTrainedModel) -> bool:
    """Return whether the model is of one of `FAMILIES`, with parts of transformers' classes for this family or of
    torch's classes. Two other parts are allowed: a `SmallHead` as the head, and a `MarkovHead`, which no forward reads.
    Modules are compared, since a class of another module may have the same name but a different forward."""
    home = type(model).__module__
    ours = home.startswith("transformers.models.") and type(model).__name__ in FAMILIES
    small, markov = small_of(model), markov_of(model)
    own: list[nn.Module] = [] if small is None else [small, small.projection]
    own += [] if markov is None else list(markov.modules())
    parts = [m for m in model.modules() if not any(m is one for one in own)]
    homes = {type(m).__module__ for m in parts} - {home, "transformers.activations"}
    return ours and all(name.startswith("torch.nn.modules.") for name in homes)


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Return the model's shape. On a CPU the keys and values of a half-precision model are stored in float32: attention
    over a few ids is several times faster there, and no less precise."""
    body: Any = model.base_model
    attention, dtype = body.layers[0].self_attn, model.dtype
    held = torch.promote_types(dtype, torch.float32) if model.device.type == "cpu" else dtype
    heads, groups = (p.out_features // attention.head_dim for p in (attention.q_proj, attention.k_proj))
    eps = body.norm.variance_epsilon
    return ModelShape(heads, groups, attention.head_dim, attention.scaling, eps, held)


def weights_of(model: PreTrainedModel) -> Weights:
    """Return the model's own weights, with projections joined. The model's parameters become views of the joined
    tensors, in place."""
    body: Any = model.base_model
    top: Any = model.lm_head
    # the joined weights stay inference tensors or normal ones, as the parameters were: the two must not be mixed
    with torch.inference_mode(top.weight.is_inference()), torch.no_grad():
        layers = [_layer(layer) for layer in body.layers]
        head = _small(top) if isinstance(top, SmallHead) else _joined([top])
        return Weights(body.embed_tokens.weight.data, layers, body.norm.weight.data, head)


def _small(head: SmallHead) -> Small:
    if isinstance(head.projection, LowRank):
        return Small(_joined([head.projection.up]), _joined([head.projection.down]), head.known, head.size)
    return Small(_joined([head.projection]), None, head.known, head.size)


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return Layer(
        first=layer.input_layernorm.weight.data,
        qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        q_norm=_data(q_norm and q_norm.weight),
        k_norm=_data(k_norm and k_norm.weight),
        out=_joined([attention.o_proj]),
        second=layer.post_attention_layernorm.weight.data,
        gate_up=_joined([mlp.gate_proj, mlp.up_proj]),
        down=_joined([mlp.down_proj]),
    )


def _data(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.data


def _joined(linears: Sequence[nn.Linear]) -> Linear:
    """Return several projections as one. The modules' own weights become views of it, in place."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    scales = [linear.get_buffer(SCALES) for linear in linears if SCALES in linear._buffers]
    weight = _side_by_side([linear.weight for linear in linears])
    joined = torch.cat(scales) if len(scales) == len(linears) else None
    return Linear(weight, _side_by_side(biases) if biases else None, scales=joined)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Return one tensor with the rows of all parts, (out, in) or (out,), in order. The parts become views of it, in
    place, unless they are already."""
    rows = [len(part) for part in parts]
    if _adjacent(parts):
        return parts[0].data.as_strided((sum(rows), *parts[0].shape[1:]), parts[0].stride())
    whole = torch.cat([part.data for part in parts])
    for part, view in zip(parts, whole.split(rows), strict=True):
        part.data = view
    return whole


def _adjacent(parts: Sequence[Tensor]) -> bool:
    storage, end = parts[0].untyped_storage().data_ptr(), parts[0].data_ptr()
    for part in parts:
        if part.untyped_storage().data_ptr() != storage or part.data_ptr() != end:
            return False
        end += part.nbytes
    return True


def can_round(model: PreTrainedModel) -> bool:
    """Return whether `int8` works for this model on this machine."""
    return applies(model) and packing.serves(model, 1)


def int8(weights: Weights) -> Weights:
    """Return the weights with second copies of all projections, rounded to 8 bits, with one scale per output."""
    return _with_copies(weights, _rounded)


def drafting(weights: Weights) -> Weights:
    """Return the weights of a draft with second copies of all projections: in 4 bits those with scales and a large
    head, whose largest logits are exact; in 8 bits the others."""
    return _with_copies(weights, _rounded, _rescored)


def _rescored(head: Linear) -> Linear:
    outputs, inputs = head.weight.shape
    if head.bias is not None or inputs % packing.GROUP or outputs < LARGE:
        return _rounded(head)
    return head._replace(packed=packing.Rescored(head.weight))


def _rounded(linear: Linear) -> Linear:
    weight, scales = linear.weight, linear.scales
    in_groups = scales is not None and weight.shape[1] % packing.GROUP == 0
    numbers, scale = packing.int4_groups(weight, cast(Tensor, scales)) if in_groups else int8_rows(weight)
    return linear._replace(packed=packing.Widened(numbers, linear.bias, scale.float()))


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight (out, in) as int8 numbers (out, in) from -127 to 127 and a bfloat16 scale (out,). Row r of the
    weight is about scale[r] * numbers[r]."""
    scale = weight.float().abs().amax(1).clamp(min=1e-12) / 127
    scale = scale.to(torch.bfloat16)
    return (weight.float() / scale.float().unsqueeze(1)).round().clamp(-127, 127).to(torch.int8), scale


def rounded(weight: Tensor) -> Tensor:
    """Return a weight (out, in) rounded to values that `int8_rows` can represent, in the weight's own dtype."""
    numbers, scale = int8_rows(weight)
    return (numbers.float() * scale.float().unsqueeze(1)).to(weight.dtype)


@torch.no_grad()
def in_int8_rows(model: PreTrainedModel) -> PreTrainedModel:
    """Round the model's projections, in place, and return the model. Embeddings are not rounded, even if they are tied
    to the head. The config then names this quantisation, so that `LM` runs the model with int8 weights if it can."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(rounded(module.weight), requires_grad=False)  # a tied embedding stays
    model.config.quantization_config = {"quant_method": INT8_ROWS, TIED: model.config.tie_word_embeddings}
    model.config.tie_word_embeddings = False
    return model


def packed_copy(network: Network, int8: bool = False) -> Network:
    """Return a copy of a network that shares its weights. Linear layers become `PackedLinear` if the packed copy can
    represent their weight. If there are none, return the network itself. int8: whether copies are rounded to 8 bits.
    """
    shared: dict[int, Any] = {id(weight): nn.Parameter(weight.data, False) for weight in network.parameters()}
    copied = copy.deepcopy(network, shared | {id(buffer): buffer for buffer in network.buffers()})
    for module in [*copied.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear.of(child, int8))
    return copied if any(isinstance(module, PackedLinear) for module in copied.modules()) else network


class PackedLinear(nn.Module):
    """A linear layer that multiplies by a packed copy of its weight, in the order in which a CPU kernel reads it
    (`packing`). x (..., in) -> (..., out)."""

    def __init__(self, product: packing.Widened) -> None:
        super().__init__()
        self.product = product

    @classmethod
    def of(cls, linear: nn.Linear, int8: bool) -> nn.Module:
        """Return a `PackedLinear` with a packed copy of this layer's weight, or the layer itself if a packed copy could
        not represent the weight. int8: whether the copy is rounded to 8 bits."""
        product = (_rounded if int8 else _packed)(Linear(linear.weight.detach(), _data(linear.bias))).packed
        return linear if product is None else cls(product)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


def are_packed(weights: Weights) -> bool:
    """Return whether any projection has a packed copy."""
    return any(linear.packed is not None for linear in projections(weights))


def projections(weights: Weights) -> list[Linear]:
    """Return all projections, the head's last."""
    heads = [weights.head] if isinstance(weights.head, Linear) else [weights.head.up, weights.head.down]
    parts = [part for layer in weights.layers for part in layer] + heads
    return [part for part in parts if isinstance(part, Linear)]


def packed_layer(first: Tensor, second: Tensor, products: Sequence[Sequence[nn.Linear]], int8: bool) -> Layer:
    """Return a decoder layer of a network of another class, with second copies of its projections.

    first, second (W,): its norms. products: the layers of each joined projection, in the order qkv, out, gate_up, down;
    their weights become views of joined ones, in place. int8: whether the copies are rounded to 8 bits.
    """
    with torch.inference_mode(first.is_inference()), torch.no_grad():
        qkv, out, gate_up, down = (_joined(linears) for linears in products)
        layer = Layer(first.data, qkv, None, None, out, second.data, gate_up, down)
        return _changed(layer, _rounded if int8 else _packed)


def packed(weights: Weights) -> Weights:
    """Return the weights of a model that `packing.can_pack` accepts, with second copies of its projections."""
    return _with_copies(weights, _packed)


def _with_copies(
    weights: Weights, copied_by: Callable[[Linear], Linear], head_by: Callable[[Linear], Linear] | None = None
) -> Weights:
    """Return the weights with second copies of the projections. The norms are in float32, as the states between packed
    projections are. copied_by: adds the copy to a projection, or returns it without one. head_by: does so for a head
    that is one projection; None: `copied_by`."""
    head = weights.head
    if isinstance(head, Small):
        head = head._replace(up=copied_by(head.up), down=head.down and copied_by(head.down))
    else:
        head = (head_by or copied_by)(head)
    copied = weights._replace(layers=[_changed(layer, copied_by) for layer in weights.layers], head=head)
    if not are_packed(copied):
        return weights
    norms = ("first", "second", "q_norm", "k_norm")
    layers = [
        layer._replace(**{name: part.float() for name in norms if (part := getattr(layer, name)) is not None})
        for layer in copied.layers
    ]
    return copied._replace(layers=layers, norm=copied.norm.float())


def _packed(linear: Linear) -> Linear:
    product = packing.pack(linear.weight, linear.bias)
    if product is None and linear.weight.dtype in packing.NARROW:  # of odd inputs: it multiplies states in float32
        bias = None if linear.bias is None else linear.bias.float()
        return linear._replace(weight=linear.weight.float(), bias=bias)
    return linear._replace(packed=product)


def _changed(layer: Layer, change: Callable[[Linear], Linear]) -> Layer:
    """Return the layer with `change(projection)` in place of each projection."""
    return layer._replace(
        qkv=change(layer.qkv), out=change(layer.out), gate_up=change(layer.gate_up), down=change(layer.down)
    )


def state(model: PreTrainedModel, parameters: Sequence[nn.Parameter]) -> tuple[int, int]:
    """Return a pair of numbers that changes when weights are trained in place, loaded, moved or cast.

    parameters: the model's parameters, listed by the caller. Every pass calls this function, and listing them takes a
    tenth of a pass.
    """
    body: Any = model.base_model
    return body.layers[0].input_layernorm.weight.data_ptr(), changes(parameters)
