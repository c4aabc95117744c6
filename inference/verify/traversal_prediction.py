"""What a tree of sampled children will accept under traversal, given the text that comes out (`tree_prediction` of the
rule `tree`).

B rows, T positions, N nodes, D levels, V vocabulary; lengths, k and parents as there.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.sampling import draw, wide
from inference.verify.chain import continued
from inference.verify.tree import depths_of
from inference.verify.tree_prediction import CHUNK, SAMPLES, normed, strata, used

Distributions = tuple[Tensor, Tensor, Tensor]


def reach_traversal(
    p: Tensor, q: Tensor, x: Tensor, parents: tuple[int, ...], lengths: Tensor | None = None,
    k: int | Tensor | None = None, *, replacement: bool = False, samples: int = SAMPLES, seed: int = 0,
) -> Tensor:  # fmt: skip
    """`reach_tree` under `tree.traversal` of children drawn from q -> (B, T, D+1): the sum over the nodes of each depth
    of their chances, see `chances_traversal`. For likeliest children the two rules accept the same: `by_rank`."""
    found = chances_traversal(p, q, x, parents, lengths, replacement=replacement, samples=samples, seed=seed)
    return summed(found, parents, k)


def chances_traversal(
    p: Tensor, q: Tensor, x: Tensor, parents: tuple[int, ...], lengths: Tensor | None = None, *,
    replacement: bool = False, samples: int = SAMPLES, seed: int = 0,
) -> Tensor:  # fmt: skip
    """P(a round that starts at t stays on the text down to each node | the text) under `tree.traversal` of children
    drawn from q -> (B, T, N). It hangs on the node's path of child numbers alone: one table serves every tree within
    `parents`.

    p (B, T, V), q (B, T, V) or (B, T, K, V): distributions of the text's tokens x (B, T), axes as those of accept. A
    node with weight w on the text's path is entered with w_c = min(w p(x)/q(x), 1) as child c, once the siblings before
    it were refused, which has chance sum max(q - w p, 0) each and changes w, p and q as the rule does: the chance is
    the mean of w_c prod q(x)/p(x) over them. Refused ones are drawn as in `by_draw`: exact for first children, unbiased
    for others.
    """
    B, T, V = p.shape
    levels = max(depths_of(parents), default=0)
    rows, later = max(1, CHUNK // max(1, T * V)), len(parents) - len(set(parents))
    u = strata(B * T, later, samples, seed, x.device).view(B, T, samples, later)
    inside = torch.arange(T, device=x.device) < (T if lengths is None else lengths.to(x.device).unsqueeze(-1))
    parts = [part.split(rows) for part in (p, q, x, inside.expand(B, T), u)]
    found = []
    for probs, draft, ids, held, number in zip(*parts, strict=True):
        distributions = [_at_level(probs, draft, ids, held, level) for level in range(levels)]
        found.append(traversed(parents, replacement, distributions, number))
    return torch.cat(found)


def summed(chances: Tensor, parents: tuple[int, ...], k: int | Tensor | None = None) -> Tensor:
    """Reach (B, T, D+1) from the chances (B, T, N) of a tree's nodes, of which each round has k."""
    depths = depths_of(parents)
    reach = chances.new_zeros(*chances.shape[:2], max(depths, default=0) + 1)
    reach[..., 0] = 1
    for node, depth in enumerate(depths):
        chance = chances[..., node]
        reach[..., depth] += chance if k is None else chance * used(node, k, chance)
    return reach


def traversed(parents: tuple[int, ...], replacement: bool, distributions: Sequence[Distributions], u: Tensor) -> Tensor:
    """`chances_traversal` of some rows by level: p, q (B, T, V) and ids (B, T, 1); u (B, T, S, draws)."""
    depths = depths_of(parents)
    chances = torch.zeros(
        *u.shape[:2], len(parents), dtype=distributions[0][0].dtype if distributions else u.dtype, device=u.device
    )
    whole = torch.ones_like(chances[..., 0])
    for sample in u.unbind(2):
        numbers, entered = iter(sample.unbind(-1)), {-1: (whole, whole)}  # of each node, its weight and its chance
        for parent in sorted(set(parents)):
            own = [node for node, above in enumerate(parents) if above == parent]
            level = depths[own[0]] - 1
            found = _children(*distributions[level], *entered[parent], len(own), numbers, replacement)
            entered |= dict(zip(own, found, strict=True))
            for node, (weight, chance) in zip(own, found, strict=True):
                chances[..., node] += weight * chance / u.shape[2]
    return chances


def _at_level(p: Tensor, q: Tensor, x: Tensor, inside: Tensor, level: int) -> Distributions:
    """p, q (B, T, V) and ids (B, T, 1) of token t + level, for the round that starts at t; no mass past the end."""
    drafts = wide(q if q.ndim == 3 else q[:, :, level])
    held, gone = inside.unsqueeze(-1), min(level, x.shape[1])
    distributions = [torch.where(held, probs, 0.0)[:, gone:] for probs in (wide(p), drafts)]
    p, q = (F.pad(probs, (0, 0, 0, gone)) for probs in distributions)
    return p, q, F.pad(torch.where(inside, x, 0)[:, gone:], (0, gone)).unsqueeze(-1)


def _children(
    p: Tensor, q: Tensor, x: Tensor, w: Tensor, chance: Tensor, count: int, numbers: Iterator[Tensor], replacement: bool
) -> list[tuple[Tensor, Tensor]]:
    """(w_c, chance) (B, T) of the text's token as each of a node's `count` children, the refused ones drawn."""
    found, text = [], p.gather(-1, x).squeeze(-1)
    for child in range(count):
        px, qx = (w * p.gather(-1, x).squeeze(-1)), q.gather(-1, x).squeeze(-1)
        entered = torch.where(px > 0, (px / qx).clamp(max=1), 0.0)
        found.append((entered, torch.where(text > 0, chance * qx / text, 0.0)))
        if child + 1 < count:
            rest, lack = (w.unsqueeze(-1) * p - q).clamp(min=0), (q - w.unsqueeze(-1) * p).clamp(min=0)
            mass, refused = rest.sum(-1), lack.sum(-1)
            y = draw(lack, next(numbers)).unsqueeze(-1)
            chance, p = chance * refused, normed(rest)
            w = continued(mass, w)
            q = q if replacement else normed(q.scatter(-1, y, 0.0))
    return found
