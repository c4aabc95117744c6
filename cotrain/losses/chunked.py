"""Losses from hidden states, a chunk of positions at a time, so that (B,T,V) pairs never exist whole.

Each of several chunks applies both heads, makes the two laws, and is forgotten. Its gradients are made at once where
the head's parameters are given (`eager_backward`), else backward computes it again. Only the draft's hidden states and
head receive gradients. B rows, T positions, V vocabulary, N counted positions.
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
from inference.sampling import draw, one_hot, wide

Head = Callable[[Tensor], Tensor]  # (n,D) -> logits (n,V)
Truncate = Callable[[Tensor], Tensor]  # logits (n,V) -> logits (n,V) with -inf where cut
Law = Callable[[Tensor, Tensor], Tensor]  # what stands for the target's states (n,D), log q (n,V) -> log p (n,V)

CHUNK = 512  # positions whose laws exist at once, where nothing else is said
LAWS, FEWEST = 2**21, 192  # values of a law of one chunk: 8 MiB in float32 stay in a processor's cache


def positions(vocabulary: int) -> int:
    """Of one chunk; of a large vocabulary as many as a matrix product wants: 192 of 151,936 tokens, 111 MiB a law."""
    return max(LAWS // vocabulary, FEWEST)


@dataclass(frozen=True)
class Statistics:
    """Detached means over the N counted positions, unweighted; zeros when N = 0.

    alpha: sum min(p, q), both laws as they are served. alpha_greedy: p(argmax q). entropy: of p, in nats.
    alphas (B,T): alpha by position, 0 where the mask is.
    """

    positions: int
    alpha: Tensor
    alpha_greedy: Tensor
    entropy: Tensor
    alphas: Tensor


def chunked(
    loss: Callable[..., Tensor],
    hidden_p: Tensor,
    head_p: Head,
    hidden_q: Tensor,
    head_q: Head,
    mask: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    chunk: int = CHUNK,
    x: Tensor | None = None,
    u: Tensor | None = None,
    truncate: Truncate | None = None,
    measured: bool = True,
    hardest: float = 1.0,
    parameters: Sequence[Tensor] = (),
    law: Law | None = None,
) -> tuple[Tensor, Statistics]:
    """Sum of a loss of `cotrain.losses` over positions (a scalar), and what acceptance it stands for.

    hidden_p (B,T,Dp), hidden_q (B,T,Dq); heads map (n,D) to logits (n,V). mask (B,T): bool, or weights >= 0
    by which each position's loss is multiplied; positions of weight 0 are never computed.
    temperature: a number, (B,) or (B,T), divides the logits of both sides. At 0 the loss meets the one-hot
    law of argmax p with q at temperature 1, and the reported alpha is 1[argmax p = argmax q].
    truncate: -inf on the logits that top-k / top-p cut, as `partial(keep_top_p, p=.9)` of
    `inference.sampling`; on p in the loss, on p and q in the reported alpha (a truncated q would have no
    gradient outside its own nucleus).
    x (B,T): tokens handed to a loss that takes them (`mix`). u (B,T): uniforms by which such tokens are
    drawn from q instead (`tvpp`). measured: off, the statistics but `positions` are NaN, and a quarter cheaper.
    hardest: only this fraction of the positions, those of the largest loss, counts, each 1 / hardest as much, so that
    the sum keeps its size. parameters: of head_q; with all of them given, and hardest 1, several chunks are computed
    once and not twice. law: makes log p, as served, of hidden_p and log q; head_p is then not asked. Raises ValueError
    for both x and u, a fraction outside (0, 1], and shapes that do not fit.
    """
    if not 0 < hardest <= 1:
        raise ValueError(f"hardest: a fraction in (0, 1], not {hardest}")
    if x is not None and u is not None:
        raise ValueError("give x (the text's tokens) or u (uniforms to draw tokens from q), not both")
    rows = _Rows(hidden_p, head_p, hidden_q, head_q, _spread(temperature, mask.shape, hidden_q), truncate, law)

    def part(i: Tensor, ours: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logp, logq = rows.laws(i, ours)
        tokens = None if x is None else x.flatten()[i]
        if u is not None:
            tokens = draw(logq.detach().exp(), u.flatten()[i])
        values = (loss(logp, logq) if tokens is None else loss(logp, logq, tokens)) * mask.flatten()[i]
        if not measured:
            return values, values.new_full((len(i), 3), math.nan)
        return values, rows.statistics(logp, logq, i)  # last, so that backward need not repeat it

    counted = mask.flatten().nonzero().squeeze(-1)  # (N,)
    chunks = counted.split(chunk)
    if parameters and hardest == 1 and len(chunks) > 1 and torch.is_grad_enabled():
        total, found = summed(part, hidden_q.flatten(0, 1), chunks, parameters)
        return total, _statistics(found, counted, mask)
    parts = _each(part, chunks)
    values = torch.cat([values for values, _ in parts])
    if hardest < 1 and len(counted):
        values = values.topk(max(round(hardest * len(values)), 1)).values / hardest
    return values.sum(), _statistics(torch.cat([found for _, found in parts]), counted, mask)


def token_logs(
    hidden_p: Tensor,
    head_p: Head,
    hidden_q: Tensor,
    head_q: Head,
    x: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    chunk: int = CHUNK,
    truncate: Truncate | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(x) and log q(x) of the text's tokens x (B,T) -> (B,T) each, for the sequence losses' `r_from`, `l_from`.

    Temperature and truncation as in `chunked`; q as trained. -inf where a law has no mass. Differentiable in hidden_q
    and head_q.
    """
    rows = _Rows(hidden_p, head_p, hidden_q, head_q, _spread(temperature, x.shape, hidden_q), truncate)

    def part(i: Tensor) -> Tensor:
        logp, logq = rows.laws(i)
        return _logs_of(x.flatten()[i], logp, logq)

    every = torch.arange(x.numel(), device=x.device)
    found = torch.cat(_each(part, every.split(chunk))).view(*x.shape, 2)
    return found[..., 0], found[..., 1]


