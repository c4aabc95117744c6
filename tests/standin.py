"""A CUDA device that is not there, for tests without a GPU (torch 2.13, CPU build, pure Python).

Tensors say `cuda:N` and hold their values in main memory. Every operation is checked and counted as CUDA would run it:
mixed devices raise, host reads and host-to-device copies are counted with their place in the code, CUDA graphs record
without running and replay into the memory that they were recorded with. What eager CUDA would not write (torch.empty)
or not have computed yet (outputs of a recording) is NaN.

    with standin.device() as gpu:
        model.to("cuda"); ...
        gpu.launches, gpu.h2d, gpu.d2h, gpu.sites
"""

import contextlib
import inspect
import os
import sys
import warnings
import weakref
from collections import Counter, defaultdict
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
HERE: "Gpu | None" = None
INSIDE = (
    "standin"  # what torch's own code sees: a backend in Python (PrivateUse1), which has a backward pass on a CPU build
)
# that CUDA computes for floating-point numbers alone
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot"}
READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "bincount",
    "allclose",
    "repeat_interleave",
}
# operations that torch.autocast computes in half precision, and in float32
HALF = "bmm baddbmm addmm mm mv linear matmul einsum scaled_dot_product_attention"
SINGLE = "cumprod cumsum exp expm1 kl_div layer_norm log log1p log_softmax nll_loss norm pow prod reciprocal rms_norm rsqrt softmax softplus sum"
MAKES = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
SEQUENCES, NAMES = (list, tuple), (torch.device, str)
OURS = ("/inference/", "/cotrain/", "/tests/")
THEIRS = ("/transformers/", "/lightning/")


class _Operation(NamedTuple):
    """What is asked of an operation at every call, looked up once: torch's schemas and trees are slow."""

    name: str
    composite: bool
    written: bool
    aliased: bool  # returns views of its arguments, or what it wrote to
    schema: Any


def _operation(func):
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
    name = func._schema.name.removeprefix("aten::")
    return _Operation(name, composite, any(alias.is_write for alias in aliases), bool(aliases), func._schema)


AUTOCAST = "AutocastPrivateUse1"
CASTS, REST = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
OPERATIONS: dict[int, _Operation] = {}
NEW, COPY = _Operation("", False, False, False, None), _operation(aten.copy_.default)


class Cuda(Tensor):
    """raw: the values, on the CPU."""

    raw: Tensor
    card: int
    is_cuda = True

    @property
    def device(self):
        return torch.device("cuda", self.card)

    @staticmethod
    def __new__(cls, raw: Tensor, index: int | None = None, requires_grad: bool = False) -> "Cuda":
        if index is None:  # accelerate makes a parameter again, of the class that it has
            return torch.nn.Parameter(raw, requires_grad)
        found = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(INSIDE, index),
        )
        found.raw, found.card = raw, index
        HERE and HERE.held(found)
        return found

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if HERE is None:
            raise RuntimeError("a stand-in tensor outlived its device")
        return HERE.run(func, args, kwargs or {})

    def tolist(self):
        return self.to("cpu").tolist()

    def data_ptr(self):
        return self.raw.data_ptr()

    def untyped_storage(self):
        return self.raw.untyped_storage()

    @property
    def data(self):
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, new):
        with torch.inference_mode(self.is_inference()):  # else torch calls the types of the two incompatible
            Tensor.data.__set__(self, Cuda(new.raw, new.card))
        self.raw, self.card = new.raw, new.card
        HERE and HERE.held(self)

    def __format__(self, spec):
        return format(self.cpu() if self.dim() else self.item(), spec)

    def __repr__(self, **_):
        if HERE is not None:
            HERE.read()
        return f"Cuda({self.raw!r}, device='{self.device}')"

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            new = Cuda(self.raw.detach().clone(), self.card)
            if getattr(self, "_is_param", False):
                new = torch.nn.Parameter(new, self.requires_grad)
            memo[id(self)] = new
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        """Files are read to the CPU, as with map_location."""
        HERE.read()
        return self.raw.detach().__reduce_ex__(protocol)


for supported in (_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types):
    supported.append(Cuda)


