"""A checksum of all of a model's values: what was made from weights is kept only while they are what they were.

Addresses and torch's version counters do not tell: `p.data.copy_(...)` and merging an adapter change values in place
and count nothing. Every byte is read once for each of two sums, at the speed of memory, so a change of one element is
seen; samples would miss it.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from math import isqrt
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

WORD = 8  # bytes
FEW = 512  # words: of fewer the bytes themselves are kept
_UNCHANGED: WeakKeyDictionary[nn.Module, bytes] = WeakKeyDictionary()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """While it lasts nobody changes the model: its values are read once for all who ask."""
    outer = model in _UNCHANGED
    _UNCHANGED[model] = fingerprint(model)
    try:
        yield
    finally:
        if not outer:
            del _UNCHANGED[model]


def fingerprint(model: nn.Module) -> bytes:
    """Checksum of every parameter and buffer, with dtype and shape, in order; equal wherever they are in memory."""
    return _UNCHANGED.get(model) or _checksum(model)


def _checksum(model: nn.Module) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    sums: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for tensor in _stored(chain(model.parameters(), model.buffers())):
            found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            sums.setdefault(tensor.device, []).extend(_sums(tensor))
        for parts in sums.values():
            if parts and not parts[0].is_meta:
                found.update(torch.cat(parts).cpu().numpy().tobytes())  # one transfer a device
    return found.digest()


def _stored(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Plain tensors: of a sharded one this process's part, of a quantised one that wraps others the parts."""
    for tensor in tensors:
        data = tensor.detach()
        if hasattr(data, "to_local"):
            yield data.to_local()
        elif hasattr(data, "__tensor_flatten__"):
            yield from _stored(getattr(data, name) for name in data.__tensor_flatten__()[0])
        else:
            yield data


def _sums(tensor: Tensor) -> list[Tensor]:
    """Its bytes as 64-bit integers in a square: the sum of every row and of every column, modulo 2^64, and what is left
    over as it is. Moving a value is seen as well as changing it."""
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