class Comparison(NamedTuple):
    """At N counted positions, q as the engine will draft from it: log p(x) and log q(x), -inf without mass; KL(p || q)
    with q as trained; alpha = sum min(p, q); p(argmax q); entropy of q as trained, in nats; whether x = argmax q, 1 or
    0, and max q as trained, which says how often that should be so."""

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
    hidden_p: Tensor,
    head_p: Head,
    hidden_q: Tensor,
    head_q: Head,
    x: Tensor,
    mask: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    chunk: int = CHUNK,
    truncate: Truncate | None = None,
) -> Comparison:
    """All that evaluation asks of the positions where mask (B,T) is set, from one pass through both heads.

    Shapes, temperature and truncation as in `chunked`; x (B,T) the text's tokens.
    """
    rows = _Rows(hidden_p, head_p, hidden_q, head_q, _spread(temperature, mask.shape, hidden_q), truncate)

    def part(i: Tensor) -> Tensor:
        logp, logq = rows.laws(i)
        served = rows.served(logq, i)
        top = logq.max(-1)
        hit = (top.indices == x.flatten()[i]).to(logq)
        values = [losses.kl(logp, logq), losses.alpha(logp, served), losses.alpha_greedy(logp, logq)]
        values += [losses.entropy(logq), hit, top.values.exp()]
        return torch.cat([_logs_of(x.flatten()[i], logp, served), torch.stack(values, -1)], -1)  # (n,8)

    counted = mask.flatten().nonzero().squeeze(-1)
    return Comparison(*torch.cat([part(i) for i in counted.split(chunk)]).unbind(-1))


