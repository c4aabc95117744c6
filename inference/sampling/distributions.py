"""Distributions from logits, and draws from distributions by given uniforms.

B rows, V vocabulary. Only `_scaled` divides logits by a temperature. `probs_at` and `log_probs_at` call it, for rows
with one setting (`probs`) or several (`Regimes`), for recorded drafting (`models.step`), and for the losses
(`cotrain.losses.chunked`). Temperature 0 gives a one-hot distribution (`certain`).
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from inference.sampling.parameters import Sampling

TOP = 256  # likeliest tokens among which a nucleus nearly always ends
NEAR = 1e-4  # relative error of a sum in float32 over a vocabulary, at most
Truncate = Callable[[Tensor], Tensor]  # logits (..., V) -> logits (..., V), -inf on what is cut


def wide(x: Tensor) -> Tensor:
    """Return x (...) in its own dtype, or in float32 if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distributions (..., V): the softmax of the logits after temperature, top-k, top-p and min-p. Order and
    ties are as in transformers' warpers. Temperature 0 gives the one-hot distribution of the first maximum.

    logits (..., V): after the settings that read the text (`sampling.penalties`); -inf gives probability 0. The result
    has the logits' dtype, or float32 if that is wider. Logits without a distribution (NaN, +inf, or only -inf) give NaN
    for every token.
    """
    logits = wide(logits)
    if sampling.temperature == 0:
        return certain(logits)

    def truncate(logits: Tensor) -> Tensor:
        if 0 < sampling.top_k < logits.shape[-1]:
            logits = keep_top_k(logits, sampling.top_k)
        if sampling.top_p < 1:
            logits = keep_top_p(logits, sampling.top_p)
        if sampling.min_p > 0:
            logits = keep_min_p(logits, sampling.min_p)
        return logits

    return probs_at(logits, sampling.temperature, truncate)


def probs_at(logits: Tensor, temperature: float | Tensor, truncate: Truncate | None = None) -> Tensor:
    """Return softmax(truncate(logits / temperature)), (..., V). logits (..., V): in float32 or wider. temperature:
    above 0, one number, or a tensor (A,) with one per entry of the first dimension. truncate: sets some of the divided
    logits to -inf; None to keep all."""
    scaled = _scaled(logits, temperature)
    return (truncate(scaled) if truncate else scaled).softmax(-1)


def log_probs_at(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Return log softmax(logits / temperature), (..., V). logits (..., V): in float32 or wider. temperature: above 0,
    one number, or a tensor (A,) with one per entry of the first dimension."""
    return _scaled(logits, temperature).log_softmax(-1)


