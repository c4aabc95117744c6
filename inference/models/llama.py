"""A forward pass for the Llama family that launches few operations. This module decides which models can use it,
prepares their weights, and defines the pass as a function of tensors.

The time of a pass over a few ids depends on the number of operations, not on their size. transformers' modules launch
some sixty per layer. Here a layer is two norms, four matrix products (query, key and value in one, gate and up in one),
one rotation and one attention, on the model's own weights. Projections that are applied together are copied into one
tensor once, and the model's parameters become views of it. So these weights are not stored twice, and training still
changes them. Two functions store more: `packed` adds a second copy of each projection, and `int8` returns rounded
copies (`packing` has the kernels of the first). The pass is a function of tensors, so it is compiled once for all
models of a shape (`compiled`).

Letters in shapes: A = rows, n = ids per row, H = query heads, G = key/value heads, D = head size, L = slots that are
read. A group has H/G query heads.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast

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

INT8_ROWS = "int8_rows"  # the quantisation method in the config of a model that `in_int8_rows` has rounded
ALIGNED = 16  # an attention kernel copies a mask if its rows do not begin at multiples of so many elements

Keep = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Network = TypeVar("Network", bound=nn.Module)


class Linear(NamedTuple):
    """A projection. weight (out, in). bias (out,), or None. scale (out,): for int8, row r of the weight represents
    scale[r] * weight[r]; None for other dtypes. packed: the same product with a second copy of the weight, see
    `packing`."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None
    packed: packing.Product | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed(x)
        if self.scale is None:
            return F.linear(x, self.weight, self.bias)
        flat = torch._weight_int8pack_mm(packing.owned(x.reshape(-1, x.shape[-1])), self.weight, self.scale)
        wide = flat.view(*x.shape[:-1], len(self.weight))
        return wide if self.bias is None else wide + self.bias

    @property
    def read_bytes(self) -> int:
        """Return the bytes of the weight and its scale that a product reads."""
        scale = 0 if self.scale is None else self.scale.nbytes
        return scale + (self.weight.nbytes if self.packed is None else self.packed.width * self.weight.numel())


class Layer(NamedTuple):
    """The weights of one decoder layer. first, second: those of the norms before attention and before the MLP. qkv: the
    projections of queries, keys and values, joined. gate_up: those of the MLP's gate and up, joined. q_norm, k_norm:
    those of the norms of queries and keys, None without such norms."""

    first: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    second: Tensor
    gate_up: Linear
    down: Linear


class Small(NamedTuple):
    """The weights of a `SmallHead`. up: from states, or from the results of `down`, to the rows of the head. down: for
    a head of low rank, else None. known (Vd,): the ids of the rows, None if all `size` ids have a row."""

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
    """The shape of a model. heads: H. groups: G. size: D. scale: factor of the attention scores. eps: that of the
    norms. held: dtype of keys and values."""

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
    stored: bool = False,
) -> dict[int, Tensor]:
    """Return the states (A, n, W) of `layers` for ids (A, n), see `passes`; W is the width. Layers after the last of
    `layers` do not run.

    cos, sin (A or 1, n, 1, D): see `angles`. keep(i, k, v): stores layer i's new keys and values (A, G, n, D), and
    returns all that it may read (A, G, L, D). attend(q, k, v): `flash`, `batched` or `folded`; queries (A, H, n, D) ->
    (A, n, H D). stored: whether all layers run, so that all keys and values are stored; the last layer then stops after
    storing them unless its states are in `layers`.
    """
    x, states = F.embedding(ids, weights.embedding), {}
    needed = len(weights.layers) if LAST in layers else max(layers, default=0)
    for i, w in enumerate(weights.layers if stored else weights.layers[:needed]):
        if i in layers:
            states[i] = x
        A, n, _ = x.shape
        turned = w.qkv(_norm(x, w.first, shape.eps)).view(A, n, -1, shape.size).to(shape.held)
        q, k, v = (part.transpose(1, 2) for part in _rotated(turned, w, shape, cos, sin))
        k, v = keep(i, k, v)
        if stored and i + 1 == len(weights.layers) > needed:
            return states
        x = x + w.out(attend(q, k, v).to(x.dtype))
        gate, up = w.gate_up(_norm(x, w.second, shape.eps)).chunk(2, -1)
        x = x + w.down(F.silu(gate) * up)
    if needed in layers:
        states[needed] = x
    if LAST in layers:
        states[LAST] = _norm(x, weights.norm, shape.eps)
    return states


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: ModelShape) -> Tensor:
    """Return attention (A, n, H D), computed by torch's own kernels. q (A, H, n, D). k, v (A, G, L, D). mask (A, 1, n,
    L): added to the scores; None if all slots are visible."""
    grouped = shape.heads != shape.groups
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=shape.scale, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)