class Graph:
    """torch.cuda.CUDAGraph: what was recorded, run again into the same memory."""

    def __init__(self, keep_graph=False):
        self.ops, self.index, self.pool_id = [], None, None
        self.fresh = False  # whether its results were computed and may be read
        self.made, self.read = set(), {}  # storages: its own, and those of others with the operation that reads each

    def replay(self):
        gpu = HERE
        for key, name in self.read.items():
            if key not in gpu.storages:  # CUDA would have given this memory to others
                raise RuntimeError(f"aten::{name} was recorded with memory that is free by now")
        for other in gpu.pools[self.pool_id]:  # memory is shared: a replay may overwrite what others returned
            if other.fresh and other is not self:
                other.poison()
        self.fresh = True
        gpu.launches[gpu.phase] += 1  # one cudaGraphLaunch
        gpu.pending = True
        gpu.replays[gpu.phase] += 1
        gpu.inside[gpu.phase] += len(self.ops)
        with _OnRaw():
            for _, fn, _, outs, fresh in self.ops:
                new = fn()
                if fresh:
                    for old, value in zip(outs, _tensors(new), strict=True):
                        old.copy_(value)

    def poison(self):
        """Results hold no number that may be used."""
        self.fresh = False
        with _OnRaw():
            for *_, outs, fresh in self.ops:
                for out in outs if fresh else ():
                    _poison(out)

    def __del__(self):
        if HERE is not None and HERE.graph is not None:
            HERE.destroyed = True

    def pool(self):
        return self.pool_id

    def reset(self):
        self.ops = []


class _Capture:
    """torch.cuda.graph"""

    def __init__(self, graph, pool=None, stream=None, capture_error_mode="global", **_):
        self.graph, self.pool = graph, pool

    def __enter__(self):
        gpu = HERE
        gpu.synchronise()
        gpu.recordings += 1
        self.graph.index = gpu.current
        self.graph.pool_id = self.pool or object()
        if self.pool in gpu.pools and not gpu.pools[self.pool]:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: all graphs of this memory pool are gone")
        gpu.pools.setdefault(self.graph.pool_id, weakref.WeakSet()).add(self.graph)
        gpu.graph, gpu.destroyed = self.graph, False

    def __exit__(self, kind, *_):
        gpu, gpu.graph = HERE, None
        if gpu.destroyed:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        pool = set().union(*(other.made for other in gpu.pools[self.graph.pool_id]))
        self.graph.read = {key: name for key, name in self.graph.read.items() if key not in pool}
        if not self.graph.ops:
            warnings.warn("The CUDA Graph is empty: captured on another device or stream?", stacklevel=2)
        self.graph.poison()
        return False


class _Stream:
    def __init__(self, device=None, **_):
        self.device = device

    def wait_stream(self, other): ...
    def synchronize(self):
        HERE.synchronise()


class _Mode(TorchDispatchMode):
    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.gpu.run(func, args, kwargs or {}, Cuda in types)


_Mode.__torch_dispatch__ = inspect.unwrap(_Mode.__torch_dispatch__)  # nothing is compiled here: without Dynamo's guards


