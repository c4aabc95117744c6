"""Medusa: heads on the target's newest state, each of which guesses the token at one distance."""

from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from inference.models.dtypes import widened
from inference.proposers.base import Beside
from inference.proposers.branching import Follow, of_depths
from inference.proposers.medusa_network import MedusaNetwork
from inference.proposers.newest_state import Given, Heads, NewestState


class Medusa(NewestState):
    """Heads that see neither the anchor nor the drafts before theirs (Cai et al. 2024, 2401.10774), see
    `medusa_network`: all nodes of one depth of a tree have one distribution, that of their head."""

    network_class: Any = MedusaNetwork

    @classmethod
    def load(cls, folder: Path, beside: Beside) -> "Medusa":
        """Raises as `load_draft`, and ValueError for heads of another target's sizes."""
        network = cast(Heads, widened(cls.network_beside(folder, beside)))
        return cls(network, beside.greedy, shape=beside.shape)

    @classmethod
    def fits(cls, network: Any, target: PreTrainedModel, where: str) -> None:
        network.fits(target, where)

    def unrolled(self, given: Given, K: int) -> tuple[Tensor, Follow]:
        logits = self.host.target.head(self.network.states(given["newest"], K)).transpose(0, 1)  # (A, K, V)
        return logits[:, 0], of_depths(logits)
