"""The part of a round that a proposer needs which verifies drafts itself, against a model between them and the target.

A rows, V vocabulary.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inference.batched.batch import Batch
from inference.noise import INNER, Uniforms, uniforms
from inference.processors import needs_history
from inference.request import Request

if TYPE_CHECKING:
    from inference.verify.rules import Rule


class LevelsOfRound:
    """Mixed into `round.DecodingRound`; see `proposers.base.Round`."""

    rows: Sequence[Request]
    rule: "Rule"
    noise: Uniforms
    batch: Batch
    device: torch.device
    send: Any
    _gumbel: Any

    @property
    def shared(self) -> bool:
        return self.rule.shared

    def draw_shared(self, probs: Tensor, depth: Tensor) -> Tensor:
        return (probs.log() + self._gumbel[torch.arange(len(depth), device=depth.device), depth]).argmax(-1)

    @property
    def reads_history(self) -> list[bool]:
        return [needs_history(row.sampling) for row in self.rows]

    def plain(self, logits: Tensor) -> Tensor:
        return self.batch.regimes.probs(logits.to(self.device))

    def inner(self, depths: int) -> Tensor:
        """Keyed by the start of this round, as all noise of a round that block verification reads."""
        depth = torch.arange(depths, device=self.device)
        return uniforms(self.noise.seed, self.batch.ids, self.send()["start"], depth, INNER)