class _Names(TorchFunctionMode):
    """`cuda` is the current device, and data from Python comes by way of the host: a CPU build cannot ask for either."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def _named(self, value):
        if isinstance(value, torch.device):
            index = self.gpu.index(value)
            return value if index is None else torch.device(INSIDE, index)
        return self._named(torch.device(value)) if isinstance(value, str) and value.startswith("cuda") else value

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {name: self._named(value) for name, value in (kwargs or {}).items()}
        args = tuple([self._named(value) if isinstance(value, NAMES) else value for value in args])
        if func is Tensor.pin_memory:  # a CPU build has no such memory: a copy that is known as one
            if torch._debug_has_internal_overlap(args[0]) == 1:  # as an H200 did
                raise RuntimeError("unsupported operation: more than one element refers to a single memory location")
            found = args[0].clone()
            self.gpu.pinned[id(found)] = weakref.ref(found)
            return found
        if func in (torch.tensor, torch.as_tensor) and self.gpu.index(kwargs.get("device")) is not None:
            where = kwargs.pop("device")
            args = _mapped(Tensor.item, args) if isinstance(args[0], SEQUENCES) else args
            return (args[0] if isinstance(args[0], Tensor) else func(*args, **kwargs)).to(where)
        if getattr(func, "__name__", "") == "cuda" and func is Tensor.cuda:
            return args[0].to(torch.device("cuda", self.gpu.current))
        return func(*args, **kwargs)


class Gpu:
    """launches, h2d, d2h, moved (bytes read and written), by phase; blocking: copies to the device that are waited for,
    since what is copied is not pinned or the copy is not asked to run by itself; sites: (kind, place) -> how often."""

    storages: dict[int, list] = {}  # in use, also those of an earlier device: caches hold them

    def __init__(self, arch: str = "sm80", devices: int = 2):
        self.arch, self.devices, self.current, self.phase = arch, devices, 0, "-"
        self.graph = None
        self.recordings = 0
        self.destroyed = False  # whether a graph was destroyed during the current capture
        self.pools: dict[object, weakref.WeakSet[Graph]] = {}
        self.pinned: dict[int, weakref.ref] = {}
        self.live = self.peak = 0
        self.clear()

    def clear(self):
        self.launches, self.h2d, self.d2h, self.moved = Counter(), Counter(), Counter(), Counter()
        self.replays, self.inside = Counter(), Counter()
        self.ops, self.sites = defaultdict(Counter), Counter()
        self.attention = Counter()
        self.waits = self.blocking = 0
        self.pending = False  # whether something was launched after the last wait or read

    # memory
    def held(self, tensor):
        storage = tensor.raw.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        entry = self.storages.setdefault(key, [0, size])
        if entry[0] == 0:
            entry[1] = size
            self.live += size
            self.peak = max(self.peak, self.live)
        entry[0] += 1
        weakref.finalize(tensor, self._released, key)

    def _released(self, key):
        entry = self.storages[key]
        entry[0] -= 1
        if not entry[0]:
            self.live -= entry[1]
            del self.storages[key]

    def synchronise(self, *_):
        if self.graph is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.waits += 1
        self.pending = False

    def index(self, device) -> int | None:
        """Of a device argument; None for the CPU."""
        if device is None:
            return None
        device = torch.device(device)
        if device.type not in ("cuda", INSIDE):
            return None
        return self.current if device.index is None else device.index

    def site(self, kind):
        frame, theirs = sys._getframe(2), ""
        while frame:
            name = frame.f_code.co_filename
            if any(part in name for part in OURS) and "site-packages" not in name and name != __file__:
                place = f"{name.rsplit('/', 2)[-2]}/{name.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
                self.sites[self.phase, kind, place + (f"  <- {theirs}" if theirs else "")] += 1
                return
            if not theirs and any(part in name for part in THEIRS):
                theirs = f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
            frame = frame.f_back
        self.sites[self.phase, kind, "?"] += 1

    def read(self):
        if self.graph is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.d2h[self.phase] += 1
        self.pending = False
        self.site("d2h")

    def sent(self):
        if self.graph is not None:
            raise RuntimeError(
                "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned"
            )
        self.h2d[self.phase] += 1
        self.site("h2d")

    def run(self, func, args, kwargs, some=True):
        """some: whether a tensor of the device is among the arguments."""
        wanted = self.index(kwargs.get("device") or next((x for x in args if isinstance(x, torch.device)), None))
        if not some and wanted is None:
            return func(*args, **kwargs)  # the host's own business
        with torch._C.DisableTorchFunction():  # which would look at every tensor's attributes
            return self._run(func, args, kwargs, wanted)

    def _run(self, func, args, kwargs, wanted):
        operation = OPERATIONS.get(id(func))
        if operation is None:
            operation = OPERATIONS[id(func)] = _operation(func)
        name, composite = operation.name, operation.composite
        flat, args_raw = [], []
        for x in args:
            if isinstance(x, Tensor):
                flat.append(x)
                args_raw.append(x.raw if isinstance(x, Cuda) else x)
            elif isinstance(x, SEQUENCES):
                _gather(x, flat)
                args_raw.append(_mapped(_raw, x))
            else:
                args_raw.append(x)
        if kwargs:
            _gather(kwargs.values(), flat)
        ours = [x for x in flat if isinstance(x, Cuda)]
        if composite:  # inference mode leaves these whole
            with _Mode(self):
                return func.decompose(*args, **kwargs)
        indices = {x.card for x in ours}
        if name == "_to_copy":
            return self._copied(args[0], kwargs, wanted)
        if name == "copy_":
            return self._into(*args, **kwargs)
        if name.rstrip("_") in ("index", "index_put", "_index_put_impl"):
            for at in args[1]:
                if at is not None and not isinstance(at, Cuda):
                    self.sent()
                    self.blocking += 1
                if at is not None and at.dtype in (torch.bool, torch.uint8):
                    self.read()
            strange = [
                x for x in (args[0], *args[2:3]) if isinstance(x, Tensor) and not isinstance(x, Cuda) and x.dim()
            ]
        elif name.endswith("_like") or name.startswith("new_"):  # of a shape alone
            strange = False
        else:
            strange = len(ours) < len(flat) and any(not isinstance(x, Cuda) and x.dim() for x in flat)
        host_written = operation.written and isinstance(args[0], Tensor) and not isinstance(args[0], Cuda)
        if strange or host_written or len(indices) > 1:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(sorted({str(x.device) for x in flat}))}! (aten::{name})"
            )
        if name in PRODUCTS and any(not x.dtype.is_floating_point and not x.dtype.is_complex for x in ours):
            raise RuntimeError(f"\"{name}_cuda\" not implemented for '{ours[0].dtype}'")
        if name in READS and kwargs.get("output_size") is None:
            self.read()
        here = indices.pop() if indices else wanted
        kwargs_raw = _mapped(_raw, kwargs)
        if kwargs_raw.get("device") is not None:
            kwargs_raw["device"] = torch.device("cpu")
        if kwargs_raw.get("pin_memory"):
            kwargs_raw["pin_memory"] = False
        return self.launch(
            name, lambda: func(*args_raw, **kwargs_raw), [x.raw for x in ours], here, args, kwargs, operation
        )

    def launch(self, name, fn, ins, here, args=(), kwargs={}, operation=NEW):
        written = operation.written
        recorded = self.graph is not None and self.graph.index == here
        with _OnRaw():
            # nothing runs while it is recorded
            outs_raw = None if recorded and written else fn()
        if name in MAKES and outs_raw is not None:
            _poison(outs_raw)
        outs = [] if outs_raw is None else _tensors(outs_raw)
        if recorded:
            before = {x.untyped_storage()._cdata for x in ins}
            self.graph.read |= dict.fromkeys(before - self.graph.read.keys(), name)
            self.graph.made |= {x.untyped_storage()._cdata for x in outs} - before
        views = bool(outs) and not written and _are_views(outs, ins)
        free = (
            views
            or name in MAKES
            or (outs and not any(x.numel() for x in outs))
            or name in ("detach", "alias", "lift_fresh")
        )
        if not free:
            if recorded:
                self.graph.ops.append((name, fn, ins, outs, not written))
            else:
                size = sum(x.numel() * x.element_size() for x in (*ins, *outs))
                self.launches[self.phase] += 1
                self.pending = True
                self.ops[self.phase][name] += 1
                self.moved[self.phase] += size
        elif recorded and not views and outs:
            self.graph.ops.append((name, lambda: outs_raw, ins, outs, False))  # keeps the memory
        if written:
            return self._written(operation.schema, args, kwargs)
        wrap = lambda x: Cuda(x, here)
        if operation.aliased:  # a view is what its base is
            base = next(x for x in _tensors((args, kwargs)) if isinstance(x, Cuda))
            with torch.inference_mode(base.is_inference()):
                return _mapped(wrap, outs_raw)
        return wrap(outs_raw) if isinstance(outs_raw, Tensor) else _mapped(wrap, outs_raw)

    def _written(self, schema, args, kwargs):
        """In-place and out= operations return what they wrote to."""
        found = []
        for r in schema.returns:
            if r.alias_info is None:
                continue
            for place, a in enumerate(schema.arguments):
                if a.alias_info is not None and a.alias_info.before_set & r.alias_info.before_set:
                    found.append(args[place] if place < len(args) else kwargs[a.name])
        return found[0] if len(found) == 1 else tuple(found)

    def _copied(self, x, kwargs, wanted):
        device = kwargs.get("device")
        rest = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "pin_memory", "layout")}
        to_host = isinstance(x, Cuda) and device is not None and wanted is None
        if to_host:
            self.read()
            with _OnRaw():
                found = aten._to_copy.default(x.raw, **rest)
            return found
        if not isinstance(x, Cuda):  # from the host
            self.sent()
            pinned = id(x) in self.pinned and self.pinned[id(x)]() is x
            self.blocking += not (pinned and kwargs.get("non_blocking"))
            with _OnRaw():
                return Cuda(aten._to_copy.default(x, **rest), wanted)
        here = x.card
        if wanted is not None and wanted != here:  # between devices
            with _OnRaw():
                return Cuda(aten._to_copy.default(x.raw, **rest), wanted)
        return self.launch("_to_copy", lambda: aten._to_copy.default(x.raw, **rest), [x.raw], here)

    def _into(self, target, source, non_blocking=False):
        if isinstance(target, Cuda) and isinstance(source, Cuda):
            here = target.card
            a, b = target.raw, source.raw
            self.launch("copy_", lambda: a.copy_(b), [a, b], here, (target, source), {}, COPY)
            return target
        if isinstance(target, Cuda):
            if source.dim():
                self.sent()
            with _OnRaw():
                target.raw.copy_(source)
            return target
        self.read()
        with torch.no_grad():
            target.copy_(source.raw)
        return target

    # which kernel torch 2.13 takes (sdp_utils.cpp): sm80 stands for all but H100/B200 with cuDNN > 9.15
    def backend(self, q, k, v, mask, causal, gqa) -> str:
        half, D = q.dtype in (torch.float16, torch.bfloat16), q.shape[-1]
        same = q.shape[1] == k.shape[1] == v.shape[1]
        if self.arch == "sm90" and half and D <= 128 and D % 8 == 0 and k.shape[2] > 1 and (same or gqa):
            return "cudnn" + ("+mask" if mask is not None else "")
        if half and mask is None and D <= 256 and (same or gqa) and not (causal and q.shape[2] != k.shape[2]):
            return "flash"
        if same and q.dtype != torch.float64 and D % (8 if half else 4) == 0:
            return "efficient" + ("+mask" if mask is not None else "")
        return "math"


def _registered():
    """A backend in Python, known to torch's own code from the first device on. Outside of a device it is not there."""
    if torch._C._get_privateuse1_backend_name() == INSIDE:
        return
    from torch.utils import backend_registration as made

    class Module(made._DummyBackendModule):
        def is_available(self):
            return HERE is not None

        def device_count(self):
            return HERE.devices if HERE else 0

        def get_amp_supported_dtype(self):
            return [torch.bfloat16, torch.float16]

        def get_rng_state(self, device=None):  # numbers come from the generator of the CPU
            return torch.get_rng_state()

        def set_rng_state(self, state, device=None):
            torch.set_rng_state(state)

    made._setup_privateuseone_for_python_backend(INSIDE, backend_module=Module())
    REST.fallback(torch.library.fallthrough_kernel, AUTOCAST)
    for names, half in ((HALF, True), (SINGLE, False)):
        for packet in (getattr(aten, name) for name in names.split()):
            for name in packet.overloads():
                if "out" not in name:
                    CASTS.impl(getattr(packet, name), partial(_cast, getattr(packet, name), half), AUTOCAST)


