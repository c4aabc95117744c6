"""The target's laws cut down to their likeliest tokens and the mass of all others, which is kept as one number.

A hidden state of a model 4,096 wide takes 8 KiB in bfloat16, 64 tokens of a law with their ids half of one, and the
target's head is not asked again. What is then compared are laws merged outside the kept tokens. Divergences of merged
laws (f-divergences: kl, rkl, tv, jsd, hellinger) are at most those of the whole ones, by the data-processing
inequality (Csiszar 1967), and alpha is at least the whole ones', by at most the smaller of both masses outside. So
those losses are lower bounds, and what training sees as accepted an upper one; held-out figures are of whole laws.

n positions, V vocabulary, K kept tokens. Kept laws are (n, 2K + 1) in float32: log-probabilities, ids (below 2^24) and
the logarithm of the mass outside.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cotrain.evaluation.held_out import Head, Read
from cotrain.losses.chunked import log_law, served

LARGEST = 2**24  # ids that float32 tells apart


def size(count: int) -> int:
    """Numbers of a kept law."""
    return 2 * count + 1


@dataclass(frozen=True)
class TopKLaws:
    """Reads texts as kept laws: ids (B, T) -> (B, T, 2K + 1). read, head: the target's halves, see `split`;
    count: K; temperature, truncate: the regime; chunk: positions whose whole laws exist at once.

    Raises ValueError for more kept tokens than there are, and ids that float32 cannot tell apart.
    """

    read: Read
    head: Head
    count: int
    vocabulary: int
    temperature: float
    truncate: Callable[[Tensor], Tensor] | None
    chunk: int

    def __post_init__(self) -> None:
        if not 0 < self.count <= self.vocabulary <= LARGEST:
            raise ValueError(f"trainer.top: {self.count} tokens of {self.vocabulary}, of at most {LARGEST}")

    @torch.no_grad()
    def __call__(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        states = self.read(ids, position_ids)
        parts = [self._kept(part) for part in states.flatten(0, 1).split(self.chunk)]
        return torch.cat(parts).view(*states.shape[:2], size(self.count))

    def _kept(self, states: Tensor) -> Tensor:
        t = torch.full((len(states),), self.temperature, device=states.device)
        return kept(served(log_law(self.head(states), t), t, self.truncate), self.count)


def kept(logp: Tensor, count: int) -> Tensor:
    """The likeliest tokens of laws (n, V) -> (n, 2K + 1)."""
    top = logp.topk(count, -1)
    rest = logp.scatter(-1, top.indices, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([top.values.float(), top.indices.float(), rest.float()], -1)


def outside(law: Tensor) -> Tensor:
    """The mass of the tokens that were not kept; (n, 2K + 1) -> (n,)."""
    return law[..., -1].exp()


@torch.no_grad()
def completed(law: Tensor, logq: Tensor) -> Tensor:
    """Kept laws (n, 2K + 1) as whole ones: the mass outside is spread as q spreads its own, so that every loss a
    position is that of the merged laws, in value and in gradient. logq (n, V) -> log p (n, V); where q has nothing
    outside, the mass is left out."""
    logs, ids = law[..., :-1].to(logq).chunk(2, -1)
    inside = ids.long()
    others = logq.scatter(-1, inside, -math.inf)
    total = others.logsumexp(-1, keepdim=True)
    spread = torch.where(total.isfinite(), others - total, -math.inf) + law[..., -1:].to(logq)
    return spread.scatter(-1, inside, logs)
