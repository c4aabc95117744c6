"""A teacher: the outputs of the target for texts, which may be cached, and next-token distributions computed from them.

The outputs are a record of named tensors (B, T, ...). `StatesTeacher` records states by layer; the head turns those of
the last layer into whole distributions. `TopKTeacher` records the K most probable tokens of each distribution and the
total mass of the others.

A state of a model 4,096 wide takes 8 KiB in bfloat16; 64 tokens with their probabilities take 0.5 KiB, and the target's
head is not applied again. Losses then compare distributions merged outside the top k. By the data-processing inequality
(Csiszar 1967), f-divergences of merged distributions (kl, rkl, tv, jsd) are at most those of the whole ones. alpha of
merged distributions is larger than alpha of the whole ones by at most the smaller mass outside. So those losses are
lower bounds and acceptance in training is an upper bound, while held-out figures use whole distributions.

B texts, T tokens, D width, n positions, V vocabulary, K stored tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from cotrain.losses.chunked import TargetDistributions, Truncate, log_probs, over_positions, served
from cotrain.losses.guess import Guess, Pruned
from cotrain.teacher.target_model import Head, Reader, Record, Seen
from inference.models.passes import LAST
from inference.models.small_heads import spread

# bytes of a batch's distributions that are computed once for all guesses, and how many times that on a GPU, whose
# batches are larger
REMEMBERED, ON_GPU = 2**28, 8


class Teacher(Protocol):
    """A reader of the target's outputs. read: a function from texts to a record, which may be cached. distributions: a
    function from a record to the distributions of its texts."""

    @property
    def read(self) -> Reader: ...

    def distributions(self, record: Record) -> TargetDistributions: ...


@dataclass(frozen=True)
class FromStates:
    """Distributions computed from the target's last states (B, T, D) with its head. trained: whether losses have
    gradients in the states."""

    states: Tensor
    head: Head
    trained: bool = False

    def logs(
        self, at: Tensor, logq: Tensor | None, temperature: Tensor, truncate: Truncate | None,
        pruned: Pruned | None = None,
    ) -> Tensor:  # fmt: skip
        logs = served(log_probs(self.head(self.states.flatten(0, 1)[at]), temperature), temperature, truncate)
        return logs if pruned is None else with_rest(logs, pruned.ids)


def with_rest(logs: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities of ids (Vd,) and, in the last column, the logarithm of the mass of all other tokens.
    The shapes are log-probabilities (n, V) -> (n, Vd + 1)."""
    inside = logs[:, ids]
    mass = 1 - inside.exp().sum(-1, keepdim=True)
    some = mass > 0  # the gradient of log 0 would be NaN
    return torch.cat((inside, torch.where(some, mass, 1.0).log().masked_fill(~some, -math.inf)), -1)


@dataclass(frozen=True)
class Remembered:
    """Distributions at some positions of a batch, which are computed once for all of its guesses.

    values (n, C): log p as served. row (B * T,): the row in `values` of each flat position; n, which is no row, for
    positions that have none.
    """

    values: Tensor
    row: Tensor
    trained: ClassVar[bool] = False

    def logs(
        self, at: Tensor, logq: Tensor, temperature: Tensor, truncate: Truncate | None, pruned: Pruned | None = None
    ) -> Tensor:
        return self.values[self.row[at]]


@torch.no_grad()
def remembered(
    target: TargetDistributions, guesses: Sequence[Guess], mask: Tensor, temperature: float | Tensor,
    truncate: Truncate | None, chunk: int,
) -> TargetDistributions:  # fmt: skip
    """Return the target's distributions, computed once, at the positions of mask (B, T) that have at least one guess.
    Return `target` itself if they would need more than `REMEMBERED` bytes (on a GPU, `ON_GPU` times as many), depend on
    the draft, or need a gradient.

    Either all guesses are pruned to the same ids, or no guess is pruned. temperature: as in `chunked`.
    """
    if not isinstance(target, FromStates) or target.trained:
        return target
    wanted = torch.zeros_like(mask).flatten()
    for guess in guesses:
        wanted[guess.at] = True
    at = (wanted & mask.flatten()).nonzero().squeeze(-1)
    each = over_positions(temperature, mask.shape, target.states)

    def logs(some: Tensor) -> Tensor:
        return target.logs(some, None, each[some], truncate, guesses[0].pruned)

    one = logs(at[:1])
    if len(at) * one.nbytes > REMEMBERED * (1 if one.device.type == "cpu" else ON_GPU):
        return target
    values = one.new_empty(len(at), one.shape[1])
    for into, some in zip(values.split(chunk), at.split(chunk), strict=True):
        into.copy_(logs(some))
    rows = torch.arange(len(at), device=at.device)
    return Remembered(values, torch.full_like(wanted, len(at), dtype=torch.long).index_copy(0, at, rows))