def _cast(operation, half, *args, **kwargs):
    dtype = torch.get_autocast_dtype("cuda") if half else torch.float32
    wide = torch.float64, dtype
    change = lambda x: x.to(dtype) if isinstance(x, Cuda) and x.is_floating_point() and x.dtype not in wide else x
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, AUTOCAST))):
        return operation(*_mapped(change, args), **_mapped(change, kwargs))


def _of_device(function, *args):
    return function(*[INSIDE if arg == "cuda" else arg for arg in args])


class _OnRaw:
    """Values are computed on the CPU, where no mode looks at them and nothing is recorded for backward."""

    def __enter__(self):
        self.guards = torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch._C._InferenceMode(False)
        for guard in self.guards:
            guard.__enter__()
        torch._C._set_grad_enabled(False)  # until the last guard is left, which restores what was before it

    def __exit__(self, *error):
        for guard in reversed(self.guards):
            guard.__exit__(*error)


def _are_views(outs, ins):
    """Whether all the results lie in the memory of arguments, which not every schema says (`_unsafe_view`)."""
    before = {x.untyped_storage()._cdata for x in ins}
    return all(x.numel() and x.untyped_storage()._cdata in before for x in outs)


def _tensors(found):
    """All tensors of nested lists, tuples and dicts."""
    if isinstance(found, Tensor):
        return [found]
    tensors = []
    if found:
        _gather(found.values() if isinstance(found, dict) else found if isinstance(found, SEQUENCES) else (), tensors)
    return tensors


