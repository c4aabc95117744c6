"""Second copies of weights, in the order in which the kernels of a CPU read them.

For a weight in torch's own order, a kernel rearranges it at every call. Those of `kernels.cpp` read weights that are
already rearranged, if bfloat16 or float16 represents them, as one does for nearly every checkpoint, or if they are
rounded to 8 or 4 bits. They widen each weight, and states and sums are in float32, so a pass of a model in float32
differs from its own only in the order of sums. (Weights in 8 bits are multiplied by x rounded to 16 bits, those in 4
bits by x rounded to 8, in whole numbers.) It reads half of the bytes or less, and a few ids take little more time than
one (`docs/measurements/smollm2.md`). On a CPU with instructions for bfloat16, products of a model in bfloat16 round
what they multiply to bfloat16, as the model's own do, and sum in float32: many ids take half of the time. A row's
product is then the same beside any others, bit for bit, so passes of up to 16 ids a row give the same logits. So do
longer ones on a CPU without AMX, while no row of the pass reads more than 1,024 slots. Copies share large
pages of memory, where Linux has them, since a CPU waits for its table of small ones. The kernels are compiled once per
machine, by the machine's C++ compiler.
"""

import copy
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import cpp_extension
from transformers import PreTrainedModel

from inference.models.passes import ALONE
from inference.models.pretrained import cast, weights_quantisation, widened

# a model is stored twice if its copies take at most this share of the memory: with the model in half precision and the
# copy in float32 that checks make, half of it
SHARE = 1 / 8
CHUNK = 4096  # rows of a weight that are compared at once
NARROW = (torch.bfloat16, torch.float16)  # in which weights are stored
GROUP = 32  # inputs of a weight in 4 bits that share a scale
SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-std=c++20", "-fPIC", "-fopenmp")


class Widened:
    """Multiplies by a weight (out, in), and adds a bias (out,) or None, by `kernels.cpp`, with sums in float32. weight:
    in bfloat16, float16 or int8, or the bits of bfloat16 as int16. With a weight in bfloat16, x is rounded to bfloat16
    first if the CPU has instructions for such products. With one in int8, each row of x is rounded to 16 bits; with one
    in 4 bits, each group of a row to 8. scale in float32: for an int8 weight, (out,) if its row r means scale[r] *
    weight[r]; (out, in / GROUP) for weights from -8 to 7, which are stored in 4 bits, with the scales of groups of
    inputs, in bfloat16. nbytes: of the second copy. exact: the weight whose rows replace the largest products
    (`Rescored`), or empty."""

    exact = torch.empty(0)

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> None:
        self.weight: Tensor = torch.ops.inference.packed(
            weight.contiguous(), torch.empty(0) if scale is None else scale
        )
        self.nbytes = self.weight.nbytes
        self.bias = torch.empty(0) if bias is None else bias.to(torch.float32, copy=True)
        self.outputs = len(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product (..., out) for x (..., in)."""
        product: Tensor = torch.ops.inference.product(x, self.weight, self.bias, self.exact, self.outputs)
        return product


class Rescored(Widened):
    """Multiplies by the weight (out, in) of a draft's head, which it reads in 4 bits. The largest logits, by which a
    draft is drawn, are then computed again from rows of the weight itself."""

    def __init__(self, weight: Tensor) -> None:
        parts = [int4_groups(rows, best_scales(in_groups(rows.float()))) for rows in weight.split(CHUNK)]
        numbers, scales = map(torch.cat, zip(*parts, strict=True))
        super().__init__(numbers, None, scales.float())
        self.exact = weight.contiguous()


def in_groups(weight: Tensor) -> Tensor:
    """Return weights (..., in) as (..., groups, inputs of a group): `GROUP`, or all if they are fewer."""
    return weight.unflatten(-1, (-1, min(GROUP, weight.shape[-1])))


def nearest(shares: Tensor) -> Tensor:
    """Return the whole numbers from -8 to 7 (...), those of 4 bits, that are nearest to some numbers (...)."""
    return shares.round().clamp(-8, 7)


def best_scales(groups: Tensor) -> Tensor:
    """Return the scale (...) of each group (..., n) of numbers, of some candidates that with which whole numbers from
    -8 to 7 have the least squared error. The largest magnitude of a group is near -8 times the scale, or -8."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    largest = torch.where(largest == 0, 1e-6, largest)
    best, error = largest, torch.full_like(largest, torch.inf)
    for candidate in range(13):
        scale = (largest * (0.4 * candidate / 12 - 1.1) / 8).to(torch.bfloat16).float()
        its_error = (nearest(groups / scale) * scale - groups).square().sum(-1, keepdim=True)
        best = torch.where(its_error < error, scale, best)
        error = torch.minimum(its_error, error)
    return best.squeeze(-1)


def int4_groups(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 numbers (out, in) from -8 to 7 that are nearest to a weight (out, in) over its scales, and the
    scales in bfloat16. scales (out, groups): above or below 0."""
    scales = scales.to(torch.bfloat16)
    shares = in_groups(weight.float()) / scales.float().unsqueeze(2)
    return nearest(shares).flatten(1).to(torch.int8), scales


@functools.cache
def has_kernels() -> bool:
    """Return whether this process has the operators of `kernels.cpp`. The first call on a machine compiles them, into
    the folder in which torch has other extensions. If that fails, as without a C++ compiler, there is one warning."""
    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    command = [compiler(), *FLAGS, "-DAT_PARALLEL_OPENMP=1", *include]
    instructions = of_cpu("flags", "Features")  # a home folder may be shared by machines
    identity = "\0".join([SOURCE.read_text(encoding="utf-8"), torch.__version__, *command, instructions])
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
    return True


def compiler() -> str:
    """Return the C++ compiler: that of CXX, or g++ or c++ if they are there."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or "g++"


def widened_draft(network: PreTrainedModel, copied: bool = False) -> PreTrainedModel:
    """Cast the network of a draft over states to float32, in place, if `kernels.cpp` serves it, or if it is on a CPU
    that would emulate its dtype. Return the network. copied: whether to cast and return a copy instead."""
    if widens(network):
        return cast(copy.deepcopy(network) if copied else network, torch.float32)
    return widened(network, copied)


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


@contextmanager
def products_in_float32(needed: bool = True) -> Iterator[None]:
    """Until the block ends, products of models in bfloat16 do not round what they multiply, for checks that compare a
    forward with float32. needed: whether there may be such products. The setting is for the whole process, whose other
    calls wait for the block's end."""
    loaded = needed and has_kernels()
    with ALONE:
        before = loaded and torch.ops.inference.rounding(False)
        try:
            yield
        finally:
            if loaded:
                torch.ops.inference.rounding(before)


def memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or the limit of its container, of cgroup
    v2."""
    if sys.platform == "win32":
        return 2**33
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no container, or one without a limit
        return memory


def of_cpu(*names: str) -> str:
    """Return the first line of /proc/cpuinfo that begins with one of the names, "" if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(names)), "")


