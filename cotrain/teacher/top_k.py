"""The target's distributions cut down to their likeliest tokens and the mass of all others, which is kept as one
number.

A hidden state of a model 4,096 wide takes 8 KiB in bfloat16, 64 tokens of a distribution with their ids half of one,
and the target's head is not asked again. What is then compared are distributions merged outside the kept tokens.
Divergences of merged distributions (f-divergences: kl, rkl, tv, jsd, hellinger) are at most those of the whole ones, by
the data-processing inequality (Csiszar 1967), and alpha is at least the whole ones', by at most the smaller of both
masses outside. So those losses are lower bounds, and what training sees as accepted an upper one; held-out figures are
of whole distributions.

n positions, V vocabulary, K kept tokens.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cotrain.losses.served_distributions import Distributions, Truncate, log_probs, served
from cotrain.teacher.target_distributions import Head, Reader, Record
from inference.models.passes import LAST


def size(count: int) -> int:
    """Numbers of four bytes in a kept distribution."""
    return 2 * count + 1


class TopKAndRest(NamedTuple):
    """ids (..., K) int32 of the likeliest tokens, logs (..., K) of their probabilities, rest (...,): the logarithm of
    the mass of all others, both float32."""

    ids: Tensor
    logs: Tensor
    rest: Tensor


@dataclass(frozen=True)
class CachedDistributions:
    """Distributions (B, T) of which the likeliest tokens were kept, as served: no temperature or cut is applied
    again."""

    kept: TopKAndRest

    def logs(self, at: Tensor, logq: Tensor, temperature: Tensor, truncate: Truncate | None) -> Tensor:
        ids, logs, rest = self.kept
        return completed(TopKAndRest(ids.flatten(0, 1)[at], logs.flatten(0, 1)[at], rest.flatten()[at]), logq)


class TopKTeacher:
    """Reads texts as kept distributions, and the states that the student reads. states, head: of the target, see
    `served`;
    count: K; temperature, truncate: the regime; chunk: positions whose whole distributions exist at once; reads: layers
    kept beside the distributions.

    Raises ValueError for more kept tokens than there are.
    """

    def __init__(
        self,
        states: Reader,
        head: Head,
        count: int,
        vocabulary: int,
        temperature: float,
        truncate: Truncate | None,
        chunk: int,
        reads: tuple[int, ...] = (),
    ) -> None:
        if not 0 < count <= vocabulary:
            raise ValueError(f"trainer.top: {count} tokens of {vocabulary}")
        self.states, self.head, self.count, self.reads = states, head, count, reads
        self.temperature, self.truncate, self.chunk = temperature, truncate, chunk
        self.read: Reader = self.kept

    @torch.no_grad()
    def kept(self, ids: Tensor, position_ids: Tensor | None = None) -> Record:
        record = self.states(ids, position_ids)
        last = record[LAST]
        parts = [self._kept(part) for part in last.flatten(0, 1).split(self.chunk)]
        whole = (torch.cat(one) for one in zip(*parts, strict=True))
        found = {name: one.unflatten(0, last.shape[:2]) for name, one in zip(TopKAndRest._fields, whole, strict=True)}
        return {layer: record[layer] for layer in self.reads} | found

    def _kept(self, states: Tensor) -> TopKAndRest:
        t = torch.full((len(states),), self.temperature, device=states.device)
        return kept(served(log_probs(self.head(states), t), t, self.truncate), self.count)

    def distributions(self, record: Record) -> Distributions:
        return CachedDistributions(TopKAndRest(*(record[name] for name in TopKAndRest._fields)))


def kept(logp: Tensor, count: int) -> TopKAndRest:
    """The likeliest tokens of distributions (n, V)."""
    top = logp.topk(count, -1)
    rest = logp.scatter(-1, top.indices, -math.inf).logsumexp(-1)
    return TopKAndRest(top.indices.int(), top.values.float(), rest.float())


def outside(record: Record) -> Tensor:
    """The mass of the tokens that were not kept -> (B, T)."""
    return record["rest"].exp()


@torch.no_grad()
def completed(probs: TopKAndRest, logq: Tensor) -> Tensor:
    """Kept distributions of n positions as whole ones: the mass outside is spread as q spreads its own, so that every
    loss a position is that of the merged distributions, in value and in gradient. logq (n, V) -> log p (n, V); where q
    has nothing outside, the mass is left out."""
    inside = probs.ids.long()
    others = logq.scatter(-1, inside, -math.inf)
    total = others.logsumexp(-1, keepdim=True)
    spread = torch.where(total.isfinite(), others - total, -math.inf) + probs.rest[..., None].to(logq)
    return spread.scatter(-1, inside, probs.logs.to(logq))