def _logs_of(x: Tensor, *laws: Tensor) -> Tensor:
    """x (n,), laws (n,V) -> (n, number of laws)."""
    return torch.cat([logs.gather(-1, x[:, None]) for logs in laws], -1)


def _each(part: Callable[[Tensor], Any], chunks: Sequence[Tensor]) -> list[Any]:
    """part of every chunk, computed a second time in backward; a single one is kept, as backward would hold it anyway.
    Nothing in it draws: heads must have no dropout."""
    if len(chunks) == 1:
        return [part(chunks[0])]
    return [checkpoint(part, i, use_reentrant=False, preserve_rng_state=False) for i in chunks]


def log_law(logits: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / temperature) in float32 at least, (n,V) and (n,) -> (n,V); at 0 as at 1."""
    t = temperature.masked_fill(temperature == 0, 1.0)
    return torch.log_softmax(wide(logits) / t.to(wide(logits))[:, None], -1)


def greedy_law(logs: Tensor, temperature: Tensor) -> Tensor:
    """The one-hot log law of the first maximum where the temperature is 0, else logs, (n,V)."""
    zero = temperature == 0
    if not bool(zero.any()):
        return logs
    return torch.where(zero[:, None], one_hot(logs.argmax(-1), logs).log(), logs)


def served(logs: Tensor, temperature: Tensor, truncate: Truncate | None) -> Tensor:
    """The log law that is sampled from, of log laws (n,V) made at a temperature (n,) -> (n,V)."""
    logs = greedy_law(logs, temperature)
    return logs if truncate is None else torch.log_softmax(truncate(logs), -1)


@dataclass(frozen=True)
class _Rows:
    """The two models at flattened positions."""

    hidden_p: Tensor  # (B,T,Dp)
    head_p: Head
    hidden_q: Tensor  # (B,T,Dq)
    head_q: Head
    temperature: Tensor  # (B*T,)
    truncate: Truncate | None
    law: Law | None = None

    def laws(self, i: Tensor, ours: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """log p as served, without gradient, and log q as trained, at positions i (n,) -> (n,V) each. ours (n,Dq): the
        draft's hidden states there, when they are at hand."""
        ours = self.hidden_q.flatten(0, 1)[i] if ours is None else ours
        logq = log_law(self.head_q(ours), self.temperature[i])
        with torch.no_grad():
            theirs = self.hidden_p.flatten(0, 1)[i]
            if self.law:
                return self.law(theirs, logq), logq
            return self.served(log_law(self.head_p(theirs), self.temperature[i]), i), logq

    @torch.no_grad()
    def statistics(self, logp: Tensor, logq: Tensor, i: Tensor) -> Tensor:
        """alpha, p(argmax q) and the entropy of p -> (n,3)."""
        alpha = losses.alpha(logp, self.served(logq, i))
        return torch.stack([alpha, losses.alpha_greedy(logp, logq), losses.entropy(logp)], -1)

    def served(self, logs: Tensor, i: Tensor) -> Tensor:
        return served(logs, self.temperature[i], self.truncate)


def _statistics(found: Tensor, counted: Tensor, mask: Tensor) -> Statistics:
    alphas = found.new_zeros(mask.numel()).scatter(0, counted, found[:, 0]).view(mask.shape)
    mean = found.sum(0) / max(len(counted), 1)
    return Statistics(len(counted), mean[0], mean[1], mean[2], alphas)


def _spread(temperature: float | Tensor, shape: torch.Size, like: Tensor) -> Tensor:
    """A number, (B,) or (B,T) -> (B*T,), refused when negative."""
    t = torch.as_tensor(temperature, dtype=wide(like[:0]).dtype, device=like.device)
    if t.shape not in (torch.Size(()), shape[:1], shape) or bool((t < 0).any()):
        raise ValueError(f"temperature must be >= 0 and a number, (B,) or (B,T) = {tuple(shape)}, not {t}")
    return (t[:, None] if t.ndim == 1 else t).expand(shape).flatten()