def _gather(values, tensors):
    for x in values:
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, SEQUENCES):
            _gather(x, tensors)
        elif isinstance(x, dict):
            _gather(x.values(), tensors)


def _mapped(change, value):
    """`change` of every tensor in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(change, x) for key, x in value.items()} if value else {}
    if isinstance(value, SEQUENCES):
        parts = [change(x) if isinstance(x, Tensor) else _mapped(change, x) for x in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _raw(x):
    return x.raw if isinstance(x, Cuda) else x


def _poison(found):
    for x in _tensors(found):
        if x.is_floating_point() and x.numel():
            x.fill_(float("nan"))


@contextlib.contextmanager
def device(arch: str = "sm80", devices: int = 2, fused: bool = True):
    """Patches torch.cuda for the time of the block; yields the counters."""
    global HERE
    _registered()
    import torch.nn.functional as F

    gpu = Gpu(arch, devices)
    sdpa = F.scaled_dot_product_attention

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if not isinstance(query, Cuda):
            return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        kind = gpu.backend(query, key, value, attn_mask, is_causal, enable_gqa)
        gpu.attention[gpu.phase, kind] += 1
        if kind == "math" or not fused or (torch.is_grad_enabled() and query.requires_grad):
            return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        raws = [x.raw for x in (query, key, value)] + ([attn_mask.raw] if attn_mask is not None else [])
        fn = lambda: sdpa(
            *raws[:3], raws[3] if attn_mask is not None else None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        if kind == "efficient+mask" and any(stride % 16 for stride in attn_mask.stride()[:-1]):
            attn_mask.clone()  # rows of a mask that begin elsewhere are copied to where the kernel can read them
        return gpu.launch("sdpa_" + kind, fn, raws, query.card)

    @contextlib.contextmanager
    def on(which):
        index = gpu.index(which) if not isinstance(which, int) else which
        old, gpu.current = gpu.current, gpu.current if index is None else index
        yield
        gpu.current = old

    @contextlib.contextmanager
    def stream(_):
        yield

    new = {
        (torch.cuda, "_lazy_init"): lambda: None,
        (torch.cuda, "is_available"): lambda: True,
        (torch.cuda, "device_count"): lambda: devices,
        (torch.cuda, "current_device"): lambda: gpu.current,
        (torch.cuda, "set_device"): lambda d: setattr(gpu, "current", gpu.index(d) if not isinstance(d, int) else d),
        (torch.cuda, "device"): on,
        (torch.cuda, "get_device_name"): lambda *_: "stand-in",
        (torch.cuda, "get_device_capability"): lambda *_: (9, 0) if arch == "sm90" else (8, 0),
        (torch.cuda, "is_bf16_supported"): lambda *_, **__: True,
        (torch.cuda, "synchronize"): gpu.synchronise,
        (torch.cuda, "max_memory_allocated"): lambda *_: gpu.peak,
        (torch.cuda, "mem_get_info"): lambda *_: (2**33, 2**33),
        (torch.cuda, "get_rng_state"): lambda *_: torch.get_rng_state(),  # numbers come from the generator of the CPU
        (torch.cuda, "set_rng_state"): lambda state, *_: torch.set_rng_state(state),
        (torch.cuda, "Stream"): _Stream,
        (torch.cuda, "current_stream"): lambda *_: _Stream(),
        (torch.cuda, "stream"): stream,
        (torch.cuda, "CUDAGraph"): Graph,
        (torch.cuda, "graph"): _Capture,
        (torch.cuda, "graph_pool_handle"): lambda: object(),
        (torch.accelerator, "synchronize"): gpu.synchronise,
        (F, "scaled_dot_product_attention"): attention,
    }
    lifted, overwrite = torch._C._only_lift_cpu_tensors(), torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # `.data =` would lose the values
    for name in ("set_autocast_enabled", "is_autocast_enabled", "set_autocast_dtype", "get_autocast_dtype"):
        new[torch, name] = partial(_of_device, getattr(torch, name))
    old = {key: getattr(*key) for key in new}
    for (owner, name), value in new.items():
        setattr(owner, name, value)
    torch._C._set_only_lift_cpu_tensors(True)
    HERE = gpu
    try:
        # other threads have no modes: transformers would load weights in some
        with (
            mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"),
            _Mode(gpu),
            _Names(gpu),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield gpu
    finally:
        HERE = None
        torch._C._set_only_lift_cpu_tensors(lifted)
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
        for (owner, name), value in old.items():
            setattr(owner, name, value)
