"""Second copies of weights, in the order in which the kernels of a CPU read them.

For a weight in torch's own order, a kernel rearranges it at every call. Two kernels accept weights that are already
rearranged:

- oneDNN's, for models in bfloat16 on a CPU with instructions for it.
- those of `kernels.cpp`, for models in float32 on a CPU that would emulate bfloat16, if bfloat16 or float16 represents
  their weights, as one does for nearly every checkpoint, or if they are rounded to 8 bits. The kernels widen each
  weight and compute in float32, so a pass differs from the float32 model only in the order of sums. It reads half of
  the bytes or a quarter, and a few ids take little more time than one (`docs/measurements/smollm2.md`). They are
  compiled once per machine, by the C++ compiler that torch.compile uses too.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.utils import cpp_extension
from transformers import PreTrainedModel

from inference.models.pretrained import emulated

LARGEST = 2**30  # bytes of copies: larger models are not stored twice
ROWS = 32  # ids of a pass for which oneDNN chooses the order; other numbers work as well
CHUNK = 4096  # rows of a weight that are compared at once
ALIGNED = 64  # bytes that a kernel reads at once
NARROW = (torch.bfloat16, torch.float16)  # in which weights are stored
SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-std=c++20", "-fPIC", "-fopenmp")


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


class Widened:
    """A `Product` in float32 by `kernels.cpp`. weight (out, in), in bfloat16, float16 or int8. bias (out,) in float32,
    or None. scale (out,) in float32: for an int8 weight, whose row r means scale[r] * weight[r]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> None:
        self.width = weight.itemsize
        with torch.inference_mode(False):  # compiled code differs for tensors of inference mode
            self.weight: Tensor = torch.ops.inference.packed(
                weight.contiguous(), torch.empty(0) if scale is None else scale
            )
            self.bias = torch.empty(0) if bias is None else bias.clone()
        self.outputs = len(weight)

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.inference.product(x, self.weight, self.bias, self.outputs)
        return product


@functools.cache
def has_kernels() -> bool:
    """Return whether this process has the operators of `kernels.cpp`. The first call on a machine compiles them, into
    the folder in which torch has other extensions. If that fails, as without a C++ compiler, there is one warning."""
    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    command = [compiler(), *FLAGS, "-DAT_PARALLEL_OPENMP=1", *include]
    identity = "\0".join([SOURCE.read_text(encoding="utf-8"), torch.__version__, *command, _processor()])
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    library = Path(cpp_extension.get_default_build_root()) / "cotrain" / f"{name}.so"
    try:
        if not library.exists():
            print("compiling kernels for this CPU, once: some 15 seconds", file=sys.stderr, flush=True)
            _compile(command, library)
        torch.ops.load_library(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "error" in line), lines[-1])
        warnings.warn(
            "passes read weights of twice the size, since the kernels for CPUs cannot be compiled (a C++ compiler such "
            f"as g++ is needed): {reason.strip()}",
            stacklevel=2,
        )
        return False

    @torch.library.register_fake("inference::product")
    def _(x: Tensor, weight: Tensor, bias: Tensor, outputs: int) -> Tensor:
        return x.new_empty(*x.shape[:-1], outputs)

    return True


def compiler() -> str:
    """Return the C++ compiler: that of CXX, or g++ or c++ if they are there."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or "g++"


def widens() -> bool:
    """Return whether drafts in bfloat16 are served in float32 by `kernels.cpp`, not by torch's kernel for 8 bits: where
    the CPU would emulate bfloat16."""
    return emulated(torch.bfloat16) and has_kernels()


def _compile(command: Sequence[str], library: Path) -> None:
    """Compile `SOURCE` to a library, which is whole or absent: several processes may compile it at once."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        # without a library of threads of its own, so that it shares torch's
        link = [command[0], "-shared", str(compiled), "-o", str(linked), f"-L{cpp_extension.TORCH_LIB_PATH}"]
        for one in ([*command, "-c", str(SOURCE), "-o", str(compiled)], [*link, "-ltorch_cpu", "-lc10"]):
            subprocess.run(one, check=True, capture_output=True, text=True)
        linked.replace(library)


def _processor() -> str:
    """Return what instructions this CPU has: a home folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def can_pack(model: PreTrainedModel) -> bool:
    """Return whether the projections of a model are to be packed: it must be on a CPU, small enough to be stored twice,
    and in bfloat16 where that is fast or in float32 where bfloat16 is not."""
    if model.device.type != "cpu" or not is_small(model):
        return False
    if model.dtype == torch.bfloat16:  # on AVX2 oneDNN raises
        return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and not emulated(torch.bfloat16)
    return model.dtype == torch.float32 and emulated(torch.bfloat16)


def is_small(model: PreTrainedModel) -> bool:
    """Return whether a model may be stored twice."""
    return 2 * sum(p.numel() for p in model.parameters()) <= LARGEST


def pack(weight: Tensor, bias: Tensor | None) -> Product | None:
    """Return an object that multiplies by a packed copy of the weight (out, in) and adds the bias (out,), None for no
    bias. Return None if the copy could not represent the weight's numbers, or has no kernel here."""
    if weight.dtype == torch.bfloat16:
        return InBfloat16(weight, bias)
    for dtype in NARROW:
        if all(torch.equal(rows, rows.to(dtype).float()) for rows in weight.split(CHUNK)):
            return Widened(weight.to(dtype), bias) if has_kernels() else None
    return None
