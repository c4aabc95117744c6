"""Hydra: heads on the target's newest state that also see the tokens drafted before them."""

from torch import Tensor

from inference.proposers.hydra_network import HydraNetwork
from inference.proposers.medusa import Medusa
from inference.proposers.newest_state import Choose, Given, chosen


class Hydra(Medusa):
    """Sequential heads (Ankner et al. 2024, 2402.05109), see `hydra_network`: a draft costs four small products."""

    network_class = HydraNetwork

    def drafts(self, given: Given, K: int, choose: Choose) -> tuple[Tensor, Tensor]:
        network, target, newest = self.network, self.host.target, given["newest"]
        sums = network.begun(newest, K)  # of the heads that are to come

        def logits(drafted: list[Tensor]) -> Tensor:
            nonlocal sums
            j = len(drafted)
            token = drafted[-1] if drafted else given["anchor"][:, 0]
            sums = network.read(sums[1:] if drafted else sums, target.embedded(token), j)
            return target.head(network.made(sums[0], newest, j))

        return chosen(logits, K, choose)
