"""Medusa: heads on the target's newest state, each of which guesses the token at one distance."""

from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from inference.models.dtypes import widened
from inference.proposers.base import Beside
from inference.proposers.medusa_network import MedusaNetwork
from inference.proposers.newest_state import Choose, Given, Heads, NewestState, chosen


class Medusa(NewestState):
    """Heads that see neither the anchor nor the drafts before theirs (Cai et al. 2024, 2401.10774), see
    `medusa_network`; a chain of drafts, verified by any rule."""

    network_class: Any = MedusaNetwork

    @classmethod
    def load(cls, folder: Path, beside: Beside) -> "Medusa":
        """Raises as `load_draft`, and ValueError for heads of another target's sizes."""
        return cls(cast(Heads, widened(cls.network_beside(folder, beside))), beside.greedy)

    @classmethod
    def fits(cls, network: Any, target: PreTrainedModel, where: str) -> None:
        network.fits(target, where)

    def drafts(self, given: Given, K: int, choose: Choose) -> tuple[Tensor, Tensor]:
        logits = self.host.target.head(self.network.states(given["newest"], K))  # (K, A, V)
        return chosen(lambda drafted: logits[len(drafted)], K, choose)
