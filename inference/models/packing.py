"""Second copies of weights, in the order in which the kernels of a CPU read them.

For a weight in torch's own order, a kernel rearranges it at every call. Two libraries of torch accept weights that are
already rearranged:

- oneDNN, for models in bfloat16 on a CPU with instructions for it.
- FBGEMM, for models in float32 on a CPU that would emulate bfloat16, if float16 can represent their weights, as it can
  for nearly every checkpoint in half precision. The copy is in float16. The kernels widen each weight and compute in
  float32, so the pass differs from the float32 model only in the order of sums. It reads half of the bytes, and a few
  ids take little more time than one (`docs/measurements/smollm2.md`).
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
ROWS = 32  # ids of a pass for which oneDNN chooses the order; other numbers work as well
CHUNK = 4096  # rows of a weight that are compared at once
ALIGNED = 64  # bytes that a kernel reads at once


def owned(tensor: Tensor) -> Tensor:
    """Return the tensor in contiguous memory that begins at a multiple of `ALIGNED` bytes: the tensor itself, or a
    copy. Every tensor for a kernel of packed weights must come from here.

    A tensor of a mapped file may begin at any address. At an address that is not aligned, such a kernel may end the
    process.
    """
    tensor = tensor.contiguous()
    # compiled code reads a mapped tensor through operations that store their results in its own memory
    return tensor if torch.compiler.is_compiling() or not tensor.data_ptr() % ALIGNED else tensor.clone()


class Product(Protocol):
    """Multiplies by a weight (out, in) and adds a bias (out,) or None. width: bytes of each number in the weight's
    second copy."""

    width: int

    def __call__(self, x: Tensor, /) -> Tensor:
        """Return the product (..., out) for x (..., in)."""


class InBfloat16:
    """A `Product` in bfloat16. The copy of the weight is in oneDNN's order. weight (out, in). bias (out,), or None."""

    width = 2

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(owned(weight), ROWS)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(owned(x), self.weight, self.bias, "none", [], "")
        return product


class InFloat16:
    """A `Product` in float32. The copy of the weight is in FBGEMM's order and in float16. factor: a power of two that
    the weight is multiplied by before it is rounded to float16, so that float16 can represent it.

    The product is a torch operator that gets a number and finds this object by it. Compiled code cannot hold FBGEMM's
    objects, and all models of one shape share it, so it holds no constant of one model. weight (out, in). bias (out,),
    or None.
    """

    width = 2

    def __init__(self, weight: Tensor, bias: Tensor | None, factor: float) -> None:
        self.packed = torch.ops.quantized.linear_prepack_fp16(owned(weight * factor), None)
        self.bias, self.factor, self.outputs = bias, factor, len(weight)
        number = next(_numbers)
        with torch.inference_mode(False):
            self.number = torch.tensor(number)
        _products[number] = self

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.inference.product_in_float16.default(x, self.number, self.outputs)
        return product

    def __deepcopy__(self, _: object) -> "InFloat16":
        return self


_numbers = itertools.count()
_products: WeakValueDictionary[int, InFloat16] = WeakValueDictionary()
_library = torch.library.Library("inference", "FRAGMENT")
_library.define("product_in_float16(Tensor x, Tensor number, int outputs) -> Tensor")


def _product_in_float16(x: Tensor, number: Tensor, outputs: int) -> Tensor:
    product = _products[int(number)]
    rows = owned(x.unsqueeze(0) if x.ndim == 1 else x)  # FBGEMM takes two dimensions and more
    y: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(rows, product.packed)
    y = y if product.factor == 1 else y.mul_(1 / product.factor)
    y = y if product.bias is None else y.add_(product.bias)
    return y[0] if x.ndim == 1 else y


_library.impl("product_in_float16", _product_in_float16, "CPU")
_library.impl("product_in_float16", lambda x, _, outputs: x.new_empty(*x.shape[:-1], outputs), "Meta")


def can_pack(model: PreTrainedModel) -> bool:
    """Return whether the projections of a model are to be packed: it must be on a CPU, small enough to be stored twice,
    and in bfloat16 where that is fast or in float32 where bfloat16 is not."""
    if model.device.type != "cpu" or 2 * sum(p.numel() for p in model.parameters()) > LARGEST:
        return False
    if model.dtype == torch.bfloat16:  # on AVX2 oneDNN raises
        return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and not emulated(torch.bfloat16)
    return model.dtype == torch.float32 and has_fbgemm() and emulated(torch.bfloat16)


def has_fbgemm() -> bool:
    """Return whether torch uses FBGEMM here. FBGEMM has kernels only for x86 with AVX2."""
    quantized = torch.backends.quantized
    return "fbgemm" in quantized.supported_engines and quantized.engine in ("fbgemm", "x86")


def pack(weight: Tensor, bias: Tensor | None) -> Product | None:
    """Return an object that multiplies by a packed copy of the weight (out, in) and adds the bias (out,), None for no
    bias. Return None if the copy could not represent the weight's numbers."""
    if weight.dtype == torch.bfloat16:
        return InBfloat16(weight, bias)
    factor = factor_of(weight)
    return None if factor is None else InFloat16(weight, bias, factor)


def factor_of(weight: Tensor) -> float | None:
    """Return a power of two f such that float16 can represent f times a float32 weight (out, in): 1 if possible. Return
    None if there is no such f. No number may change by more than 2^-30 times the largest number of its row; products in
    float32 have only 24 binary digits. Only numbers of a trained draft that are nearly 0 change at all."""
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if not 0 < largest < math.inf:
        return None
    for factor in (1.0, 2.0 ** (15 - math.frexp(largest)[1])):
        if all(_is_float16(rows * factor) for rows in weight.split(CHUNK)):
            return factor
    return None


def _is_float16(rows: Tensor) -> bool:
    error = (rows.to(torch.float16).to(torch.float32) - rows).abs()
    return bool((error <= 2.0**-30 * rows.abs().amax(1, keepdim=True)).all())
