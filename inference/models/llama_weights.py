"""Which models `llama` serves, and with which weights: their own, joined, rounded or packed for a CPU's kernel."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.models.cache import sliding_window
from inference.models.checksum import changes
from inference.models.dtypes import emulated
from inference.models.llama import Layer, Linear, Shape, Weights

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROTATIONS = ("default", "linear", "llama3", "yarn")  # angles that depend on a token's own position alone

PACKED = 2**30  # bytes of weights: larger models are not held twice
ROWS = 32  # ids of a pass for which weights are packed; others are served as well

Places = list[tuple[int, int]]


def applies(model: PreTrainedModel) -> bool:
    """Whether this forward is the model's: a known family, plain linear layers on one device, a plain rotation, and
    nobody listening in or standing between (hooks, replaced forwards)."""
    config = model.config
    if not _known(model) or config.hidden_act not in ("silu", "swish"):
        return False
    if sliding_window(config):
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ROTATIONS or getattr(config, "pretraining_tp", 1) != 1:
        return False
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules()):
        return False
    linears = [m for name, m in model.named_modules() if name.endswith(("_proj", "lm_head"))]
    return all(type(m) is nn.Linear for m in linears) and len({p.device for p in model.parameters()}) == 1


def _known(model: PreTrainedModel) -> bool:
    """Whether the model and all its parts are of transformers' own classes for one of `FAMILIES`, or of torch's: a
    class of another module may have the same name, and another forward."""
    home = type(model).__module__
    ours = home.startswith("transformers.models.") and type(model).__name__ in FAMILIES
    homes = {type(m).__module__ for m in model.modules()} - {home, "transformers.activations"}
    return ours and all(name.startswith("torch.nn.modules.") for name in homes)


def shape_of(model: PreTrainedModel) -> Shape:
    """On a CPU the keys and values of a half-precision model are held in float32: its attention over a few ids is
    several times faster there, and no less precise."""
    body: Any = model.base_model
    attention, dtype = body.layers[0].self_attn, model.dtype
    held = torch.promote_types(dtype, torch.float32) if model.device.type == "cpu" else dtype
    heads, groups = (p.out_features // attention.head_dim for p in (attention.q_proj, attention.k_proj))
    eps = body.norm.variance_epsilon
    return Shape(heads, groups, attention.head_dim, attention.scaling, eps, held)


def weights_of(model: PreTrainedModel) -> Weights:
    """The model's own weights, projections joined."""
    body: Any = model.base_model
    top: Any = model.lm_head
    # parameters stay of their kind: fit for training, or made in inference mode, where the two must not be mixed
    with torch.inference_mode(top.weight.is_inference()), torch.no_grad():
        layers = [_layer(layer) for layer in body.layers]
        return Weights(body.embed_tokens.weight.data, layers, body.norm.weight.data, _joined([top]))


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return Layer(
        first=layer.input_layernorm.weight.data,
        qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        q_norm=_data(q_norm and q_norm.weight), k_norm=_data(k_norm and k_norm.weight),
        out=_joined([attention.o_proj]),
        second=layer.post_attention_layernorm.weight.data,
        gate_up=_joined([mlp.gate_proj, mlp.up_proj]),
        down=_joined([mlp.down_proj]),
    )  # fmt: skip


def _data(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.data


def _joined(linears: Sequence[nn.Linear]) -> Linear:
    """All as one, of whose tensors the modules' own become views."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return Linear(_side_by_side([linear.weight for linear in linears]), _side_by_side(biases) if biases else None)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """One tensor whose rows are those of all parts, in order; the parts become views of it, or are already."""
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
    """Whether `int8` serves the model: the kernel is a CPU's, reads bfloat16, and takes 16 inputs at a time: it reads
    past the end of rows of other lengths."""
    fits = all(m.in_features % 16 == 0 for m in model.modules() if isinstance(m, nn.Linear))
    return fits and model.device.type == "cpu" and model.dtype == torch.bfloat16 and applies(model)


def int8(weights: Weights) -> Weights:
    """Every projection rounded to 8 bits with one scale an output, in bfloat16; a copy: the model keeps its own."""
    return _each(weights, _rounded)


def _rounded(linear: Linear) -> Linear:
    weight, scale = int8_rows(linear.weight)
    return Linear(weight, linear.bias, scale)


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (out, in) -> (whole numbers from -127 to 127, scale (out,)): row r stands for scale[r] * numbers[r]."""
    scale = weight.float().abs().amax(1).clamp(min=1e-12) / 127
    scale = scale.to(torch.bfloat16)  # what the kernel multiplies by
    return (weight.float() / scale.float().unsqueeze(1)).round().clamp(-127, 127).to(torch.int8), scale


def can_pack(model: PreTrainedModel) -> bool:
    """Whether `packed` serves the model: bfloat16 on a CPU that has instructions for it, and small enough to be held
    twice."""
    small = sum(p.nbytes for p in model.parameters()) <= PACKED
    there = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and not emulated(torch.bfloat16)  # on AVX2 it raises
    return small and there and model.device.type == "cpu" and model.dtype == torch.bfloat16


def packed(weights: Weights) -> Weights:
    """Every projection with a second copy in the order in which the kernel reads it: a pass of the bundled target takes
    a quarter less."""
    return _each(weights, _packed)


def _packed(linear: Linear) -> Linear:
    return linear._replace(packed=torch.ops.mkldnn._reorder_linear_weight(linear.weight.contiguous(), ROWS))


def _each(weights: Weights, change: Callable[[Linear], Linear]) -> Weights:
    """All projections changed."""
    layers = [
        layer._replace(
            qkv=change(layer.qkv), out=change(layer.out), gate_up=change(layer.gate_up), down=change(layer.down)
        )
        for layer in weights.layers
    ]
    return weights._replace(layers=layers, head=change(weights.head))


def origin(model: PreTrainedModel) -> Places:
    """Where all weights are in memory and how often each was changed."""
    return [(p.data_ptr(), changes([p])) for p in model.parameters()]


def state(model: PreTrainedModel, parameters: Sequence[nn.Parameter]) -> tuple[int, int]:
    """Changes when weights are trained in place or loaded into, and when moving or casting gives them new memory.

    parameters: the model's, listed once: every pass asks, and walking through the modules takes a tenth of one.
    """
    body: Any = model.base_model
    return body.layers[0].input_layernorm.weight.data_ptr(), changes(parameters)
