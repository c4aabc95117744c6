"""The loss of a batch, summed over all guesses that a student makes of it, and the weight of each depth.

A student whose distribution at a position is the same at every depth (ANY) makes one guess, and acceptance r is (B, L);
others make one a depth, and r is (B, L, K). B texts, T tokens, L tokens of the longest completion, K depths.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from cotrain import acceptance
from cotrain.losses.chunked import Statistics, TargetDistributions, Truncate, chunked, token_logs
from cotrain.losses.guess import ANY, Guess
from cotrain.losses.sequence import columns, from_columns, mask_impossible, to_columns
from cotrain.losses.spec import LossSpec, Term

DECAY = 0.8  # depth j weighs DECAY ** j if its exact weight is unknown (Medusa, Cai et al. 2024, 2401.10774)


@dataclass(frozen=True)
class LossBatch:
    """The batch that every guess is scored on: the target's distributions, ids (B, T), temperature (B,), which next
    tokens the target sampled, (B, T-1) bool, the regime's cut, and positions whose distributions exist at once."""

    target: TargetDistributions
    ids: Tensor
    temperature: Tensor
    sampled: Tensor
    truncate: Truncate | None
    chunk: int

    @property
    def following(self) -> Tensor:
        """(B, T): the token that follows each position; the last position's entry is never read."""
        return self.ids.roll(-1, 1)

    @property
    def lengths(self) -> Tensor:
        """(B,): tokens of each completion."""
        return self.sampled.sum(1)

    def logs(self, guesses: Sequence[Guess]) -> tuple[Tensor, Tensor]:
        """log p(x) and log q(x) of the sampled tokens, each completion from column 0 on -> (B, L), or (B, L, K) with a
        last axis for the depth that drafts the token. Both are 0 where p(x) = 0, see `mask_impossible`."""
        mask, at = pad(self.sampled, (0, 1)), columns(self.sampled)
        pairs = []
        for guess in guesses:
            logs = token_logs(self.target, guess, self.following, mask, self.temperature,
                              chunk=self.chunk, truncate=self.truncate)  # fmt: skip
            pairs.append(_fill_dropped(*logs, guess))
        pairs = [mask_impossible(to_columns(logp, at), to_columns(logq, at)) for logp, logq in pairs]
        if guesses[0].depth == ANY:
            return pairs[0]
        logp, logq = (torch.stack(side, -1) for side in zip(*pairs, strict=True))
        return logp, logq

    def of_texts(self, term: Term, logs: tuple[Tensor, Tensor], k: int) -> Tensor:
        """The weighted sum of a sequence loss over the texts; logs as `logs` returns them."""
        value: Tensor = term.loss.function(*logs, _draft_length(logs[0], k), self.lengths)
        return term.weight * value

    def saved(self, logs: tuple[Tensor, Tensor], k: int) -> Tensor:
        """Target calls that a unit of acceptance saves, at each sampled token (and depth), without gradient; shaped as
        logs."""
        r = acceptance.r_from(*(side.detach() for side in logs))
        return acceptance.call_weights(r, _draft_length(r, k), self.lengths)

    def weight(self, saved: Tensor, depth: int) -> Tensor:
        """`saved` of a depth at its positions (B, T), 0 elsewhere."""
        return pad(from_columns(saved if depth == ANY else saved[..., depth], self.sampled), (0, 1))

    def of_positions(self, spec: LossSpec, guess: Guess, weight: Tensor, measured: bool) -> tuple[Tensor, Statistics]:
        """The sum of a loss over positions, weight (B, T) each, see `chunked`."""
        assert spec.position is not None
        weight = weight if guess.share == 1 else weight / guess.share
        return chunked(
            spec.position, self.target, guess, weight, self.temperature, chunk=self.chunk, truncate=self.truncate,
            measured=measured, terms=spec.terms if len(spec.terms) > 1 else (),
        )  # fmt: skip


def shares(guesses: Sequence[Guess], decay: float | None, saved: Tensor | None) -> Tensor:
    """The weight of each guess in the mean over depths -> (K,), summing to 1.

    decay: depth j weighs decay ** j. None: depth j weighs the target calls that a unit of acceptance there saves,
    summed over all sampled tokens: saved (K,), see `acceptance.call_weights`. If saved is None or 0 (nothing was
    sampled from the target, or stored top-k distributions lack its tokens), DECAY ** j.
    """
    device = guesses[0].states.device
    if decay is None and saved is not None:
        exact = saved.clamp(min=0).to(device)
        if bool(exact.sum() > 0):
            return exact / exact.sum()
    plain = (DECAY if decay is None else decay) ** torch.arange(len(guesses), device=device)
    return plain / plain.sum()


def _fill_dropped(logp: Tensor, logq: Tensor, guess: Guess) -> tuple[Tensor, Tensor]:
    """log p(x) and log q(x), (B, T), of a guess made at a random share of its positions: the other positions get the
    mean acceptance of these, and the gradient here is scaled up to stand for theirs."""
    if guess.share == 1:
        return logp, logq
    computed = torch.zeros_like(logp, dtype=torch.bool).flatten().index_fill(0, guess.at, True).view(logp.shape)
    r = acceptance.r_from(logp.detach(), logq.detach())
    mean = r[computed & (logq > -torch.inf)].mean().nan_to_num().clamp(min=torch.finfo(r.dtype).tiny)  # of none: 0
    if logq.requires_grad:
        logq = logq.clone()
        logq.register_hook(lambda slope: slope / guess.share)
    return logp, torch.where(computed, logq, mean.log())


def _draft_length(logs: Tensor, k: int) -> int:
    """k, at most the depths that the student has."""
    return k if logs.ndim == 2 else min(k, logs.shape[2])
