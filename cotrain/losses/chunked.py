"""Losses computed from states, one chunk of positions at a time, so that the distributions of all positions (B, T, V)
are never in memory at once.

For each chunk, both heads are applied to the states; log p and log q are computed and freed again. If all parameters of
the draft's head are known, the gradients of a chunk are computed together with its values (`EagerSum`). Otherwise the
backward pass recomputes the chunk. Gradients reach the draft's states and head, and the target only if it is trained.

If the draft has a pruned vocabulary, all other tokens share one column. p has their total mass in this column, and q
has none. Gradients and acceptance are the same as with all columns. Losses that are infinite where q = 0 (kl) differ by
a constant. Losses that read argmax p need all columns, see `names.LossDefinition.argmax`.

B rows, T positions, V vocabulary, N positions of a guess, n positions of a chunk, Vd tokens of a pruned vocabulary, C
columns of a distribution: Vd + 1 if the guess is pruned, else V.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from cotrain.losses import divergences
from cotrain.losses.guess import Guess, Pruned, chosen, numbers, picked, sent
from inference.sampling import Truncate, log_probs_at, one_hot, wide

CHUNK = 512  # default number of positions whose distributions are in memory at once
# values of a chunk's distribution: 2**21 take 8 MiB in float32 and fit a CPU's cache; 2**25 keep a GPU busy longer than
# its kernels take to launch
VALUES, FEWEST = {"cpu": 2**21, "cuda": 2**25}, 192


def chunk_positions(vocabulary: int, device: str) -> int:
    """Return the number of positions in a chunk. vocabulary: V. device: the device's type, "cpu" or "cuda".

    It is at least 192, for efficient matrix products; 192 distributions over 151,936 tokens take 111 MiB.
    """
    return max(VALUES.get(device, VALUES["cuda"]) // vocabulary, FEWEST)


class TargetDistributions(Protocol):
    """The target's next-token distributions for a batch of texts.

    trained: whether losses have gradients in the target too, as in joint training.
    """

    @property
    def trained(self) -> bool: ...

    def logs(self, at: Tensor, temperature: Tensor, truncate: Truncate | None, pruned: Pruned | None = None) -> Tensor:
        """Return log p as served, (n, C): at the temperature, cut, and one-hot at temperature 0.

        at (n,): flat positions b * T + t, on the CPU. temperature (n,), on the CPU. truncate: a function that sets the
        logits cut by top-k / top-p to -inf, (n, V) -> (n, V), or None. pruned: the pruned head of the guess, or None.
        With one, the last column is the log of the mass of all tokens outside `pruned.ids`.
        """


def log_probs(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return log softmax(logits / temperature), (n, V), in float32 or better. logits (n, V). temperature (n,): 0 counts
    as 1."""
    at = temperature.masked_fill(temperature == 0, 1.0)  # on the CPU
    return log_probs_at(wide(logits), 1.0 if bool((at == 1).all()) else sent(at, logits.device))


def served_logs(logs: Tensor, temperature: Tensor, truncate: Truncate | None) -> Tensor:
    """Return the log probabilities (n, V) from which the engine samples: cut, and one-hot at the first maximum at
    temperature 0. logs (n, V): log probabilities at the temperature, from `log_probs`. temperature (n,). truncate: a
    function that sets the entries cut by top-k / top-p to -inf, or None."""
    zero = temperature == 0
    if bool(zero.any()):
        logs = torch.where(sent(zero, logs.device)[:, None], one_hot(logs.argmax(-1), logs).log(), logs)
    return logs if truncate is None else torch.log_softmax(truncate(logs), -1)


@dataclass(frozen=True)
class Statistics:
    """Unweighted means over the counted positions, without gradient; 0 if none counts.

    positions: how many count. alpha: the mean of sum_v min(p, q), both distributions as served. alpha_greedy: the mean
    of p(argmax q).
    alphas (B, T): alpha at each counted position, 0 elsewhere.
    terms (m,): the sum of each requested term of the loss, with the weights of the loss.
    """

    positions: int
    alpha: Tensor
    alpha_greedy: Tensor
    alphas: Tensor
    terms: Tensor


