"""Hydra: heads on the target's newest state that also see the tokens drafted before them."""

from torch import Tensor

from inference.proposers.branching import Follow, Nodes
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
        sums = sums.transpose(0, 1).unsqueeze(1)  # (A, nodes, heads to come, D): what each has read along a node's path

        def follow(ids: Tensor, nodes: Nodes) -> Tensor:
            nonlocal sums
            before = nodes.of_parents(sums)[:, :, 1:].flatten(0, 1).transpose(0, 1)
            read = network.read(before, target.embedded(ids).flatten(0, 1), nodes.depth)
            sums = read.transpose(0, 1).unflatten(0, ids.shape)
            return logits(nodes.depth)

        def logits(depth: int) -> Tensor:
            states = newest.repeat_interleave(sums.shape[1], 0)
            return target.head(network.head_states(sums[:, :, 0].flatten(0, 1), states, depth)).unflatten(
                0, sums.shape[:2]
            )

        return logits(0)[:, 0], follow
