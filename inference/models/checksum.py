"""Whether a model has changed: what was computed from its weights is used only while it has not.

Addresses and torch's version counters are not enough: `p.data.copy_(...)` and merging an adapter change values in place
and count nothing. So a checksum reads every byte once for each of two sums, at the speed of memory: it sees a change of
one element, which samples would miss. `Stamp`, which every call compares, sums once, and only if there are copies.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from math import isqrt
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

WORD = 8  # bytes
FEW = 512  # words: of fewer words the checksum is of the bytes themselves
_UNCHANGED: WeakKeyDictionary[nn.Module, bytes] = WeakKeyDictionary()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Inside the block nobody changes the model: its values are read once for all calls of `fingerprint`."""
    outer = model in _UNCHANGED
    _UNCHANGED[model] = fingerprint(model)
    try:
        yield
    finally:
        if not outer:
            del _UNCHANGED[model]


def fingerprint(model: nn.Module) -> bytes:
    """Checksum of every parameter and buffer, with dtype and shape, in order, whatever their addresses."""
    return _UNCHANGED.get(model) or _checksum(model)


class Stamp:
    """The state of a model at one time: its modules, their parameters and forwards, their hooks, and its config.

    addresses: whether somebody uses the addresses of its tensors; then these count too, and how often each tensor was
    changed, while a model that is only called reads them anew. values: whether somebody has copies of the values; then
    their bytes are summed too, since torch does not count a change by `.data`. Memory whose address counts is kept
    alive, so that no other tensor gets its address.
    """

    def __init__(self, model: nn.Module, *, addresses: bool, values: bool) -> None:
        self.addresses, self.values = addresses, values
        self.memory = list(_stored(_tensors(model))) if addresses else []
        self.seen = self._look(model)

    def holds(self, model: nn.Module) -> bool:
        """Whether the model is unchanged."""
        return self.seen == self._look(model)

    def _look(self, model: nn.Module) -> tuple[Any, ...]:
        modules = [(type(m).forward, vars(m).get("forward"), *map(id, m._parameters.values()),
                    *m._forward_hooks, "before", *m._forward_pre_hooks) for m in model.modules()]  # fmt: skip
        kinds = {(p.dtype, p.device) for p in model.parameters()}
        tensors = [(changes([t]), _where(t)) for t in _tensors(model)] if self.addresses else []
        config = getattr(model, "config", None)
        values = _checksum(model, once=True) if self.values else b""
        return modules, kinds, repr(config and vars(config)), tensors, values


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


def _where(tensor: Tensor) -> list[tuple[Any, ...]]:
    return [(part.data_ptr(), part.dtype, part.device, part.shape, part.stride()) for part in _stored([tensor])]


def changes(tensors: Iterable[Tensor]) -> int:
    """How often they were changed; 0 for tensors of inference mode, which torch does not count."""
    try:
        return sum(t._version for t in tensors)
    except RuntimeError:
        return 0


def _checksum(model: nn.Module, once: bool = False) -> bytes:
    """once: without the sums of columns, in a third of the time; values that change places within a row of the square
    are not seen."""
    checksum = hashlib.blake2b(digest_size=16)
    sums: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for tensor in _stored(_tensors(model)):
            checksum.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            sums.setdefault(tensor.device, []).extend(_sums(tensor, once))
        for parts in sums.values():
            if parts and not parts[0].is_meta:
                checksum.update(torch.cat(parts).cpu().numpy().tobytes())  # one transfer a device
    return checksum.digest()


def _stored(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Plain tensors: this process's part of a sharded tensor, the parts of a quantised one that wraps others."""
    for tensor in tensors:
        data = tensor.detach()
        if hasattr(data, "to_local"):
            yield data.to_local()
        elif hasattr(data, "__tensor_flatten__"):
            yield from _stored(getattr(data, name) for name in data.__tensor_flatten__()[0])
        else:
            yield data


def _sums(tensor: Tensor, once: bool) -> list[Tensor]:
    """Its bytes as 64-bit integers in a square: the sum of every row and (not `once`) of every column, modulo 2^64, and
    the rest as it is. Moving a value changes the sums as well as changing it."""
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
    sums = [square.sum(1)] if once else [square.sum(0), square.sum(1)]
    return [*sums, whole[used * WORD :].to(torch.int64)]
