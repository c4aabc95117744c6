"""Losses from states, a chunk of guesses at a time, so that (B,T,V) pairs never exist whole.

Each of several chunks applies both heads, makes the two distributions, and is forgotten. Its gradients are made at once
where the head's parameters are given (`eager_backward`), else backward computes it again. Only the draft's states and
head receive gradients. B rows, T positions, V vocabulary, N guesses, n of them in a chunk.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cotrain import losses
from cotrain.losses.eager_backward import summed
from cotrain.losses.guess import Guess
from cotrain.losses.served_distributions import Distributions, Truncate, log_probs, served
from inference.sampling import draw, wide

CHUNK = 512  # positions whose distributions exist at once, where nothing else is said
LAWS, FEWEST = 2**21, 192  # values of a distribution of one chunk: 8 MiB in float32 stay in a processor's cache


def positions(vocabulary: int) -> int:
    """Of one chunk; of a large vocabulary as many as a matrix product wants: 192 of 151,936 tokens, 111 MiB a
    distribution."""
    return max(LAWS // vocabulary, FEWEST)


@dataclass(frozen=True)
class Statistics:
    """Detached means over the counted guesses, unweighted; zeros when there is none.

    alpha: sum min(p, q), both distributions as they are served. alpha_greedy: p(argmax q). entropy: of p, in nats.
    alphas (B,T): alpha by place, 0 where nothing was counted. terms (m,): sums of the terms that were asked
    for, weighted as the loss is.
    """

    positions: int
    alpha: Tensor
    alpha_greedy: Tensor
    entropy: Tensor
    alphas: Tensor
    terms: Tensor


def chunked(
    loss: Callable[..., Tensor],
    target: Distributions,
    guess: Guess,
    mask: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    chunk: int = CHUNK,
    x: Tensor | None = None,
    u: Tensor | None = None,
    truncate: Truncate | None = None,
    measured: bool = True,
    hardest: float = 1.0,
    terms: Sequence[Callable[..., Tensor]] = (),
) -> tuple[Tensor, Statistics]:
    """Sum of a loss of `cotrain.losses` over guesses (a scalar), and what acceptance it stands for.

    mask (B,T) at places: bool, or weights >= 0 by which each guess's loss is multiplied; guesses at places of weight 0
    are never computed. temperature: a number, (B,) or (B,T), divides the logits of both sides. At 0 the loss meets the
    one-hot distribution of argmax p with q at temperature 1, and the reported alpha is 1[argmax p = argmax q].
    truncate: -inf on the logits that top-k / top-p cut, as `partial(keep_top_p, p=.9)` of
    `inference.sampling`; on p in the loss, on p and q in the reported alpha (a truncated q would have no
    gradient outside its own nucleus).
    x (B,T): tokens handed to a loss that takes them (`ce`). u (B,T): uniforms by which such tokens are
    drawn from q instead (`tvpp`). measured: off, the statistics but `positions` are NaN, and a quarter cheaper.
    hardest: only this fraction of the guesses, those of the largest loss, counts, each 1 / hardest as much, so that
    the sum keeps its size. terms: parts of the loss, called as it is, whose sums are wanted alone. With all parameters
    of the head in `guess`, and hardest 1, several chunks are computed once and not twice. Raises ValueError
    for both x and u, a fraction outside (0, 1], and shapes that do not fit.
    """
    if not 0 < hardest <= 1:
        raise ValueError(f"hardest: a fraction in (0, 1], not {hardest}")
    if x is not None and u is not None:
        raise ValueError("give x (the text's tokens) or u (uniforms to draw tokens from q), not both")
    rows = _Rows(target, guess, _spread(temperature, mask.shape, guess.states), truncate)
    weight = mask.flatten()[guess.at]  # (N,)

    def part(i: Tensor, ours: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logp, logq = rows.distributions(i, ours)
        given = () if x is None else (x.flatten()[guess.at[i]],)
        if u is not None:
            given = (draw(logq.detach().exp(), u.flatten()[guess.at[i]]),)
        values = loss(logp, logq, *given) * weight[i]
        if not measured:
            return values, values.new_full((len(i), 3 + len(terms)), math.nan)
        apart = [term(logp, logq.detach(), *given) * weight[i] for term in terms]
        return values, rows.statistics(logp, logq, i, apart)  # last, so that backward need not repeat it

    counted = weight.nonzero().squeeze(-1)  # (n,)
    chunks = counted.split(chunk)
    if guess.parameters and hardest == 1 and len(chunks) > 1 and torch.is_grad_enabled():
        total, found = summed(part, guess.states, chunks, guess.parameters)
        return total, _statistics(found, guess.at[counted], mask, found[:, 3:].sum(0))
    parts = _each(part, chunks)
    values, found = (torch.cat(list(one)) for one in zip(*parts, strict=True))
    if hardest == 1 or not len(counted):
        return values.sum(), _statistics(found, guess.at[counted], mask, found[:, 3:].sum(0))
    values, top = values.topk(max(round(hardest * len(values)), 1))
    return (values / hardest).sum(), _statistics(found, guess.at[counted], mask, found[top, 3:].sum(0) / hardest)


def token_logs(
    target: Distributions,
    guess: Guess,
    x: Tensor,
    mask: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    chunk: int = CHUNK,
    truncate: Truncate | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(x) and log q(x) of the text's tokens x (B,T) -> (B,T) each, for the sequence losses' `r_from`, `l_from`.

    Temperature and truncation as in `chunked`; q as trained. -inf where a distribution has no mass; 0 and -inf at
    places that
    mask (B,T) leaves out and that no guess is made at: a token that is never drafted. Differentiable in the guess.
    """
    rows = _Rows(target, guess, _spread(temperature, x.shape, guess.states), truncate)

    def part(i: Tensor) -> Tensor:
        logp, logq = rows.distributions(i)
        return _logs_of(x.flatten()[guess.at[i]], logp, logq)

    counted = mask.flatten()[guess.at].nonzero().squeeze(-1)
    found, at = torch.cat(_each(part, counted.split(chunk))), guess.at[counted]  # (n,2), (n,)
    logp, logq = (found.new_full((x.numel(),), never).index_put((at,), one)
                  for never, one in zip((0.0, -math.inf), found.unbind(-1), strict=True))  # fmt: skip
    return logp.view(x.shape), logq.view(x.shape)