@dataclass(frozen=True)
class StatesTeacher:
    """A teacher that reads the target's states, including LAST, and computes whole distributions."""

    read: Reader
    head: Head

    def distributions(self, record: Record) -> TargetDistributions:
        return FromStates(record[LAST], self.head)


class TopKAndRest(NamedTuple):
    """The most probable tokens of distributions. ids (..., K) int32: these tokens. logs (..., K) float32: their
    log-probabilities. rest (...,) float32: the logarithm of the mass of all other tokens."""

    ids: Tensor
    logs: Tensor
    rest: Tensor


@dataclass(frozen=True)
class TopKDistributions:
    """Distributions (B, T) whose top k are stored as served, so no temperature or cut is applied again."""

    top: TopKAndRest
    trained: ClassVar[bool] = False

    def logs(
        self, at: Tensor, logq: Tensor, temperature: Tensor, truncate: Truncate | None, pruned: Pruned | None = None
    ) -> Tensor:
        ids, logs, rest = self.top
        top = TopKAndRest(ids.flatten(0, 1)[at], logs.flatten(0, 1)[at], rest.flatten()[at])
        if pruned is None:
            return completed(top, logq)
        return with_rest(completed(top, spread(logq[:, :-1], pruned.ids, pruned.size)), pruned.ids)


class TopKTeacher:
    """A teacher that reads the top k of each distribution, and the states that the student reads.

    states, head: those of the target, see `target_model.served`. count: K. temperature, truncate: the regime. chunk:
    positions whose whole distributions are in memory at once. reads: layers that are recorded with the distributions.
    Raises ValueError if count exceeds the vocabulary.
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
            raise ValueError(f"trainer.top: {count} tokens, but the target has {vocabulary}")
        self.states, self.head, self.count, self.reads = states, head, count, reads
        self.temperature, self.truncate, self.chunk = temperature, truncate, chunk

    @torch.no_grad()
    def read(self, ids: Tensor, position_ids: Tensor | None = None, source: Tensor | None = None) -> Record:
        record = self.states(ids, position_ids, source)
        last = record[LAST]
        parts = [self._top(part) for part in last.flatten(0, 1).split(self.chunk)]
        whole = (torch.cat(field) for field in zip(*parts, strict=True))
        fields = zip(TopKAndRest._fields, whole, strict=True)
        return {layer: record[layer] for layer in self.reads} | {
            name: field.unflatten(0, last.shape[:2]) for name, field in fields
        }

    def _top(self, states: Tensor) -> TopKAndRest:
        t = torch.full((len(states),), self.temperature, device=states.device)
        return top_k(served(log_probs(self.head(states), t), t, self.truncate), self.count)

    def distributions(self, record: Record) -> TargetDistributions:
        return TopKDistributions(TopKAndRest(*(record[name] for name in TopKAndRest._fields)))


def top_k(logp: Tensor, count: int) -> TopKAndRest:
    """Return the `count` most probable tokens of distributions (n, V), and the mass of the other tokens."""
    top = logp.topk(count, -1)
    rest = logp.scatter(-1, top.indices, -math.inf).logsumexp(-1)
    return TopKAndRest(top.indices.int(), top.values.float(), rest.float())


@torch.no_grad()
def completed(top: TopKAndRest, logq: Tensor) -> Tensor:
    """Return log p (n, V) from the top k of n positions and logq (n, V). The mass of the other tokens is distributed in
    proportion to q.

    Every loss per position then has the value and the gradient of the merged distributions. If q has no mass outside
    the top k, p gets none there either.
    """
    inside = top.ids.long()
    others = logq.scatter(-1, inside, -math.inf)
    total = others.logsumexp(-1, keepdim=True)
    spread = torch.where(total.isfinite(), others - total, -math.inf) + top.rest[..., None].to(logq)
    return spread.scatter(-1, inside, top.logs.to(logq))


def size(count: int) -> int:
    """Return how many 4-byte numbers are needed to store the top `count` of a distribution."""
    return 2 * count + 1


def outside(record: Record) -> Tensor:
    """Return the mass of the tokens outside the top k (B, T)."""
    return record["rest"].exp()


def seen(record: Record) -> Seen:
    """Return the states of a record."""
    return Seen({layer: states for layer, states in record.items() if isinstance(layer, int)})
