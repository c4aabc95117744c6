"""What a batch's guesses cost: sequence losses over texts, losses a position over places and depths, each by name.

B texts, T tokens, L tokens of the longest completion, K guesses, one a depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cotrain.losses.chunked import Statistics
from cotrain.losses.guess import Guess
from cotrain.losses.over_guesses import Asked
from cotrain.losses.spec import LossSpec
from cotrain.training.counts import Counts

Logs = tuple[Tensor, Tensor]


class OfPlaces(NamedTuple):
    """The mean of the losses a position, its terms by name, and what was seen of each guess."""

    mean: Tensor
    terms: dict[str, Tensor]
    statistics: list[Statistics]


@dataclass(frozen=True)
class StepLoss:
    """spec: what is learnt now. asked: of every guess. logs: log p and log q of the sampled tokens, see `Asked.logs`,
    None where nothing reads them. counts: what sums are divided by. k: draft length that sequence losses speak of.
    hardest: see `chunked`."""

    spec: LossSpec
    asked: Asked
    guesses: Sequence[Guess]
    logs: Logs | None
    counts: Counts
    k: int
    hardest: float

    @cached_property
    def saved(self) -> Tensor | None:
        """Target calls that a unit of acceptance saves at each sampled token, see `Asked.saved`."""
        return None if self.logs is None else self.asked.saved(self.logs, self.k)

    def of_texts(self) -> dict[str, Tensor]:
        """Means of the sequence losses over texts or tokens, by name."""
        found = {}
        for term in self.spec.sequence:
            assert self.logs is not None
            count = self.counts.texts if term.loss.over == "texts" else self.counts.tokens
            found[term.name] = self.asked.of_texts(term, self.logs, self.k) / count
        return found

    def of_places(self, predicted: Tensor, share: Tensor, u: Tensor, measured: bool) -> OfPlaces:
        """Over positions and depths: by the share of each depth (K,); of a weighted loss, over tokens, by the calls
        that acceptance saves there. predicted (B, T-1) bool; u (B, T): uniforms to draw tokens by."""
        every = pad(predicted, (0, 1))
        total = self.asked.ids.new_zeros((), dtype=torch.float32)
        terms: list[Tensor] = []
        statistics: list[Statistics] = []
        for guess, part in zip(self.guesses, share.tolist(), strict=True):
            value, found = self.asked.of_places(self.spec, guess, self._weight(guess, every), measured, self.hardest, u)
            total = total + part * value
            terms.append(part * found.terms)
            statistics.append(found)
        count = self.counts.tokens if self.spec.weighted else self.counts.positions
        return OfPlaces(total / count, self._named(total, terms, count), statistics)

    def _weight(self, guess: Guess, every: Tensor) -> Tensor:
        if not self.spec.weighted:
            return every
        assert self.saved is not None
        return self.asked.weight(self.saved, guess.depth)

    def _named(self, total: Tensor, terms: list[Tensor], count: Tensor) -> dict[str, Tensor]:
        names = [term.name for term in self.spec.terms]
        if len(names) < 2:
            return {names[0] if names else "position": total.detach() / count}
        return dict(zip(names, torch.stack(terms).sum(0) / count, strict=True))


def logs_for(spec: LossSpec, asked: Asked, guesses: Sequence[Guess], by_depth: bool) -> Logs | None:
    """Of the sampled tokens, where the loss asks for them, or the weights of several depths do (by_depth)."""
    if spec.sequence:
        return asked.logs(guesses)
    if not spec.weighted and not (by_depth and len(guesses) > 1):
        return None
    with torch.no_grad():
        return asked.logs(guesses)