def _scaled(logits: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return logits / by_row(temperature, logits)
    return logits if temperature == 1 else logits / temperature


def is_missing(probs: Tensor) -> Tensor:
    """Return (...) bool: whether each distribution of probs (..., V) is missing. A missing distribution is NaN for
    every token, because the logits allow no token."""
    return probs[..., 0].isnan()


def by_row(values: Tensor, like: Tensor) -> Tensor:
    """Return values (A,) as (A, 1, ..., 1), with as many dimensions as `like`. Floating-point values get the dtype of
    `like`."""
    values = values.to(like.dtype) if values.is_floating_point() else values
    return values.view(-1, *(1,) * (like.dim() - 1))


def certain(logits: Tensor) -> Tensor:
    """Return the one-hot distributions (..., V) of the first maximum of logits (..., V); NaN for every token if the
    maximum is not finite."""
    ids = logits.argmax(-1, keepdim=True)
    top = logits.gather(-1, ids)
    none = top - top  # 0, or NaN
    return none.expand_as(logits).scatter(-1, ids, none + 1)


def one_hot(ids: Tensor, like: Tensor) -> Tensor:
    """Return one-hot distributions (..., V) of ids (...), with the V, dtype and device of `like` (..., V)."""
    return torch.zeros_like(like).scatter_(-1, ids.unsqueeze(-1), 1.0)


def at_ids(values: Tensor, ids: Tensor) -> Tensor:
    """Return the entries (...) of values (..., V) at ids (...)."""
    return values.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def up_to(lengths: Tensor, width: int) -> Tensor:
    """Return a bool tensor (..., width) that is True in the first `lengths` (...) columns of each row."""
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Return logits (..., V) in which all below the k-th largest are -inf (Fan et al. 2018, 1805.04833). Logits equal
    to the k-th largest stay. If there are at most k logits, all stay."""
    return logits.masked_fill(logits < logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:], -math.inf)


def keep_top_p(logits: Tensor, p: float = 1.0, *, rest: float | Tensor | None = None) -> Tensor:
    """Return logits (..., V) in which the tail is -inf (Holtzman et al. 2020, 1904.09751). The tail is the least likely
    tokens whose total mass is at most 1 - p; the likeliest token always stays.

    torch.sort decides the order of equal logits, as in transformers; the order depends only on the row. rest (A, 1,
    ...): 1 - p of each row, instead of p, if rows differ. On a CPU a large vocabulary is sorted only for a row whose
    tail does not begin among its `TOP` likeliest tokens, or begins between equal logits or where rounding decides.
    """
    tail = 1 - p if rest is None else rest
    sorts = logits.device.type != "cpu" or logits.dtype not in (torch.float32, torch.float64)
    if sorts or logits.shape[-1] < 4 * TOP:
        return _without_tail(logits, tail)
    rows = logits.reshape(-1, logits.shape[-1])
    tails = torch.as_tensor(tail, dtype=torch.float64).expand(*logits.shape[:-1], 1).reshape(-1, 1)
    if rows.dtype == torch.float32 and hasattr(torch.ops.inference, "without_tail"):  # `packing.has_kernels` loads it
        return torch.ops.inference.without_tail(rows, tails[:, 0]).view(logits.shape)
    top, ids = rows.topk(TOP, dim=-1)  # (R, TOP), descending
    mass = (rows - top[:, :1]).clamp_(min=-80).exp_()  # exp is slow below, where its results are denormal numbers
    most, whole = mass.gather(-1, ids).double(), mass.sum(-1, keepdim=True, dtype=torch.float64)
    rest_of = whole - (most.cumsum(-1) - most)  # mass of each token and of all that are less likely
    size = (rest_of > tails * whole).sum(-1, keepdim=True)
    least = top.gather(-1, (size - 1).clamp(min=0))
    known = (size > 0) & (least > top[:, -1:]) & ((top >= least).sum(-1, keepdim=True) == size)
    known &= ((rest_of - tails * whole).abs() > NEAR * tails * whole).all(-1, keepdim=True)  # the sort rounds its sums
    result = rows.masked_fill(rows < least, -math.inf)
    for row in (~known).nonzero()[:, 0].tolist():
        result[row] = _without_tail(rows[row], tails[row].to(rows.dtype))
    return result.view(logits.shape)


def _without_tail(logits: Tensor, tail: float | Tensor) -> Tensor:
    ascending, order = logits.sort(dim=-1, descending=False)
    gone = ascending.softmax(-1).cumsum(-1) <= tail
    gone[..., -1] = False
    return logits.masked_fill(torch.zeros_like(gone).scatter(-1, order, gone), -math.inf)


def keep_min_p(logits: Tensor, p: float | Tensor) -> Tensor:
    """Return logits (..., V) in which tokens less likely than p times the likeliest token are -inf (Nguyen et al. 2024,
    2407.01082). p: from 0 to 1, a number, or a tensor (A, 1, ...) with one per row."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -math.inf)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Return ids (...), int64, drawn from distributions (..., V) by the inverse CDF. u (...): uniforms in [0, 1).

    The result is the first token with mass whose cumulative probability is strictly above u times the total. Sums are
    in float64. Multiplying u by the total matters if the probabilities sum to slightly less than 1: the last token must
    not get the missing mass. If no cumulative probability is above, the last token with mass is returned. A token of
    probability 0 is never returned, even if a parallel sum is rounded.
    """
    cdf = probs.to(torch.float64).cumsum(-1)  # (..., V)
    total = cdf[..., -1:]
    bound = u.unsqueeze(-1) * total
    if probs.device.type == "cpu":  # a sequential sum rises at tokens with mass alone: bisect
        below = torch.minimum(bound, total * (1 - 2.0**-53))  # if u was rounded up to 1
        return torch.searchsorted(cdf, below, right=True).clamp(max=probs.shape[-1] - 1).squeeze(-1)
    return _first_above(probs, cdf, bound)


def _first_above(probs: Tensor, cdf: Tensor, bound: Tensor) -> Tensor:
    """Return, for each row, the first token (...) with mass whose cdf is above bound (..., 1), or else the last token
    with mass. probs, cdf (..., V)."""
    mass = probs > 0
    hit = mass & (cdf > bound)
    last = probs.shape[-1] - 1 - mass.flip(-1).to(torch.uint8).argmax(-1)
    return torch.where(hit.any(-1), hit.to(torch.uint8).argmax(-1), last)


class Regimes:
    """Temperature, top-k, top-p and min-p of A rows as tensors on the device. Distributions are computed for all rows
    at once and equal those of `probs` row by row, with the same order and ties. sampling: the settings of each row.
    Making a `Regimes` copies data to the device."""

    READ = ("temperature", "min_p", "greedy", "top_k", "divisor", "nucleus", "tail")  # tensors that `probs` reads

    def __init__(self, sampling: Sequence[Sampling], device: torch.device) -> None:
        regimes = {(s.temperature, s.top_k, s.top_p, s.min_p) for s in sampling}
        self.count, self.alike = len(sampling), sampling[0] if len(regimes) == 1 else None
        self.temperatures = [float(s.temperature) for s in sampling]
        self.cut = any(s.top_k or s.top_p < 1 or s.min_p for s in sampling)
        nucleus = [row for row, s in enumerate(sampling) if s.temperature and s.top_p < 1]
        columns = [
            self.temperatures,
            [s.min_p for s in sampling],
            [1 - s.top_p for s in sampling],
            [s.top_k for s in sampling],
            nucleus + [0] * (len(sampling) - len(nucleus)),
        ]
        table = torch.tensor(columns, dtype=torch.float64, device=device)  # (5, A)
        self.temperature, self.min_p, self.tails = table[:3].unbind()
        self.greedy, self.top_k = self.temperature == 0, table[3].to(torch.int64)
        self.divisor = torch.where(self.greedy, 1.0, self.temperature)
        self.some_greedy, self.any_min_p = 0 in self.temperatures, any(s.min_p for s in sampling)
        self.max_top_k = max(s.top_k for s in sampling)
        self.nucleus = table[4].to(torch.int64)[: len(nucleus)]
        self.tail = self.tails[self.nucleus]  # 1 - top_p of the rows with a nucleus

    def probs(self, logits: Tensor) -> Tensor:
        """Return distributions (A, ..., V), in float32 or wider. logits (A, ..., V); logits without a distribution give
        NaN for every token.

        Raises ValueError if the number of rows is not A.
        """
        if logits.shape[0] != self.count:
            raise ValueError(
                f"there are {self.count} sampling settings for {logits.shape[0]} rows of logits; give one per row"
            )
        if self.alike is not None:
            return probs(logits, self.alike)
        logits = wide(logits)
        p = probs_at(logits, self.divisor, self._cut)
        return torch.where(by_row(self.greedy, p), certain(logits), p) if self.some_greedy else p

    @property
    def key(self) -> Hashable:
        """Return a hashable value: for two objects with the same value, what `on` returns computes distributions by the
        same operations. Only the values of the tensors may differ."""
        return self.all_greedy, self.some_greedy, self.any_min_p, self._rounded

    def tensors(self) -> dict[str, Tensor]:
        """Return the settings' tensors by name: those that `probs` reads."""
        return {name: vars(self)[name] for name in self.READ}

    def on(self, tensors: Mapping[str, Tensor]) -> "Regimes":
        """Return a `Regimes` that reads `tensors`, by the names and with the shapes that the method `tensors` gives.
        They may be the settings of other rows with the same `key`."""
        other = copy(self)
        other.max_top_k, other.alike = self._rounded, Sampling(0.0) if self.all_greedy else None
        vars(other).update({name: tensors[name] for name in self.READ})
        return other

    @property
    def all_greedy(self) -> bool:
        """Return whether all rows have the same settings and temperature 0."""
        return self.alike is not None and self.alike.temperature == 0

    @property
    def _rounded(self) -> int:
        """Return the largest top-k, rounded up to a power of two."""
        return self.max_top_k and 1 << (self.max_top_k - 1).bit_length()

    def _cut(self, logits: Tensor) -> Tensor:
        if self.max_top_k:
            logits = self._top_k(logits)
        if len(self.nucleus):
            rows = logits.index_select(0, self.nucleus)
            logits = logits.index_copy(0, self.nucleus, keep_top_p(rows, rest=by_row(self.tail, rows)))
        return keep_min_p(logits, by_row(self.min_p, logits)) if self.any_min_p else logits

    def _top_k(self, logits: Tensor) -> Tensor:
        """Return logits (A, ..., V) in which all below the k-th largest are -inf. k is each row's own; k = 0 keeps
        all."""
        V = logits.shape[-1]
        k = by_row(self.top_k, logits).expand(*logits.shape[:-1], 1)
        largest = logits.topk(min(self.max_top_k, V), dim=-1).values
        least = largest.gather(-1, (k - 1).clamp(0, largest.shape[-1] - 1))
        return logits.masked_fill(logits < torch.where((k > 0) & (k < V), least, -math.inf), -math.inf)
