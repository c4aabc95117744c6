"""One round of the active rows: their laws, their noise and the verdict on their drafts.

A rows, K drafted at most, V vocabulary. The noise of a row is a function of (seed, row id, tokens it had emitted
when the round began, depth, stream), see `streams`; only the coupled rule keys it by position.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from inference import streams, verify
from inference.processors import needs_history, process
from inference.rows import Row
from inference.sampling import draw, one_hot, probs, wide

RULES = ("token", "block", "match", "coupled")


class Turn:
    """What the engine and a proposer share during one round; implements `proposer.Round`."""

    def __init__(
        self,
        rows: Sequence[Row],
        k: list[int],
        rule: str,
        noise: streams.Uniforms,
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self.rows, self.k, self.rule, self.noise = rows, k, rule, noise
        self.vocabulary, self.device = vocabulary, device
        self.texts = [row.text for row in rows]
        self.sampling = [row.sampling for row in rows]
        self.reads_history = any(map(needs_history, self.sampling))
        self.ids, self.starts = [row.id for row in rows], [row.emitted for row in rows]

    def law(self, logits: Tensor, drafted: list[Tensor]) -> Tensor:
        """Logits (A, V) after the texts and `drafted` ids (A,) -> law (A, V)."""
        if self.reads_history:
            prefixes = torch.stack(drafted, 1).tolist() if drafted else [[]] * len(self.rows)
            rows = [r for r, row in enumerate(self.rows) if row.ends.isdisjoint(prefixes[r])]
            logits = self._processed(logits, prefixes, rows)
        return probs(logits, self.sampling)

    def laws(self, logits: Tensor, x: Tensor, k: list[int]) -> Tensor:
        """Target logits (A, K+1, V) of the texts and drafts x (A, K) -> p (A, K+1, V); past k_b unread."""
        if self.reads_history:
            logits = torch.stack(self._along(logits, x, k), 1)
        return probs(logits, self.sampling)

    def _along(self, logits: Tensor, x: Tensor, k: list[int]) -> list[Tensor]:
        """Processed logits (A, V) of each depth. Behind an end, or a draft without mass, no text goes on: what
        stands there is never read into one, and a grammar may have no answer."""
        drafts, places = x.tolist(), []
        rows = list(range(len(k)))
        for depth, here in enumerate(logits.unbind(1)):
            here = self._processed(here, [draft[:depth] for draft in drafts], rows)
            places.append(here)
            rows = [r for r in rows if depth < k[r] and self._goes_on(r, drafts[r][depth], here[r])]
        return places

    def _goes_on(self, row: int, token: int, logits: Tensor) -> bool:
        return token not in self.rows[row].ends and bool(logits[token] > -math.inf)

    def _processed(self, logits: Tensor, drafts: list[list[int]], rows: list[int]) -> Tensor:
        """Logits (A, V) of the texts followed by drafts, processed in `rows`, as they are in the others."""
        logits = wide(logits).clone()
        if rows:
            histories = [self.texts[r] + drafts[r] for r in rows]
            new = [self.rows[r].emitted + len(drafts[r]) for r in rows]
            # each row's own stop ids come with its settings
            ends = sorted(frozenset.intersection(*(row.ends for row in self.rows)))
            logits[rows] = process(logits[rows], histories, new, [self.sampling[r] for r in rows], ends)
        return logits

    def simple(self, depths: int) -> tuple[Tensor, Tensor] | None:
        """Uniforms (A, depths) and temperatures (A,), where laws and draws need no more than these."""
        cut = any(s.top_k or s.top_p < 1 or s.min_p for s in self.sampling)
        if self.rule == "coupled" or self.reads_history or cut:
            return None
        u = self.noise(self.ids, self.starts, depths)[0]  # the stream of drafts
        return u, torch.tensor([s.temperature for s in self.sampling], dtype=torch.float64, device=self.device)

    def draw(self, law: Tensor, depth: int) -> Tensor:
        """Ids (A,) from law (A, V): the draft's own stream, or the noise shared with the target."""
        if self.rule == "coupled":
            return (law.log() + self._gumbel[:, depth]).argmax(-1)
        return draw(law, self._uniforms[streams.DRAFT][:, depth])

    @cached_property
    def _gumbel(self) -> Tensor:
        start, depth = torch.tensor(self.starts, device=self.device), torch.arange(max(self.k) + 1, device=self.device)
        ids = torch.tensor(self.ids, device=self.device)
        return streams.gumbel(self.noise.seed, ids, start.unsqueeze(1) + depth, self.vocabulary)  # (A, K+1, V)

    @cached_property
    def _uniforms(self) -> dict[int, Tensor]:
        """Uniforms (A, K+1) of each stream."""
        made = self.noise(self.ids, self.starts, max(self.k) + 1)
        return dict(zip((streams.DRAFT, streams.ACCEPT, streams.RESIDUAL), made, strict=True))

    def verdict(self, p: Tensor, q: Tensor | None, x: Tensor, k: list[int]) -> verify.Verdict:
        """The rule on p (A, K+1, V), q (A, K, V) or None for certain drafts, x (A, K)."""
        length = torch.tensor(k, device=self.device)
        if self.rule == "coupled":
            return verify.coupled(p, x, self._gumbel[:, : x.shape[1] + 1], length)
        u = self._uniforms[streams.ACCEPT]
        if self.rule == "match":
            return verify.match(p, x, u[:, : x.shape[1] + 1], length)
        if q is None:
            q = one_hot(x, p[:, :-1])
        rule = verify.token if self.rule == "token" else verify.block
        return rule(p, q, x, u[:, : x.shape[1]], length)

    def last(self, law: Tensor) -> Tensor:
        """The token (A,) emitted after the accepted ones, drawn from the verdict's law (A, V)."""
        return draw(law, self._uniforms[streams.RESIDUAL][:, 0])