def chunked(
    loss: Callable[..., Tensor],
    target: TargetDistributions,
    guess: Guess,
    mask: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    chunk: int = CHUNK,
    truncate: Truncate | None = None,
    measured: bool = True,
    terms: Sequence[Callable[..., Tensor]] = (),
) -> tuple[Tensor, Statistics]:
    """Return a loss summed over the positions of a guess, a scalar, and the guess's acceptance statistics.

    loss: a function from log p and log q (n, C) to (n,), such as `divergences.kl`.
    target, guess: the two sides, p and q.
    mask (B, T): which positions count (bool), or the weights >= 0 of their losses. Entry t belongs to the prediction of
    token t+1. Positions of weight 0 are never computed.
    temperature: a number, (B,) for texts or (B, T) for positions. The logits of both sides are divided by it. At
    temperature 0 the loss compares q at temperature 1 with the one-hot distribution of argmax p, and alpha is 1[argmax
    p = argmax q].
    chunk: n.
    truncate: a function that sets the logits cut by top-k / top-p to -inf, for example `partial(keep_top_p, p=.9)` of
    `inference.sampling`, or None. The loss truncates only p, because a truncated q would have no gradient outside its
    own nucleus. The reported alpha truncates both.
    measured: False sets all statistics except `positions` to NaN, and takes a quarter less time.
    terms: the parts of a loss that is a sum, functions like `loss`. The sum of each over the positions is in the
    statistics.

    If `guess` has all parameters of its head, several chunks are computed once instead of twice. Raises ValueError for
    a temperature that is negative or has another shape.
    """
    rows = _Rows(target, guess, over_positions(temperature, mask.shape, guess.states), truncate)
    weight = chosen(mask, guess.at)  # (N,)

    def part(i: Tensor, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logp, logq = rows.distributions(i, states)
        here = sent(picked(weight, i), logq.device)
        values = loss(logp, logq) * here
        if not measured:
            return values, values.new_full((len(i), 2 + len(terms)), math.nan)
        separate = [term(logp, logq.detach()) * here for term in terms]
        return values, rows.statistics(logp, logq, i, separate)  # last: recomputation in backward ends before it

    counted = numbers(weight).cpu()  # (n,)
    chunks = counted.split(chunk)
    if guess.parameters and len(chunks) > 1 and torch.is_grad_enabled() and not target.trained:
        total, figures = EagerSum.apply(part, chunks, guess.states, *guess.parameters)
    else:
        values, figures = (torch.cat(list(side)) for side in zip(*_each(part, chunks), strict=True))
        total = values.sum()
    return total, _statistics(figures, guess.at[counted], mask)


class EagerSum(torch.autograd.Function):
    """A sum over chunks whose gradients are computed together with its values, so that no chunk is computed twice.

    Recomputing chunks in the backward pass would apply both heads once more, which is half as much work again at a real
    vocabulary. The gradients of a sum are known up to one factor, which the backward pass supplies. So they are
    computed and stored while the chunk is in memory. They take as much memory as the states and the head's weights (Hsu
    et al. 2024, 2410.10989, do the same for cross-entropy).

    part: a function from indices (n,) and the states there (n, D) to the values (n,) to sum, and figures (n, F). A
    value may depend on its own row of the states and on the parameters, and on nothing else that needs a gradient.
    chunks: the indices of each chunk. states (N, D). parameters: the head's. The result is the sum, which is
    differentiable once in states and parameters, and the figures of all chunks, which are not differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any,
        part: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        chunks: Sequence[Tensor],
        states: Tensor,
        *parameters: Tensor,
    ) -> Any:
        learning = [p for p in parameters if p.requires_grad]
        slopes = [torch.zeros_like(tensor) for tensor in (states, *learning)]
        total, figures = None, []
        for i in chunks:
            with torch.enable_grad():
                rows = picked(states, i).detach().requires_grad_()
                values, of_chunk = part(i, rows)
                value = values.sum()
                here = torch.autograd.grad(value, [rows, *learning])
            slopes[0].index_copy_(0, sent(i, states.device), here[0])
            for slope, more in zip(slopes[1:], here[1:], strict=True):
                slope += more
            total = value.detach() if total is None else total + value.detach()
            figures.append(of_chunk.detach())
        ctx.save_for_backward(*slopes)
        ctx.learning = [p.requires_grad for p in parameters]
        every = torch.cat(figures)
        ctx.mark_non_differentiable(every)
        return total, every

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> Any:
        slopes = (stored * slope.to(stored.dtype) for stored in ctx.saved_tensors)
        return None, None, next(slopes), *(next(slopes) if learns else None for learns in ctx.learning)


def token_logs(
    target: TargetDistributions,
    guess: Guess,
    x: Tensor,
    mask: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    chunk: int = CHUNK,
    truncate: Truncate | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log p(x) and log q(x), (B, T) each. Entry t is for token x[t], which follows position t. The result is
    differentiable in the guess.

    x (B, T): token ids. mask (B, T) bool: which positions count. temperature: a number, (B,) or (B, T); both sides'
    logits are divided by it. chunk: n. truncate: a function that sets the logits of p cut by top-k / top-p to -inf, or
    None; q is not truncated.

    A distribution without mass at x gives -inf. If x is outside the draft's pruned vocabulary, log q is -inf, and log p
    covers all tokens outside. At positions that do not count, or have no guess, log p is 0 and log q is -inf, as for a
    token that is never drafted. Raises ValueError for a temperature that is negative or has another shape.
    """
    rows = _Rows(target, guess, over_positions(temperature, x.shape, guess.states), truncate)

    def part(i: Tensor) -> Tensor:
        logp, logq = rows.distributions(i)
        return _logs_of(rows.columns(chosen(x, guess.at[i])), logp, logq)

    counted = numbers(chosen(mask, guess.at))
    logs = torch.cat(_each(part, counted.split(chunk)))  # (n,2)
    at = sent(guess.at[counted], logs.device)  # (n,)
    logp, logq = (
        logs.new_full((x.numel(),), default).index_put((at,), side)
        for default, side in zip((0.0, -math.inf), logs.unbind(-1), strict=True)
    )
    return logp.view(x.shape), logq.view(x.shape)


class Comparison(NamedTuple):
    """Figures of a guess at n positions. x is the token that follows a position. q is not truncated unless stated.

    at (n,): flat positions b * T + t. All other fields are (n,) too.
    logp, logq: log p(x) and log q(x), with q as served; -inf without mass.
    kl: KL(p || q) in nats. alpha: sum_v min(p, q), both as served. alpha_greedy: p(argmax q).
    entropy: the entropy of q, in nats. hit: 1 if x = argmax q, else 0.
    confidence: max q, the hit rate that q predicts.
    """

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
    target: TargetDistributions,
    guess: Guess,
    x: Tensor,
    mask: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    chunk: int = CHUNK,
    truncate: Truncate | None = None,
) -> Comparison:
    """Return the figures of a guess, without gradient, at those of its positions where `mask` is True.

    x (B, T): entry t is the token that follows position t. mask (B, T) bool. temperature: a number, (B,) or (B, T);
    both sides' logits are divided by it. chunk: n. truncate: a function that sets the logits cut by top-k / top-p to
    -inf, or None.

    If the guess is pruned, kl is computed over its C columns, and for a token outside the vocabulary log p covers all
    tokens outside. Raises ValueError for a temperature that is negative or has another shape.
    """
    rows = _Rows(target, guess, over_positions(temperature, mask.shape, guess.states), truncate)

    def part(i: Tensor) -> Tensor:
        logp, logq = rows.distributions(i)
        served, tokens = rows.served(logq, i), rows.columns(chosen(x, guess.at[i]))
        top = logq.max(-1)
        hit = (top.indices == tokens).to(logq)
        values = [divergences.kl(logp, logq), divergences.alpha(logp, served), divergences.alpha_greedy(logp, logq)]
        values += [divergences.entropy(logq), hit, top.values.exp()]
        return torch.cat([_logs_of(tokens, logp, served), torch.stack(values, -1)], -1)  # (n,8)

    counted = numbers(chosen(mask, guess.at))
    return Comparison(guess.at[counted], *torch.cat([part(i) for i in counted.split(chunk)]).unbind(-1))