def can_pack(model: PreTrainedModel, width: int = 2) -> bool:
    """Return whether the projections of a model are to be packed: it must be on a CPU, small enough to be stored twice,
    and in float32 or half precision. width: bytes of a number in the copy."""
    return model.device.type == "cpu" and is_small(model, width) and model.dtype in (*NARROW, torch.float32)


def serves(model: PreTrainedModel, width: int = 2) -> bool:
    """Return whether `kernels.cpp` serves a model whose weights it can represent, in `width` bytes each."""
    return can_pack(model, width) and has_kernels()


def rounds(dtype: torch.dtype) -> bool:
    """Return whether products of a model in this dtype round what they multiply (`products_in_float32`)."""
    return dtype == torch.bfloat16 and has_kernels() and bool(torch.ops.inference.has_rounding())


def widens(model: PreTrainedModel) -> bool:
    """Return whether a model in half precision is served in float32, by `kernels.cpp`."""
    return model.dtype in NARROW and not weights_quantisation(model.config) and serves(model)


def is_small(model: PreTrainedModel, width: int = 2) -> bool:
    """Return whether a model may be stored twice, the second time in `width` bytes a number."""
    return width * sum(p.numel() for p in model.parameters()) <= SHARE * memory()


def pack(weight: Tensor, bias: Tensor | None) -> Widened | None:
    """Return an object that multiplies by a packed copy of the weight (out, in) and adds the bias (out,), None for no
    bias. Return None if the copy could not represent the weight's numbers, or has no kernel here."""
    for dtype in NARROW:
        if dtype == torch.bfloat16 and weight.shape[1] % 2:  # its copy has pairs of inputs
            continue
        if weight.dtype == dtype or all(torch.equal(rows, rows.to(dtype).float()) for rows in weight.split(CHUNK)):
            narrow = weight.to(dtype)
            if dtype == torch.bfloat16 and weight.dtype == torch.float32:  # the model's own products do not round
                narrow = narrow.view(torch.int16)
            return Widened(narrow, bias) if has_kernels() else None
    return None
