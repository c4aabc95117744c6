"""Medusa: heads on the target's newest state, each of which guesses the token at one distance."""

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from inference.drafts.draft_folder import load_draft
from inference.models.dtypes import widened
from inference.proposers.base import Beside
from inference.proposers.newest_state import Choose, Given, Heads, NewestState, chosen


class Medusa(NewestState):
    """Heads that see neither the anchor nor the drafts before theirs (Cai et al. 2024, 2401.10774), see
    `medusa_network`; a chain of drafts, verified by any rule."""

    kind = "medusa"

    @classmethod
    def load(cls, folder: Path, beside: Beside) -> "Medusa":
        """Raises as `load_draft`, and ValueError for heads of another target's sizes."""
        network, made = load_draft(folder, target=beside.hashes, kind=cls.kind)[0], beside.made
        network.fits(beside.target, str(folder))
        torch.nn.Module.to(network, beside.target.device)
        return cls(cast(Heads, widened(network)), made is not None and made.objective == "greedy")

    def drafts(self, given: Given, K: int, choose: Choose) -> tuple[Tensor, Tensor]:
        logits = self.host.target.head(self.network.states(given["newest"], K))  # (K, A, V)
        return chosen(lambda drafted: logits[len(drafted)], K, choose)