def _logs_of(x: Tensor, *distributions: Tensor) -> Tensor:
    """Return the values of the distributions, (n, C) each, in the columns x (n,), as one tensor (n, number of
    distributions)."""
    return torch.cat([logs.gather(-1, x[:, None]) for logs in distributions], -1)


def _each(part: Callable[[Tensor], Any], chunks: Sequence[Tensor]) -> list[Any]:
    """Return the list of part(chunk) for every chunk. part: a function from indices (n,) to tensors. The backward pass
    computes the chunks again; a single chunk stays in memory instead. Random states are not restored, so heads must
    have no dropout."""
    if len(chunks) == 1:
        return [part(chunks[0])]
    return [checkpoint(part, i, use_reentrant=False, preserve_rng_state=False) for i in chunks]


@dataclass(frozen=True)
class _Rows:
    target: TargetDistributions
    guess: Guess
    temperature: Tensor  # (B*T,), on the CPU
    truncate: Truncate | None

    def distributions(self, i: Tensor, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return log p as served and log q without truncation, (n, C) each, at indices i (n,) of the guess. log p has
        no gradient unless the target is trained. states (n, Dq): the draft's states at these indices, if they were
        already selected."""
        states = picked(self.guess.states, i) if states is None else states
        at, pruned = self.guess.at[i], self.guess.pruned
        logq = log_probs((pruned or self.guess).head(states), self.temperature[at])
        if pruned is not None:
            logq = pad(logq, (0, 1), value=-math.inf)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.target.trained):
            logp = self.target.logs(at, self.temperature[at], self.truncate, pruned)
        return logp, logq

    def columns(self, x: Tensor) -> Tensor:
        """Return the column (n,) of each token x (n,). With a pruned vocabulary, all tokens outside have the last
        column."""
        pruned = self.guess.pruned
        if pruned is None:
            return x
        other = x.new_full((pruned.size,), len(pruned.ids))
        return other.index_copy(0, pruned.ids, torch.arange(len(pruned.ids), device=x.device))[x]

    @torch.no_grad()
    def statistics(self, logp: Tensor, logq: Tensor, i: Tensor, terms: Sequence[Tensor]) -> Tensor:
        """Return (n, 2 + m): alpha, p(argmax q) and the m terms of the loss at indices i (n,) of the guess. logp, logq
        (n, C). terms: m tensors (n,)."""
        alpha = divergences.alpha(logp, self.served(logq, i))
        return torch.stack([alpha, divergences.alpha_greedy(logp, logq), *terms], -1)

    def served(self, logs: Tensor, i: Tensor) -> Tensor:
        return served_logs(logs, self.temperature[self.guess.at[i]], self.truncate)


def _statistics(figures: Tensor, at: Tensor, mask: Tensor) -> Statistics:
    """Return the statistics of a guess. figures (n, 2 + m): alpha, p(argmax q) and the m terms, at the flat positions
    `at` (n,). mask (B, T): only its shape is used."""
    alphas = figures.new_zeros(mask.numel()).scatter(0, sent(at, figures.device), figures[:, 0]).view(mask.shape)
    mean = figures.sum(0) / max(len(at), 1)
    return Statistics(len(at), mean[0], mean[1], alphas, figures[:, 2:].sum(0))


def over_positions(temperature: float | Tensor, shape: torch.Size, like: Tensor) -> Tensor:
    """Return a temperature for each position, (B*T,). temperature: a number, (B,) or (B, T). shape: (B, T). like: a
    tensor whose dtype is used, in float32 or better. Raises ValueError for other shapes, and for values < 0."""
    t = torch.as_tensor(temperature, dtype=wide(like[:0]).dtype)
    if t.shape not in (torch.Size(()), shape[:1], shape) or bool((t < 0).any()):
        raise ValueError(
            f"temperature must be a number, or a tensor {tuple(shape[:1])} or {tuple(shape)}, none below 0; it is {t}"
        )
    return (t[:, None] if t.ndim == 1 else t).expand(shape).flatten()
