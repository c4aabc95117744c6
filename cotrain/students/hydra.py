"""Sequential draft heads while they train: each sees the target's last state, the anchor and the drafts before its own,
which are the text's."""

import torch
from torch import Tensor

from cotrain.students.medusa import Medusa


class Hydra(Medusa):
    """The student of `inference.proposers.hydra` (Ankner et al. 2024, 2402.05109)."""

    kind = "hydra"

    def head_states(self, ids: Tensor, newest: Tensor, depths: int) -> list[Tensor]:
        """As of `Medusa`; token i of round m is token m + 1 + i of the text."""
        network, found = self.network, []
        with torch.no_grad():
            embedded = self.target.get_input_embeddings()(ids.to(newest.device)).to(newest.dtype)
        sums = network.begun(newest.flatten(0, 1), depths).unflatten(1, newest.shape[:2])  # of heads to come
        for j in range(depths):
            count = newest.shape[1] - j  # rounds that have token j
            sums = sums[:, :, :count].flatten(1, 2)
            sums = network.read(sums, embedded[:, j + 1 :].flatten(0, 1), j)
            here = newest[:, :count].flatten(0, 1)
            found.append(network.head_states(sums[0], here, j).unflatten(0, (newest.shape[0], count)))
            sums = sums.unflatten(1, (newest.shape[0], count))[1:]
        return found