class Comparison(NamedTuple):
    """At n counted guesses, q as the engine will draft from it: at (n,), their flat places; log p(x) and log q(x), -inf
    without mass; KL(p || q) with q as trained; alpha = sum min(p, q); p(argmax q); entropy of q as trained, in nats;
    whether x = argmax q, 1 or 0, and max q as trained, which says how often that should be so."""

    at: Tensor
    logp: Tensor
    logq: Tensor
    kl: Tensor
    alpha: Tensor
    alpha_greedy: Tensor
    entropy: Tensor
    hit: Tensor
    confidence: Tensor


@torch.no_grad()
def compared(
    target: Distributions,
    guess: Guess,
    x: Tensor,
    mask: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    chunk: int = CHUNK,
    truncate: Truncate | None = None,
) -> Comparison:
    """All that evaluation asks of the guesses at places where mask (B,T) is set, from one pass through both heads.

    Shapes, temperature and truncation as in `chunked`; x (B,T) the text's tokens.
    """
    rows = _Rows(target, guess, _spread(temperature, mask.shape, guess.states), truncate)

    def part(i: Tensor) -> Tensor:
        logp, logq = rows.distributions(i)
        served, tokens = rows.served(logq, i), x.flatten()[guess.at[i]]
        top = logq.max(-1)
        hit = (top.indices == tokens).to(logq)
        values = [losses.kl(logp, logq), losses.alpha(logp, served), losses.alpha_greedy(logp, logq)]
        values += [losses.entropy(logq), hit, top.values.exp()]
        return torch.cat([_logs_of(tokens, logp, served), torch.stack(values, -1)], -1)  # (n,8)

    counted = mask.flatten()[guess.at].nonzero().squeeze(-1)
    return Comparison(guess.at[counted], *torch.cat([part(i) for i in counted.split(chunk)]).unbind(-1))


def _logs_of(x: Tensor, *distributions: Tensor) -> Tensor:
    """x (n,), distributions (n,V) -> (n, number of distributions)."""
    return torch.cat([logs.gather(-1, x[:, None]) for logs in distributions], -1)


def _each(part: Callable[[Tensor], Any], chunks: Sequence[Tensor]) -> list[Any]:
    """part of every chunk, computed a second time in backward; a single one is kept, as backward would hold it anyway.
    Nothing in it draws: heads must have no dropout."""
    if len(chunks) == 1:
        return [part(chunks[0])]
    return [checkpoint(part, i, use_reentrant=False, preserve_rng_state=False) for i in chunks]


@dataclass(frozen=True)
class _Rows:
    target: Distributions
    guess: Guess
    temperature: Tensor  # (B*T,)
    truncate: Truncate | None

    def distributions(self, i: Tensor, ours: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """log p as served, without gradient, and log q as trained, of guesses i (n,) -> (n,V) each. ours (n,Dq): the
        draft's states there, when they are at hand."""
        ours, at = self.guess.states[i] if ours is None else ours, self.guess.at[i]
        logq = log_probs(self.guess.head(ours), self.temperature[at])
        with torch.no_grad():
            logp = self.target.logs(at, logq, self.temperature[at], self.truncate)
        return logp, logq

    @torch.no_grad()
    def statistics(self, logp: Tensor, logq: Tensor, i: Tensor, terms: Sequence[Tensor]) -> Tensor:
        """alpha, p(argmax q), the entropy of p, and terms of the loss, (n,) each -> (n,3+m)."""
        alpha = losses.alpha(logp, self.served(logq, i))
        return torch.stack([alpha, losses.alpha_greedy(logp, logq), losses.entropy(logp), *terms], -1)

    def served(self, logs: Tensor, i: Tensor) -> Tensor:
        return served(logs, self.temperature[self.guess.at[i]], self.truncate)


def _statistics(found: Tensor, at: Tensor, mask: Tensor, terms: Tensor) -> Statistics:
    """found (n,3+m) at flat places at (n,), terms (m,)."""
    alphas = found.new_zeros(mask.numel()).scatter(0, at, found[:, 0]).view(mask.shape)
    mean = found.sum(0) / max(len(at), 1)
    return Statistics(len(at), mean[0], mean[1], mean[2], alphas, terms)


def _spread(temperature: float | Tensor, shape: torch.Size, like: Tensor) -> Tensor:
    """A number, (B,) or (B,T) -> (B*T,), refused when negative."""
    t = torch.as_tensor(temperature, dtype=wide(like[:0]).dtype, device=like.device)
    if t.shape not in (torch.Size(()), shape[:1], shape) or bool((t < 0).any()):
        raise ValueError(f"temperature must be >= 0 and a number, (B,) or (B,T) = {tuple(shape)}, not {t}")
    return (t[:, None] if t.ndim == 1 else t).expand(shape).flatten()
