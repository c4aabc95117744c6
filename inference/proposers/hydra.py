"""Hydra: heads on the target's newest state that also see the tokens drafted before them."""

from torch import Tensor

from inference.proposers.branching import Follow
from inference.proposers.hydra_network import HydraNetwork
from inference.proposers.medusa import Medusa
from inference.proposers.newest_state import Given


class Hydra(Medusa):
    """Sequential heads (Ankner et al. 2024, 2402.05109), see `hydra_network`: a draft costs four small products, all
    nodes of one depth of a tree the same few."""

    network_class = HydraNetwork

    def unrolled(self, given: Given, K: int) -> tuple[Tensor, Follow]:
        network, target, newest = self.network, self.host.target, given["newest"]
        sums = network.read(network.begun(newest, K), target.embedded(given["anchor"][:, 0]), 0)
        sums = sums.unsqueeze(2)  # (heads to come, A, nodes of the level, D): what each has read along a node's path

        def follow(ids: Tensor, level: int) -> Tensor:
            nonlocal sums
            above = self.branching.above(level, ids.device) if self.branching else slice(None)
            before = sums[1:, :, above].flatten(1, 2)
            sums = network.read(before, target.embedded(ids).flatten(0, 1), level).unflatten(1, ids.shape)
            return logits(level)

        def logits(level: int) -> Tensor:
            states = newest.repeat_interleave(sums.shape[2], 0)
            return target.head(network.made(sums[0].flatten(0, 1), states, level)).unflatten(0, sums.shape[1:3])

        return logits(0)[:, 0], follow
