"""Detection of changes to a model. Anything computed from a model's weights is used only while they are unchanged.

Addresses and torch's version counters are not enough: `p.data.copy_(...)` and merging an adapter change values in place
without changing the counter. Therefore a checksum reads every byte, once for each of two sums, at memory bandwidth. It
detects a change of one element; a check of samples would miss that. Every call compares a `Stamp`, which reads the
values only if copies of them exist, and once if `kernels.cpp` is loaded.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from math import isqrt
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

VERSION = attrgetter("_version")  # a model has hundreds of tensors, and every pass reads their counters
WORD = 8  # bytes
FEW = 512  # words: for shorter tensors the checksum reads the bytes themselves
_UNCHANGED: WeakKeyDictionary[nn.Module, bytes] = WeakKeyDictionary()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Within the `with` block, read the model's values once for all calls of `checksum`. The caller must not change the
    model in the block."""
    outer = model in _UNCHANGED
    _UNCHANGED[model] = checksum(model)
    try:
        yield
    finally:
        if not outer:
            del _UNCHANGED[model]


def checksum(model: nn.Module) -> bytes:
    """Return a checksum (16 bytes) of all parameters and buffers in order, with dtype and shape. Their addresses do not
    count."""
    return _UNCHANGED.get(model) or _checksum(model)


class Stamp:
    """The state of a model at one time. It covers the model's modules, their parameters, forwards, hooks and numbers
    (such as a norm's epsilon), its config and its end tokens.

    addresses: whether to compare the tensors' addresses and torch's change counters too; needed if other code uses the
    addresses, as a CUDA graph does. values: whether to sum the values' bytes too; needed if copies of the values exist,
    since torch does not count a change by `.data`. Tensors whose addresses are compared are referenced, so that no
    other tensor gets the same address.
    """

    def __init__(self, model: nn.Module, *, addresses: bool, values: bool) -> None:
        self.addresses, self.values = addresses, values
        self.hashed = hasattr(torch.ops.inference, "hash_of")
        self.memory = list(_stored(_tensors(model))) if addresses else []
        self.seen = self._look(model)

    def holds(self, model: nn.Module) -> bool:
        """Return whether the model is still in the state in which the stamp was made."""
        return self.seen == self._look(model)

    def _look(self, model: nn.Module) -> tuple[Any, ...]:
        modules = [
            (
                type(m).forward,
                vars(m).get("forward"),
                *map(id, m._parameters.values()),
                *(value for value in vars(m).values() if type(value) is float),
                *m._forward_hooks,
                "before",
                *m._forward_pre_hooks,
            )
            for m in model.modules()
        ]
        kinds = {(p.dtype, p.device) for p in model.parameters()}
        tensors = [(changes([t]), _where(t)) for t in _tensors(model)] if self.addresses else []
        config = getattr(model, "config", None)
        ends = repr(getattr(getattr(model, "generation_config", None), "eos_token_id", None))
        values = (_hash if self.hashed else _checksum)(model) if self.values else None
        return modules, kinds, repr(config and vars(config)), ends, tensors, values


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


def _where(tensor: Tensor) -> list[tuple[Any, ...]]:
    return [(part.data_ptr(), part.dtype, part.device, part.shape, part.stride()) for part in _stored([tensor])]


def changes(tensors: Iterable[Tensor]) -> int:
    """Return how often the tensors were changed, by torch's counters. Return 0 for tensors of inference mode; torch
    does not count their changes."""
    try:
        return sum(map(VERSION, tensors))
    except RuntimeError:
        return 0


def _checksum(model: nn.Module) -> bytes:
    checksum = hashlib.blake2b(digest_size=16)
    sums: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for tensor in _stored(_tensors(model)):
            checksum.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            sums.setdefault(tensor.device, []).extend(_sums(tensor))
        for parts in sums.values():
            if parts:
                checksum.update(torch.cat(parts).cpu().numpy().tobytes())  # one transfer a device
    return checksum.digest()


def _hash(model: nn.Module) -> Any:
    """Return a hash of the model's parameters and buffers, by an operator of `kernels.cpp` if they are on the CPU."""
    tensors = list(_stored(_tensors(model)))
    if {tensor.device.type for tensor in tensors} != {"cpu"}:
        return _checksum(model)
    return [(tensor.dtype, tensor.shape) for tensor in tensors], int(torch.ops.inference.hash_of(tensors))


def _stored(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Yield plain tensors. A sharded tensor gives this process's part; a quantised tensor gives the tensors that it
    wraps."""
    for tensor in tensors:
        data = tensor.detach()
        if hasattr(data, "to_local"):
            yield data.to_local()
        elif hasattr(data, "__tensor_flatten__"):
            yield from _stored(getattr(data, name) for name in data.__tensor_flatten__()[0])
        else:
            yield data


def _sums(tensor: Tensor) -> list[Tensor]:
    """Return sums of the tensor's bytes, read as 64-bit integers and laid out in a square. Sums are modulo 2^64.

    There is a sum for each row and for each column. Integers that do not fill the square, and bytes
    that do not fill an integer, are returned unchanged. Changing a value changes the sums, and so does moving one.
    """
    if tensor.is_meta:
        return []
    whole = tensor.contiguous().view(-1).view(torch.uint8)
    if whole.data_ptr() % WORD or whole.storage_offset() % WORD:
        whole = whole.clone()  # a view of words begins at a whole word
    words = len(whole) // WORD
    if words < FEW:
        return [whole.to(torch.int64)]
    side = isqrt(words)
    used = words // side * side
    square = whole[: used * WORD].view(torch.int64).view(-1, side)
    return [square.sum(0), square.sum(1), whole[used * WORD :].to(torch.int64)]
