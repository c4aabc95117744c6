"""Second copies of weights, in the order in which the kernels of a CPU read them.

A kernel that finds a weight in torch's own order rearranges it at every call. Two libraries of torch take weights that
were rearranged before:

- oneDNN, for models in bfloat16 on a CPU with instructions for it.
- FBGEMM, for models in float32 whose weights float16 represents. Those of a checkpoint in half precision are; it is in
  float32 because the CPU would emulate bfloat16. The copy is in float16. The kernels widen each weight and compute in
  float32, so the pass is that of the model in float32 but for the order of its sums. It reads half of the bytes, and a
  few ids take little more time than one: SmolLM2-135M takes 28 ms for one id and 34 ms for four on two cores of an AMD
  EPYC, where it takes 65 and 130 ms without the copy.
"""

import itertools
import math
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.models.pretrained import emulated

LARGEST = 2**30  # bytes of copies: larger models are not stored twice
SMALLEST = 2.0**-24  # number above 0 in float16
ROWS = 32  # ids of a pass for which oneDNN chooses the order; other numbers work as well


class Product(Protocol):
    """The product with a weight (out, in) and a bias (out,) or None. width: bytes of a number of the copy."""

    width: int

    def __call__(self, x: Tensor, /) -> Tensor:
        """Return x (..., in) -> (..., out)."""


class InBfloat16:
    """A `Product` in bfloat16, the weight in oneDNN's order."""

    width = 2

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product


class InFloat16:
    """A `Product` in float32, the weight in FBGEMM's order and in float16. factor: what to multiply it by before, see
    `factor_of`. torch's compiler cannot trace objects of that library, so the product is an operation of its own, which
    reads the object by its number."""

    width = 2

    def __init__(self, weight: Tensor, bias: Tensor | None, factor: float) -> None:
        scaled = None if bias is None else bias * factor
        self.held = torch.ops.quantized.linear_prepack_fp16((weight * factor).contiguous(), scaled)
        self.number, self.outputs, self.factor = next(_numbers), len(weight), factor
        _products[self.number] = self

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.cotrain.product_in_float16.default(x, self.number, self.outputs)
        return product


_numbers = itertools.count()
_products: WeakValueDictionary[int, InFloat16] = WeakValueDictionary()
_library = torch.library.Library("cotrain", "DEF")
_library.define("product_in_float16(Tensor x, int number, int outputs) -> Tensor")


def _product(x: Tensor, number: int, outputs: int) -> Tensor:
    one = _products[number]
    product: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, one.held)
    return product if one.factor == 1 else product.mul_(1 / one.factor)


_library.impl("product_in_float16", _product, "CPU")
_library.impl("product_in_float16", lambda x, _, outputs: x.new_empty(*x.shape[:-1], outputs), "Meta")


def can_pack(model: PreTrainedModel) -> bool:
    """Return whether `pack` works for the model: it is on a CPU, and small enough to be stored twice. The first
    projection of a model in float32 decides; `pack` leaves out others that float16 does not represent."""
    if model.device.type != "cpu" or model.dtype not in (torch.bfloat16, torch.float32):
        return False
    if 2 * sum(p.numel() for p in model.parameters()) > LARGEST:
        return False
    if model.dtype == torch.bfloat16:  # on AVX2 oneDNN raises
        return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and not emulated(torch.bfloat16)
    first = next((m.weight.detach() for m in model.modules() if isinstance(m, torch.nn.Linear)), None)
    return first is not None and has_fbgemm() and factor_of(first) is not None


def has_fbgemm() -> bool:
    """Return whether torch uses FBGEMM here. It has kernels for x86 with AVX2 alone."""
    quantized = torch.backends.quantized
    return "fbgemm" in quantized.supported_engines and quantized.engine in ("fbgemm", "x86")


def pack(weight: Tensor, bias: Tensor | None) -> Product | None:
    """Return the product with a copy of the weight, or None if there is no copy of the same numbers."""
    if weight.dtype == torch.bfloat16:
        return InBfloat16(weight, bias)
    factor = factor_of(weight) if weight.dtype == torch.float32 else None
    return None if factor is None else InFloat16(weight, bias, factor)


def factor_of(weight: Tensor) -> float | None:
    """Return a power of two by which float16 represents a weight in float32, or None if there is none. 1 if float16
    represents it exactly. Otherwise no number may change by more than 2^-39 of the largest, which is far below the
    rounding of float32; this concerns numbers of a trained draft that are nearly 0."""
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if not 0 < largest < math.inf:
        return None
    for factor in (1.0, 2.0 ** (15 - math.frexp(largest)[1])):
        scaled = weight * factor
        apart = (scaled.to(torch.float16).to(torch.float32) - scaled).abs().max()
        if apart <= (0 if factor == 1 else SMALLEST / 2):
            return factor
    return None
