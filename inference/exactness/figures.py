"""The record of teacher-forced passes and of forced rounds. B texts, T tokens of the longest, K drafts of a round."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Figures:
    """What target and draft say of every token of texts that are known: all that their target calls follow from.

    logp (B, T): log p of each token; logq, alpha (B, T): log q of it and sum_v min(p, q) there, or (B, T, K) where they
    differ by depth: of token t when it is drafted at depth j, that is by the round that starts at token t - j, as
    `verify.prediction` numbers them. A draft that was certain and is another token has log q = -inf, and so have those
    behind it, which no round comes to. near_p (B, T), near_q, shaped as logq: the distribution is one-hot, and rounding
    could move it. k (B, T): drafts of the round that starts at token t, of trees the levels. lengths (B,). reach (B, T,
    D+1): of trees alone, P(the round that starts at token t accepts at least n nodes | the text); logq is then empty,
    alpha P(at least one), and near_q of the first level. rounding: by about how much passes of the run had other log p
    - log q, in nats. float64 on the CPU, zero past a text's end.
    """

    logp: Tensor
    logq: Tensor
    alpha: Tensor
    near_p: Tensor
    near_q: Tensor
    k: Tensor
    lengths: Tensor
    reach: Tensor | None = None
    rounding: float = 0.0

    def first(self, values: Tensor) -> Tensor:
        """Of a round's first draft: (B, T) or (B, T, K) -> (B, T)."""
        if values.ndim == 2:
            return values
        return values[..., 0] if values.shape[-1] else torch.zeros_like(self.logp)

    @property
    def near(self) -> int:
        """Drafts whose distribution is certain but that rounding could turn, at whatever depth."""
        return int((self.near_q if self.near_q.ndim == 2 else self.near_q.any(-1)).sum())
