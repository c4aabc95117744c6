"""A feature draft that guesses all tokens of a round in one pass, trained as it drafts (P-EAGLE, 2602.01469).

A round whose newest pair is m, see `cotrain.students.eagle`, makes its guess of depth j at place m + 1 + j, from pairs
0 .. m of the target's features and the masks at depths 1 .. j behind them. The masks of all rounds of a text are read
in one pass behind its pairs, see `mask_blocks`, whose starts are the rounds' newest pairs.
B texts, T tokens, P = T - 1 pairs, M masks of a text, H width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from cotrain.students.base import Guess, Seen
from cotrain.students.eagle import Eagle, Rounds
from cotrain.students.mask_blocks import Blocks, blocks, places_of, starts, visible
from cotrain.students.parallel import KEEP, name_mask
from inference.proposers.eagle_network import Attend
from inference.proposers.p_eagle import PEagle as Proposer
from inference.proposers.p_eagle_network import PEagleNetwork


class PEagle(Eagle):
    """The student of `inference.proposers.p_eagle`."""

    kind = "p_eagle"
    network: PEagleNetwork

    def __init__(
        self, network: PreTrainedModel, target: PreTrainedModel | None = None, vocabulary: int | None = None
    ) -> None:
        super().__init__(network, target, vocabulary)
        name_mask(network, vocabulary)

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        """At depth 0 of every round. At others of every round too; where the batch has `uniforms` (B, T), which a step
        of training gives, of those that these keep, of places that are learnt from."""
        ids, u, depths = batch["ids"], batch.get("uniforms"), self.network.config.depths
        rounds = Rounds(ids, batch.get("position_ids"))
        kept = None if u is None else u[0, 1:].to(ids.device)
        masks = blocks(starts(batch, ids.device, 1), ids.shape[1] - 1, depths, kept, KEEP)
        states = self._states(ids, seen, rounds, masks)
        head = (self.head, tuple(self.network.lm_head.parameters()))
        at, inside = rounds.places(0)
        found = [Guess(0, at, states[:, : ids.shape[1] - 1][inside], *head)]
        for depth in range(1, depths):
            at, of_masks = places_of(masks, depth, ids, rounds.text, 1)
            behind = states[:, ids.shape[1] - 1 :].flatten(0, 1)[of_masks]
            found.append(Guess(depth, at, behind, *head, share=1.0 if u is None else KEEP**depth))
        return found

    def _states(self, ids: Tensor, seen: Seen, rounds: Rounds, masks: Blocks) -> Tensor:
        """(B, P + M, H) behind the norm, of the texts' pairs and of the masks behind them."""
        network, (rows, length) = self.network, ids.shape
        tokens = torch.cat([ids[:, 1:], ids.new_full((rows, len(masks.start)), network.mask)], 1)
        theirs = network.features(seen.states)[:, : length - 1]
        ours = network.mask_features().expand(rows, len(masks.start), -1)
        places = torch.cat([rounds.positions, rounds.positions[:, masks.start] + masks.depth], 1)
        attend = under(visible(masks, length - 1, rounds.text[:, :-1]), network.groups, network.scale)
        made = network.layer(self.embedded(tokens), torch.cat([theirs, ours], 1), *network.angles(places), attend)
        found: Tensor = network.norm(made)
        return found

    def proposer(
        self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False,
        shape: Sequence[int] | None = None,
    ) -> Proposer:  # fmt: skip
        return Proposer(self.network, greedy, compile=compile, shape=shape)


def under(mask: Tensor, groups: int, scale: float) -> Attend:
    """Attention under a mask (B, 1, n, n), bool; groups: heads of each pair of keys and values."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.to(v.dtype).transpose(1, 2) for part in (q, k, v))  # mixed precision: angles are float32
        k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
        return scaled_dot_product_attention(q, k, v, mask, scale=scale).transpose(1, 2).flatten(2)

    return attend
