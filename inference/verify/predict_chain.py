"""The exact expected number of target calls for a text with chains of drafts, from two log-probabilities per token.

Given the emitted text, only acceptance is random. A round that starts at token t accepts n drafts with a probability
that depends only on the text and t. The starts of rounds therefore form a Markov chain on positions, and one recursion
gives the mean and the variance of their number (formula in each docstring).

B rows, T positions, k drafts per round, K their maximum, L tokens of a row's text. r (B,T): probability min(1, q/p)
that the text's token t is accepted. r (B,T,K) if it depends on the depth: entry (t, j) is this probability for token t
as draft j (0-based) of the round that starts at t - j; entries with j > t are never read. l, in the shapes of r: log q
- log p of the text's token. k: drafts of a round, an int, (B,), or (B,T) for the round that starts at t. lengths (B,):
number of tokens of each text, T if None; later tokens are never read.

Rules differ only in the reach (B,T,K+1): P(a round that starts at token t accepts at least n drafts), n = 0 to K. See
`rules`. Calls, their variance, tau and acceptance by depth follow from the reach (`calls_from`, `variance_from`,
`tau_from`, `depths_from`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.sampling import up_to, wide


def l_from(logp_x: Tensor, logq_x: Tensor) -> Tensor:
    """Return l = log q(x) - log p(x) of text tokens x, in the shape of logq_x; -inf if q(x) = 0, even if p(x) = 0 too.
    logq_x (B,T), or (B,T,K) if it depends on the depth: entry (t, j) is for token t as draft j (0-based). logp_x (B,T),
    or (B,T,1) if logq_x is (B,T,K)."""
    never = logq_x == -torch.inf
    difference = wide(logq_x).masked_fill(never, 0) - wide(logp_x).masked_fill(never, 0)
    return difference.masked_fill(never, -torch.inf)


def r_from(logp_x: Tensor, logq_x: Tensor) -> Tensor:
    """Return r = min(1, q(x) / p(x)) of text tokens x, in the shape of logq_x; 0 if q(x) = 0. The result is
    differentiable. logq_x (B,T), or (B,T,K) if it depends on the depth: entry (t, j) is for token t as draft j
    (0-based). logp_x (B,T), or (B,T,1) if logq_x is (B,T,K).

    r is the probability that the emitted token x was an accepted draft under the token rule: q(x) min(1, p(x)/q(x)) /
    p(x) (Leviathan et al. 2023, arXiv 2211.17192).
    """
    return l_from(logp_x, logq_x).clamp(max=0).exp()


def reach(r: Tensor, k: int | Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the reach (B,T,K+1) under the token rule: P(a round that starts at token t accepts at least n drafts | the
    text).

    It is prod_{j<n} r[t+j, j], n = 0 to K; 0 past the round's own k and past the text's last token. r (B,T), or (B,T,K)
    by depth. k: drafts per round: an int, (B,), or (B,T) for the round that starts at t. lengths (B,): tokens in each
    text, None for T. Raises ValueError if r has fewer depths than k, or if lengths exceed T.
    """
    return _within(F.pad(torch.cumprod(_aligned(r, k, lengths, fill=0.0), -1), (1, 0), value=1.0), k)


