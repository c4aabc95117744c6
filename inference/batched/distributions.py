"""Temperature, top-k, top-p and min-p of several rows at once, as tensors on their device.

A rows, V vocabulary. `sampling.probs` of each row alone is the reference: the same order, the same ties.
"""

import math
from collections.abc import Hashable, Sequence
from copy import copy

import torch
from torch import Tensor

from inference.sampling import Sampling, by_row, certain, keep_min_p, keep_top_p, probs_at, probs_of, wide


class Regimes:
    """Distributions of A rows under settings of their own. Made when rows come or go: making it copies to the
    device."""

    def __init__(self, sampling: Sequence[Sampling], device: torch.device) -> None:
        kinds = {(s.temperature, s.top_k, s.top_p, s.min_p) for s in sampling}
        self.count, self.alike = len(sampling), sampling[0] if len(kinds) == 1 else None
        self.temperatures = [float(s.temperature) for s in sampling]
        self.cut = any(s.top_k or s.top_p < 1 or s.min_p for s in sampling)
        nucleus = [row for row, s in enumerate(sampling) if s.temperature and s.top_p < 1]
        columns = [self.temperatures, [s.min_p for s in sampling], [1 - s.top_p for s in sampling],
                   [s.top_k for s in sampling], nucleus + [0] * (len(sampling) - len(nucleus))]  # fmt: skip
        table = torch.tensor(columns, dtype=torch.float64, device=device)  # (5, A)
        self.temperature, self.min_p, rest = table[:3].unbind()
        self.greedy, self.top_k = self.temperature == 0, table[3].to(torch.int64)
        self.divisor = torch.where(self.greedy, 1.0, self.temperature)
        self.some_greedy, self.least = 0 in self.temperatures, any(s.min_p for s in sampling)
        self.most = max(s.top_k for s in sampling)
        self.nucleus = table[4].to(torch.int64)[: len(nucleus)]
        self.rest = rest[self.nucleus]

    def probs(self, logits: Tensor) -> Tensor:
        """logits (A, ..., V) -> distributions (A, ..., V), float32 at least; NaN throughout where no distribution is
        left.

        Raises ValueError when the number of rows is another.
        """
        if logits.shape[0] != self.count:
            raise ValueError(f"{self.count} sampling settings for {logits.shape[0]} rows of logits")
        if self.alike is not None:
            return probs_of(wide(logits), self.alike)
        logits = wide(logits)
        probs = probs_at(logits, self.divisor, self._cut)
        if self.some_greedy:
            probs = torch.where(by_row(self.greedy, probs), certain(logits), probs)
        return probs

    @property
    def key(self) -> Hashable:
        """All that the distributions of `general` depend on but its tensors."""
        return self.sure, self.some_greedy, self.least, self._rounded

    def general(self) -> "Regimes":
        """The same distributions by tensors alone, for all rows with this `key` and tensors of these shapes."""
        made = copy(self)
        made.most, made.alike = self._rounded, Sampling(0.0) if self.sure else None
        return made

    @property
    def sure(self) -> bool:
        """Whether all rows are of one setting, of temperature 0."""
        return self.alike is not None and self.alike.temperature == 0

    @property
    def _rounded(self) -> int:
        """The largest top-k, up to a power of two."""
        return self.most and 1 << (self.most - 1).bit_length()

    def _cut(self, logits: Tensor) -> Tensor:
        if self.most:
            logits = self._top_k(logits)
        if len(self.nucleus):
            rows = logits.index_select(0, self.nucleus)
            logits = logits.index_copy(0, self.nucleus, keep_top_p(rows, rest=by_row(self.rest, rows)))
        return keep_min_p(logits, by_row(self.min_p, logits)) if self.least else logits

    def _top_k(self, logits: Tensor) -> Tensor:
        """-inf below the k-th largest of each row, k of its own; 0 keeps all."""
        V = logits.shape[-1]
        k = by_row(self.top_k, logits).expand(*logits.shape[:-1], 1)
        largest = logits.topk(min(self.most, V), dim=-1).values
        least = largest.gather(-1, (k - 1).clamp(0, largest.shape[-1] - 1))
        least = torch.where((k > 0) & (k < V), least, -math.inf)
        return logits.masked_fill(logits < least, -math.inf)
