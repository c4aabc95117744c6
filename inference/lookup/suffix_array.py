"""Places of a long array of ids, in the order of what follows them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.unsignedinteger]


def suffix_array(ids: Ids, depth: int) -> NDArray[np.int64]:
    """Places of ids (n,) sorted by the `depth` ids from each on, equal ones by place; the array's end comes first.

    Prefix doubling (Manber and Myers 1993): ranks by 2 w ids come from ranks by w, so log2(depth) sorts of n keys;
    about 40 bytes a place while it is made. Raises ValueError for depth < 1.
    """
    if depth < 1:
        raise ValueError(f"depth: at least 1, not {depth}")
    rank = ids.astype(np.int64) + 1
    order, width = np.argsort(rank, kind="stable"), 1
    while width < depth:
        rank = _ranks(rank, order)
        behind = np.zeros_like(rank)  # 0: past the end
        step = min(width, depth - width)  # the last sort must not see more than `depth` ids
        behind[: len(rank) - step] = rank[step:]
        rank = rank * (len(rank) + 1) + behind
        order, width = np.argsort(rank, kind="stable"), width + step
        if len(rank) == 0 or (np.diff(rank[order]) > 0).all():
            break  # all are told apart
    return order


def _ranks(keys: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """1, 2, ... by the order of the keys, the same for equal ones."""
    sorted_keys = keys[order]
    rank = np.empty_like(keys)
    rank[order] = np.concatenate([[1], 1 + np.cumsum(np.diff(sorted_keys) > 0)]) if len(keys) else sorted_keys
    return rank


def first_place(ids: Ids, order: NDArray[np.integer], pattern: Sequence[int], low: int = 0, high: int | None = None,
                behind: bool = False) -> int:  # fmt: skip
    """The first of `order`, from low to high, whose ids are at or behind the pattern in order; with `behind`, the
    first whose ids do not begin with it any more. Binary search: about log2(n) reads of len(pattern) ids."""
    wanted, length = list(pattern), len(pattern)
    high = len(order) if high is None else high
    while low < high:
        middle = (low + high) // 2
        place = int(order[middle])
        found = ids[place : place + length].tolist()
        if found < wanted or (behind and found == wanted):
            low = middle + 1
        else:
            high = middle
    return low


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