def reach_block(l: Tensor, k: int | Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the reach (B,T,K+1) under block verification (Sun et al. 2024, arXiv 2403.10444): P(a round that starts at
    token t accepts at least n drafts | the text).

    It is min_{0<=j<=n} exp(l[t,0] + .. + l[t+j-1, j-1]); the empty sum is 0. l (B,T), or (B,T,K) by depth; it may be
    -inf. k: drafts per round: an int, (B,), or (B,T) for the round that starts at t. lengths (B,): tokens in each text,
    None for T. Raises ValueError if l has fewer depths than k, or if lengths exceed T.
    """
    sums = torch.cumsum(_aligned(l, k, lengths, fill=-torch.inf), -1)
    return _within(torch.cummin(F.pad(sums, (1, 0)), -1).values.exp(), k)


def round_starts(reach: Tensor) -> Tensor:
    """Return the probabilities (B,T) that a round starts at each token. reach (B,T,K+1): P(a round that starts at token
    t accepts at least n drafts).

    s_0 = 1; s_{t+n+1} += s_t (reach_n - reach_{n+1}), with reach_{K+1} = 0.
    """
    jumps = jumps_of(reach)
    mass = F.pad(torch.zeros_like(jumps[:, 0, 1:]), (1, 0), value=1.0)  # (B,K+1) on t, t+1, ..., t+K
    probabilities = []
    for jump in jumps.unbind(1):
        probabilities.append(mass[:, 0])
        mass = F.pad(mass[:, 1:], (0, 1)) + mass[:, :1] * jump
    return torch.stack(probabilities, 1)


def calls_from(reach: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the expected target calls (B,) of each text: the sum over t < L of P(a round starts at t). reach
    (B,T,K+1): P(a round that starts at token t accepts at least n drafts). lengths (B,): tokens in each text, None for
    T."""
    return _starts_inside(reach, lengths).sum(1)


def variance_from(reach: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the variance (B,) of the target calls of each text, given the text. reach (B,T,K+1): P(a round that starts
    at token t accepts at least n drafts). lengths (B,): tokens in each text, None for T."""
    return _moments(reach, lengths)[1]


def tau_from(reach: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return tokens per target call, sum(lengths) / sum(expected calls), as a scalar tensor. reach (B,T,K+1): P(a round
    that starts at token t accepts at least n drafts). lengths (B,): tokens in each text, None for T."""
    return _lengths(reach, lengths).sum() / calls_from(reach, lengths).sum()


def expected_calls(r: Tensor, k: int | Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the expected target calls (B,) of each text under the token rule: the sum over t < L of P(a round starts
    at t). For k = 0 the result is lengths. It is differentiable in r.

    r (B,T): min(1, q/p) of the text's token, or (B,T,K) by depth: entry (t, j) is for token t as draft j (0-based) of
    the round that starts at t - j. k: drafts per round: an int, (B,), or (B,T) for the round that starts at t. lengths
    (B,): tokens in each text, None for T. Raises ValueError if r has fewer depths than k, or if lengths exceed T.
    """
    return calls_from(reach(r, k, lengths), lengths)


def expected_calls_block(l: Tensor, k: int | Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the expected target calls (B,) of each text under block verification. It is differentiable in l.

    l (B,T): log q - log p of the text's token, or (B,T,K) by depth: entry (t, j) is for token t as draft j (0-based) of
    the round that starts at t - j. k: drafts per round: an int, (B,), or (B,T) for the round that starts at t. lengths
    (B,): tokens in each text, None for T. Raises ValueError if l has fewer depths than k, or if lengths exceed T.
    """
    return calls_from(reach_block(l, k, lengths), lengths)


def tau(r: Tensor, k: int | Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return tokens per target call under the token rule, sum(lengths) / sum(expected calls), as a scalar tensor. The
    tokens after the accepted drafts count too. r (B,T): min(1, q/p) of the text's token, or (B,T,K) by depth. k: drafts
    per round: an int, (B,), or (B,T) for the round that starts at t. lengths (B,): tokens in each text, None for T."""
    return tau_from(reach(r, k, lengths), lengths)


def depths_from(reach: Tensor, k: int | Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return P(accept drafts 1..i) (K,), and P(accept draft i given that all before it were accepted) (K,), over the
    expected rounds. i is 1-based. reach (B,T,K+1): P(a round that starts at token t accepts at least n drafts). k:
    drafts per round: an int, (B,), or (B,T) for the round that starts at t. lengths (B,): tokens in each text, None for
    T.

    Rounds are weighted by the probability s_t of their start: sum_t s_t reach_i / sum_t s_t, over the rounds that have
    draft i inside the text. The first result is NaN at a depth that no round drafts, the second at a depth that no
    round tries.
    """
    depths = torch.arange(1, reach.shape[-1], device=reach.device)
    ends = torch.arange(reach.shape[1], device=reach.device)[:, None] + depths  # (T,K) tokens up to draft i
    drafts = _within((ends <= _lengths(reach, lengths)[:, None, None]).to(reach.dtype), k, first=1)
    s = round_starts(reach)[..., None] * drafts
    accepted, drafted, tried = (s * reach[..., 1:]).sum((0, 1)), s.sum((0, 1)), (s * reach[..., :-1]).sum((0, 1))
    return accepted / drafted, accepted / tried


def histogram_from(reach: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the distribution (K+1,) of the number of drafts that a round accepts, over the expected rounds. reach
    (B,T,K+1): P(a round that starts at token t accepts at least n drafts). lengths (B,): tokens in each text, None for
    T."""
    weights = _starts_inside(reach, lengths)[..., None]
    return (weights * jumps_of(reach)).sum((0, 1)) / weights.sum()


def _moments(reach: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mean (B,) and the variance (B,) of the number of rounds that each text needs. They are computed
    backwards from the text's end.

    E_t = 1 + sum_n J_n E_{t+n+1}; Var_t = sum_n J_n (Var_{t+n+1} + (E_{t+n+1} + 1 - E_t)^2). This form of the total
    variance is never negative; E[C^2] - E[C]^2 would cancel. reach (B,T,K+1): P(a round that starts at token t accepts
    at least n drafts). lengths (B,): tokens in each text, None for T.
    """
    jumps, end = jumps_of(reach), _lengths(reach, lengths)
    mean = variance = torch.zeros_like(jumps[:, 0])  # (B,K+1) of positions t+1 .. t+K+1
    for t in reversed(range(jumps.shape[1])):
        jump, inside = jumps[:, t], (t < end)[:, None]
        now = 1 + (jump * mean).sum(-1, keepdim=True)
        spread = (jump * (variance + (mean + 1 - now) ** 2)).sum(-1, keepdim=True)
        mean = torch.cat([now * inside, mean[:, :-1]], -1)
        variance = torch.cat([spread * inside, variance[:, :-1]], -1)
    return mean[:, 0], variance[:, 0]


def jumps_of(reach: Tensor) -> Tensor:
    """Return P(a round accepts exactly n drafts) = reach_n - reach_{n+1}, (B,T,K+1). The next round then starts n + 1
    tokens later. reach (B,T,K+1): P(a round that starts at token t accepts at least n drafts)."""
    return reach - F.pad(reach[..., 1:], (0, 1))


def _starts_inside(reach: Tensor, lengths: Tensor | None) -> Tensor:
    """Return `round_starts(reach)` (B,T), with 0 past a text's end."""
    s = round_starts(reach)
    return s * up_to(_lengths(s, lengths), s.shape[1])


def _lengths(r: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return torch.full(r.shape[:1], r.shape[1], device=r.device)
    longer = lengths.device.type == "cpu" and bool((lengths > r.shape[1]).any())  # a GPU would be waited for
    if lengths.shape != r.shape[:1] or longer:
        raise ValueError(f"lengths must be ({r.shape[0]},) and at most {r.shape[1]}, not {lengths.tolist()}")
    return lengths.to(r.device)


def _within(values: Tensor, k: int | Tensor, first: int = 0) -> Tensor:
    """Return the values (B,T,n) with zero at depths beyond the round's k. Depths are on the last axis, numbered from
    `first`. k: drafts per round: an int, (B,), or (B,T) for the round that starts at t."""
    limit = torch.as_tensor(k, device=values.device)
    limit = limit.reshape(limit.shape + (1,) * (3 - limit.ndim))  # (), (B,), (B,T) -> (.,.,1)
    return values * (torch.arange(values.shape[-1], device=values.device) + first <= limit)


def _aligned(r: Tensor, k: int | Tensor, lengths: Tensor | None, fill: float) -> Tensor:
    """Return values (B,T,K) by round: entry (b, t, j) is r of token t+j at depth j (0-based), for the round that starts
    at t. Past a text's end it is `fill`. r (B,T), or (B,T,K) by depth. k: drafts per round: an int, (B,), or (B,T).
    lengths (B,): tokens in each text, None for T. Raises ValueError if r has fewer depths than k, or if lengths exceed
    T."""
    depths = int(torch.as_tensor(k).max())
    if r.ndim not in (2, 3) or (r.ndim == 3 and r.shape[2] < depths):
        raise ValueError(f"r and l must be (B,T), or (B,T,K) with K >= k = {depths}, not {tuple(r.shape)}")
    total = r.shape[1]
    shifted = [(r if r.ndim == 2 else r[..., j])[:, j:] for j in range(depths)]
    columns = [F.pad(wide(c), (0, total - c.shape[1])) for c in shifted]
    values = torch.stack(columns, -1) if columns else wide(r.new_zeros(*r.shape[:2], 0))
    token = torch.arange(total, device=r.device)[:, None] + torch.arange(depths, device=r.device)  # (T,K)
    return values.masked_fill(token >= _lengths(r, lengths)[:, None, None], fill)
