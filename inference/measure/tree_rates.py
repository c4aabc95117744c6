"""Expected calls of many shapes at once: each is a sum over its nodes, and what a node adds hangs on its path of child
numbers alone, not on the tree around it.

B texts, T tokens of the longest, N nodes, S shapes. parents: as in `proposers.topology`.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inference.measure.shapes import Parents
from inference.proposers.topology import from_paths, paths_of
from inference.verify.prediction import calls_from
from inference.verify.tree_prediction import of_rounds

TOGETHER = 64  # shapes whose recursions run side by side


class Paths(NamedTuple):
    """P(a round that starts at t stays on the text down to a path | the text): chances (B, T, N), by path of child
    numbers where it stands; lengths (B,) of the texts."""

    places: dict[tuple[int, ...], int]
    chances: Tensor
    lengths: Tensor


def union(shapes: Iterable[Parents]) -> Parents:
    """The least tree that holds all of these."""
    return from_paths({path for shape in shapes for path in paths_of(shape)})


def products(accept: Tensor, whole: Parents, lengths: Tensor) -> Tensor:
    """Chances (B, T, N) of a tree's nodes under the rule `tree`, of accept as of `verify.tree_prediction`: the product,
    along each path, of the chances of its child numbers."""
    found: dict[tuple[int, ...], Tensor] = {(): torch.ones_like(of_rounds(accept, 0, lengths)[..., 0])}
    tables: dict[int, Tensor] = {}
    for path in paths_of(whole):
        level = len(path) - 1
        if level not in tables:
            tables[level] = of_rounds(accept, level, lengths)
        found[path] = found[path[:-1]] * tables[level][..., path[-1]]
    return torch.stack([found[path] for path in paths_of(whole)], -1)


def calls_of(paths: Paths, shapes: Sequence[Parents]) -> Tensor:
    """Expected calls (S, B) of each text with each shape, whose paths must all be there."""
    T, found = paths.chances.shape[1], []
    for low in range(0, len(shapes), TOGETHER):
        some = shapes[low : low + TOGETHER]
        reach = _reach(paths, some)
        calls = calls_from(reach.flatten(0, 1), paths.lengths.repeat(len(some)))
        found.append(calls.view(len(some), -1))
    return torch.cat(found) if found else paths.chances.new_zeros(0, len(paths.lengths)) + T


def _reach(paths: Paths, shapes: Sequence[Parents]) -> Tensor:
    """(S, B, T, D+1), D levels of the deepest."""
    named = [paths_of(shape) for shape in shapes]
    deepest = max((len(path) for one in named for path in one), default=0)
    reach = paths.chances.new_zeros(len(shapes), *paths.chances.shape[:2], deepest + 1)
    reach[..., 0] = 1
    for number, one in enumerate(named):
        for path in one:
            reach[number, ..., len(path)] += paths.chances[..., paths.places[path]]
    return reach


def climbed(paths: Paths, most: int, depth: int) -> list[Parents]:
    """Trees of 1, 2, ... `most` nodes within `depth` levels, each the one before with the path more that saves the most
    calls, of those that are there."""
    own: list[tuple[int, ...]] = []
    found: list[Parents] = []
    for _ in range(most):
        nexts = [(*above, sum(path[:-1] == above for path in own)) for above in [(), *own] if len(above) < depth]
        more = [from_paths([*own, path]) for path in nexts if path in paths.places]
        if not more:
            break
        found.append(more[int(calls_of(paths, more).sum(1).argmin())])
        own = paths_of(found[-1])
    return found


def every(most: int, children: int, depth: int) -> list[Parents]:
    """Every tree of 1 to `most` nodes, numbered level by level, no two alike."""
    found: dict[Parents, None] = {}
    edge: list[Parents] = [()]
    for _ in range(most):
        edge = list(dict.fromkeys(more for tree in edge for more in _with_one(tree, children, depth)))
        found |= dict.fromkeys(edge)
    return list(found)


def _with_one(tree: Parents, children: int, depth: int) -> list[Parents]:
    """The tree with one node more."""
    paths = [(), *paths_of(tree)]
    own = [sum(path[:-1] == above for path in paths if path) for above in paths]
    return [from_paths([*paths[1:], (*path, count)]) for path, count in zip(paths, own, strict=True)
            if len(path) < depth and count < children]  # fmt: skip