def batched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, shape: ModelShape) -> Tensor:
    """Return attention as `flash` does, computed by two batched products over each group of heads. mask (A G, H/G n,
    L): see `grouped`. It is for a few ids per row on a CPU, for which torch's kernel takes 1.5 times as long."""
    A, H, n, D = q.shape
    queries = q.reshape(A * shape.groups, -1, D)
    scores = torch.baddbmm(mask, queries, k.flatten(0, 1).transpose(1, 2), alpha=shape.scale)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(A, H, n, D).transpose(1, 2).flatten(2)


def grouped(mask: Tensor, shape: ModelShape) -> Tensor:
    """Return a mask (A, 1, n, L) copied for every head: (A G, H/G n, L)."""
    A, _, n, L = mask.shape
    return mask.expand(A, shape.heads, n, L).reshape(A * shape.groups, -1, L)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x divided by its root mean square, times the weight, with the rounding of transformers' modules: float32
    inside, and the weight applied afterwards."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotated(states: Tensor, w: Layer, shape: ModelShape, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (A, n, H, D), keys and values (A, n, G, D) of states (A, n, H+2G, D). Queries and keys are
    normalised if the layer has such norms, then rotated. cos, sin (A or 1, n, 1, D): see `angles`."""
    turned, v = states.split((shape.heads + shape.groups, shape.groups), 2)
    if w.q_norm is not None and w.k_norm is not None:
        q, k = turned.split((shape.heads, shape.groups), 2)
        turned = torch.cat((_norm(q, w.q_norm, shape.eps), _norm(k, w.k_norm, shape.eps)), 2)
    turned = turned * cos + turned.roll(shape.size // 2, -1) * sin
    q, k = turned.split((shape.heads, shape.groups), 2)
    return q, k, v


def folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return attention (A, n, H D) as `flash` does, for an accelerator. q (A, H, n, D). k, v (A, G, L, D). mask: from
    `folded_mask`, or None if all slots are visible.

    Torch's flash kernel supports no mask, and its memory-efficient kernel supports no groups. For a call with both,
    most GPUs run separate products and a softmax, over keys and values copied for every head. Here the heads of a group
    are laid out along the query length, so there are no groups, and one kernel reads keys and values once per group.
    """
    A, H, n, D = q.shape
    G = k.shape[1]
    out = F.scaled_dot_product_attention(q.reshape(A, G, -1, D), k, v, mask, scale=scale)
    return out.unflatten(2, (H // G, n)).permute(0, 3, 1, 2, 4).reshape(A, n, -1)


def folded_mask(mask: Tensor, heads: int) -> Tensor:
    """Return a mask (A, 1, n, L) copied for each of the heads of a group: (A, 1, heads n, L). heads: H/G."""
    A, _, n, L = mask.shape
    wide = torch.zeros(A, heads, n, -(-L // ALIGNED) * ALIGNED, dtype=mask.dtype, device=mask.device)
    wide[..., :L] = mask
    return wide.flatten(1, 2).unsqueeze(1)[..., :L]


def angles(model: PreTrainedModel, slots: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin (slots, D) of all positions, from the model's own rotary module. `sin` has the sign of the
    rotation by `roll`."""
    body: Any = model.base_model
    like = torch.empty((), dtype=model.dtype, device=model.device)
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
    if any("forward" in vars(m) or _hooked(m) for m in model.modules()):
        return False
    linears = [m for name, m in model.named_modules() if name.endswith(("_proj", "lm_head"))]
    plain = all(type(m) is nn.Linear or m is small_of(model) for m in linears)
    return plain and len({p.device for p in model.parameters()}) == 1


def _hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks that may change what it computes. Those of transformers, which a pass with
    `output_hidden_states` leaves behind, only record."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(getattr(hook, "__module__", None) != RECORDING for hook in hooks)


def small_of(model: PreTrainedModel) -> SmallHead | None:
    """Return the model's head if it is a `SmallHead` with matrices of known classes, else None."""
    head = model.get_output_embeddings()
    return head if type(head) is SmallHead and type(head.projection) in (nn.Linear, LowRank) else None


def _known(model: PreTrainedModel) -> bool:
    """Return whether the model and all its parts are of transformers' own classes for one of `FAMILIES`, or of torch's.
    The head may be a `SmallHead` instead, and there may be a `MarkovHead`, which no forward reads. A class of another
    module may have the same name but a different forward."""
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
    """Return the model's own weights, with projections joined: the model's parameters become views of the joined
    tensors."""
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
    """Return several projections as one. The modules' own weights become views of it."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return Linear(_side_by_side([linear.weight for linear in linears]), _side_by_side(biases) if biases else None)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Return one tensor with the rows of all parts, in order. The parts become views of that tensor, unless they are
    already."""
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
    """Return whether `int8` works for the model here."""
    return has_kernel(model) and applies(model)


def has_kernel(model: PreTrainedModel) -> bool:
    """Return whether the kernel for rounded weights can run all linear layers of the model. The kernel runs on a CPU
    and reads bfloat16. It reads 16 inputs at a time, so widths must be multiples of 16; otherwise it would read past
    the end of a row. Layers of another dtype than the model's are not rounded."""
    fits = all(m.in_features % 16 == 0 for m in model.modules() if is_rounded(m))
    return fits and model.device.type == "cpu" and model.dtype == torch.bfloat16


def int8(weights: Weights) -> Weights:
    """Return a copy of the weights, every projection rounded to 8 bits with one bfloat16 scale per output. The model is
    unchanged."""
    return _each(weights, _rounded)


def _rounded(linear: Linear) -> Linear:
    weight, scale = int8_rows(linear.weight)
    return Linear(weight, linear.bias, scale)


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers (out, in) int8, from -127 to 127, and scale (out,) bfloat16 for a weight (out, in): row r of the
    weight is about scale[r] * numbers[r]."""
    scale = weight.float().abs().amax(1).clamp(min=1e-12) / 127
    scale = scale.to(torch.bfloat16)  # what the kernel multiplies by
    numbers = (weight.float() / scale.float().unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
    return packing.owned(numbers), packing.owned(scale)


def rounded(weight: Tensor) -> Tensor:
    """Return a weight (out, in) rounded to the numbers that `int8_rows` can represent, in its own dtype."""
    numbers, scale = int8_rows(weight)
    return (numbers.float() * scale.float().unsqueeze(1)).to(weight.dtype)


@torch.no_grad()
def in_int8_rows(model: PreTrainedModel) -> PreTrainedModel:
    """Round the projections of a model, in place, and return the model. Embeddings are not rounded, even if they are
    tied to the head. The config then names the method, so that `LM` runs the model with int8 weights where it can."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(rounded(module.weight), requires_grad=False)  # a tied embedding stays
    model.config.quantization_config = {"quant_method": INT8_ROWS, TIED: model.config.tie_word_embeddings}
    model.config.tie_word_embeddings = False
    return model


class RoundedLinear(nn.Module):
    """A linear layer without a bias, whose weight is stored as the numbers and scale of `int8_rows`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        numbers, scale = int8_rows(linear.weight.detach())
        self.register_buffer("numbers", numbers)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return Linear(cast(Tensor, self.numbers), None, cast(Tensor, self.scale))(x)


def sharing_copy(network: Network) -> Network:
    """Return a copy of a network that shares the network's weights. Its parameters are new objects, since the compiler
    takes a parameter that it has seen for a constant."""
    shared: dict[int, Any] = {id(weight): nn.Parameter(weight.data, False) for weight in network.parameters()}
    return copy.deepcopy(network, shared | {id(buffer): buffer for buffer in network.buffers()})


def is_rounded(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer with weights that the kernel can round, in bfloat16."""
    return isinstance(module, nn.Linear) and module.weight.dtype == torch.bfloat16


def rounded_copy(network: Network) -> Network:
    """Return a copy of a network in which linear layers in bfloat16 are `RoundedLinear`. It shares all other weights
    with the network."""
    return _with_linears(network, lambda linear: RoundedLinear(linear) if is_rounded(linear) else linear)


def packed_copy(network: Network) -> Network:
    """Return a copy of a network whose linear layers are `PackedLinear` where `packing.pack` has a copy of the weight.
    It shares the weights. If no layer has such a copy, return the network itself."""
    copied = _with_linears(network, PackedLinear.of)
    return copied if any(isinstance(module, PackedLinear) for module in copied.modules()) else network


class PackedLinear(nn.Module):
    """A linear layer with a second copy of its weight, see `packing`."""

    def __init__(self, product: packing.Product) -> None:
        super().__init__()
        self.product = product

    @classmethod
    def of(cls, linear: nn.Linear) -> nn.Module:
        """Return the linear layer with a second copy of its weight, or the layer itself if no copy can be made."""
        product = packing.pack(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
        return linear if product is None else cls(product)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


def _with_linears(network: Network, change: Callable[[nn.Linear], nn.Module]) -> Network:
    """Return a copy of a network, sharing its weights, in which each linear layer is replaced by `change` of that
    layer."""
    copied = sharing_copy(network)
    for module in [*copied.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, nn.Linear):
                setattr(module, name, change(child))
    return copied


def are_packed(weights: Weights) -> bool:
    """Return whether any projection has a packed copy."""
    return any(linear.packed is not None for linear in projections(weights))


def projections(weights: Weights) -> list[Linear]:
    """Return all projections, those of the head last."""
    heads = [weights.head] if isinstance(weights.head, Linear) else [weights.head.up, weights.head.down]
    parts = [part for layer in weights.layers for part in layer] + heads
    return [part for part in parts if isinstance(part, Linear)]


def packed(weights: Weights) -> Weights:
    """Return the weights of a model that `packing.can_pack` accepts, with second copies of its projections."""
    return _each(weights, lambda linear: linear._replace(packed=packing.pack(linear.weight, linear.bias)))


def _each(weights: Weights, change: Callable[[Linear], Linear]) -> Weights:
    """Return the weights with each projection replaced by `change` of that projection."""
    layers = [
        layer._replace(
            qkv=change(layer.qkv), out=change(layer.out), gate_up=change(layer.gate_up), down=change(layer.down)
        )
        for layer in weights.layers
    ]
    head = weights.head
    if isinstance(head, Small):
        return weights._replace(
            layers=layers, head=head._replace(up=change(head.up), down=head.down and change(head.down))
        )
    return weights._replace(layers=layers, head=change(head))


def state(model: PreTrainedModel, parameters: Sequence[nn.Parameter]) -> tuple[int, int]:
    """Return a pair of numbers that changes when weights are trained in place, loaded, moved or cast.

    parameters: the model's parameters, listed by the caller. Every pass calls this function, and listing them takes a
    tenth of a pass.
    """
    body: Any = model.base_model
    return body.layers[0].input_layernorm.weight.data_ptr(), changes(parameters)
