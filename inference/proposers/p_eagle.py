"""A feature draft that guesses all tokens of a round in one pass, at masks behind the text (P-EAGLE, 2602.01469).

A rows, n pairs a row, width of the pairs that slots lack, K drafts of a round, H width, V vocabulary.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from inference.models.cache import Window
from inference.models.one_pass import behind, drawn
from inference.proposers.base import Round
from inference.proposers.branching import of_depths
from inference.proposers.eagle import Eagle
from inference.proposers.growing import Shape
from inference.proposers.p_eagle_network import PEagleNetwork


class PEagle(Eagle):
    """Drafts k tokens from one pass over the pairs of the tokens that were accepted and k - 1 masks, see
    `p_eagle_network`.

    The distribution at depth j sees the text and j masks, not the drafts before it: all nodes of one depth of a tree
    have one distribution. A round stores masks behind the text's pairs; the next one writes over them. It drafts no
    further than its config says that it was trained for. Arguments as `Eagle`; raises ValueError for a network whose
    config names no mask.
    """

    network_class = PEagleNetwork
    network: PEagleNetwork

    def __init__(
        self, network: PEagleNetwork, greedy: bool = False, *, compile: bool | None = None, shape: Shape = None
    ) -> None:
        super().__init__(network, greedy, compile=compile, shape=shape)
        self.mask, self.depths = network.mask, network.config.depths

    def _drafted(self, round: Round, given: Mapping[str, Tensor], slots: int, K: int) -> tuple[Tensor, Tensor]:
        logits = self._masked(given, slots, K)
        if self.branching:
            return self.branching.grown(round, K, logits[:, 0], of_depths(logits), self.greedy)
        return drawn(round, logits, self.greedy)

    def _masked(self, given: Mapping[str, Tensor], slots: int, K: int) -> Tensor:
        """Logits (A, K, V) at the text's last pair and the K - 1 masks behind it; given: see `_given`."""
        ids, features, pairs, only = (given[name] for name in ("lacking", "features", "pairs", "only"))
        columns = torch.arange(ids.shape[1] + K - 1, device=ids.device)
        text = columns <= only.unsqueeze(1)  # (A, n): which are pairs of the text
        ids = pad(ids, (0, K - 1)).masked_fill(~text, self.mask)
        features = torch.where(text.unsqueeze(-1), pad(features, (0, 0, 0, K - 1)), self.network.mask_features())
        window = Window(0, len(ids), pairs.unsqueeze(1) + columns, None, slots)
        return self._logits(behind(self._layer(ids, features, window), only, K))
