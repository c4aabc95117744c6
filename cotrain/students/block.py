"""A block draft, trained on blocks of mask tokens that follow a token of the text (DFlash, 2602.06036). This token, the
anchor, is the text's last token when the round of the block begins.

A block with anchor m reads the target's states of tokens 0 .. m - 1 and the embedding of token m. Its guess at depth j
(0-based) is made at mask token j + 1, and its position is m + j. All blocks of a text share the keys and values of the
text's tokens. A training step reads only some of the blocks, and makes fewer guesses at later depths. The number of
guesses is then about the number of tokens in the text, whatever K is. A Markov head reads the token before each guess.
In training this is the text's own token, as if the previous draft had been accepted.

B texts, T tokens, S blocks of a text, K depths, n = 1 + K queries of a block, H width, D of a head, G heads of keys.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cotrain.config.drafts import Draft
from cotrain.config.groups import Init
from cotrain.losses.guess import sent
from cotrain.students.base import Guess, Seen, refuse_keys
from cotrain.students.eagle import EagleStudent, copy_ends, inner_width, segments, sizes_of
from cotrain.students.independent import HEAD
from cotrain.students.parallel import KEEP, starts, unused_id
from cotrain.teacher.target_model import halves
from inference.proposers.block import BlockNetwork
from inference.proposers.eagle import Attend

SPARE = 1.25  # tokens of a text for each guess that a training step makes of it
MOST_QUERIES = 4  # times the tokens of a text: queries that exist at once where all blocks are read


class BlockStudent(EagleStudent):
    """Trains the draft that `inference.proposers.block` serves: layers that read the target's states and draft a block
    of tokens in one pass."""

    kind = "block"
    features = ("dflash", "dspark")
    parallel = True
    network: BlockNetwork

    def prepare(self) -> None:
        super().prepare()
        self.target_head = halves(self.target, self.vocabulary)[1]
        config = self.network.config
        if config.dflash_config["mask_token_id"] is None:
            config.dflash_config["mask_token_id"] = unused_id(config, self.vocabulary)

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        if draft.head == "target":
            refuse_keys(draft, *HEAD)
        return super().initial(draft, init, target)

    @classmethod
    def loaded(cls, draft: Draft, target: PreTrainedModel) -> BlockNetwork:
        """Return the network in draft.path=. If it has no head, draft.head=own gives it copies of what the target gives
        it otherwise; with draft.head=null the target's head stays frozen."""
        network: BlockNetwork = super().loaded(draft, target)
        if network.config.target_head and draft.head == "own":
            network.copy_head(target)
        if network.config.target_head:
            refuse_keys(draft, *HEAD)
        return network

    @classmethod
    def settings_of(cls, draft: Draft) -> dict[str, Any]:
        """Return the number of layers, the attention within a block, the rank of the Markov head and whose head it is,
        as entries of the network's config. An entry is None if its setting is null."""
        causal = None if draft.mask is None else draft.mask == "causal"
        target_head = None if draft.head is None else draft.head == "target"
        return {
            "num_hidden_layers": draft.layers,
            "causal": causal,
            "markov_rank": draft.markov,
            "target_head": target_head,
        }

    @classmethod
    def sizes(cls, draft: Draft, init: Init, target: PreTrainedModel) -> dict[str, Any]:
        """Return the sizes in draft.*, as entries of the network's config. A null size gets its default: as many key
        heads as query heads, and the target's intermediate size."""
        theirs = target.config.get_text_config()
        size = draft.head_dim or theirs.hidden_size // theirs.num_attention_heads
        heads, inner = draft.kv_heads or max(theirs.hidden_size // size, 1), draft.intermediate or inner_width(theirs)
        every = draft.model_copy(update={"head_dim": size, "kv_heads": heads, "intermediate": inner})
        return sizes_of(every, target, False)

    @classmethod
    @torch.no_grad()
    def copy_layers(cls, network: Any, target: PreTrainedModel, layers: list[int]) -> None:
        """Copy the target's last norm into the network, in place. No layer is copied, because the draft computes its
        keys from the target's states, unlike the target's layers. New layers begin by passing on what they attend to.
        In one trial of 400 steps without a report, this gave acceptance .46, and layers copied from the target gave
        .42. layers: not used."""
        for layer in network.layers:
            for part in (layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight):
                part.copy_(torch.eye(*part.shape))
        copy_ends(network, network.hidden_norm, torch.ones_like(network.hidden_norm.weight), target)

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        """Return one guess for each depth. batch: ids (B, T), and position_ids (B, T) if texts are packed. seen: the
        target's states.

        In a training step, which also has `uniforms` (B, T) and `predicted` (B, T-1), only some of the blocks with
        tokens to learn are read: every `apart`-th one, beginning at a random one. Only a random share KEEP ** j of the
        guesses at depth j is made.
        """
        network, ids, u = self.network, batch["ids"], batch.get("uniforms")
        K, anchors, apart = network.config.depths, starts(batch), 1
        anchors = anchors[anchors > 0]  # a block needs a state
        if u is not None:
            u = u[0]
            apart = max(min(round(SPARE * sum(KEEP**depth for depth in range(K))), len(anchors)), 1)
            anchors = anchors[int(u[0] * apart) :: apart]
        positions = batch.get("position_ids", torch.arange(ids.shape[1]).expand(ids.shape))
        texts, device = segments(positions), network.device
        read = [sent(one, device) for one in (ids, positions, texts)]
        context = network.context(network.features(seen.states), *network.angles(read[1]))
        parts = sent(anchors, device).split(max(MOST_QUERIES * ids.shape[1] // (1 + K), 1))
        states = torch.cat([self._states(read[0], read[1], read[2], part, context) for part in parts], 1)
        guesses, pruned = [], self.pruned
        parameters = () if network.lm_head is None else tuple(network.lm_head.parameters())
        for depth in range(K):
            share = 1.0 if u is None else KEEP**depth / apart
            rows, columns = self._inside(anchors, depth, texts)
            if u is not None:
                drawn = u[anchors[columns]] < KEEP**depth
                rows, columns = rows[drawn], columns[drawn]
            at = rows * ids.shape[1] + anchors[columns] + depth
            of_depth = states[sent(rows, device), sent(columns, device), depth]
            guesses.append(Guess(depth, at, of_depth, self.head, parameters, share, pruned))
        return self.after_tokens(guesses, ids)

    @staticmethod
    def _inside(anchors: Tensor, depth: int, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Return which blocks make a guess at this depth (0-based), as rows and columns (N,): column s of row b is the
        block with anchor anchors[s] in text row b. It does if the token before the anchor and the guess's position are
        in the same text. anchors (S,): positions, all above 0. texts (B, T): the number of each token's text within its
        row."""
        length = texts.shape[1]
        same = texts[:, anchors - 1] == texts[:, (anchors + depth).clamp(max=length - 1)]
        rows, columns = (same & (anchors + depth < length)).nonzero(as_tuple=True)
        return rows, columns

    def _states(
        self, ids: Tensor, positions: Tensor, texts: Tensor, anchors: Tensor, context: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the states (B, S, K, H) of the mask tokens in the blocks with these anchors. ids (B, T). positions (B,
        T): of each token in its text. texts (B, T): the number of each token's text within its row. anchors (S,):
        positions in a row. context: for each layer, the keys and values (B, T, G, D) of the text's tokens."""
        network, S, n = self.network, len(anchors), 1 + self.network.config.depths
        x = network.queries(ids[:, anchors], n - 1, self.embedded).flatten(1, 2)
        at = (positions[:, anchors].unsqueeze(-1) + torch.arange(n, device=ids.device)).flatten(1)
        every = torch.arange(ids.shape[1], device=ids.device)
        sees = (every < anchors.unsqueeze(1)) & (texts[:, anchors].unsqueeze(2) == texts.unsqueeze(1))  # (B, S, T)
        own = torch.ones(n, n, dtype=torch.bool, device=ids.device)
        own = own.tril() if network.config.causal else own
        attends = [attend_blocks(keys, values, sees, own, network.groups, network.scale) for keys, values in context]
        return network.states(x, *network.angles(at), attends).unflatten(1, (S, n))[:, :, 1:]

    def head(self, states: Tensor) -> Tensor:
        return self.target_head(states) if self.network.lm_head is None else super().head(states)


def attend_blocks(keys: Tensor, values: Tensor, sees: Tensor, own: Tensor, groups: int, scale: float) -> Attend:
    """Return the attention of blocks: a function from queries, keys and values (B, S * n, heads, D) of the blocks' own
    tokens to their outputs. Its softmax is over the text's tokens that a block sees and over the block's own tokens.

    keys, values (B, T, G, D): of the text's tokens. sees (B, S, T) bool: the text's tokens that each block sees. own
    (n, n) bool: entry [i, j] is whether query i of a block sees token j of the block. groups: number of query heads per
    key head. scale: the factor of the scores.
    """
    theirs = keys.transpose(1, 2).repeat_interleave(groups, 1), values.transpose(1, 2).repeat_interleave(groups, 1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        S, n = sees.shape[1], len(own)
        q, k, v = (part.to(v.dtype).transpose(1, 2) for part in (q, k, v))  # mixed precision: angles are float32
        k, v = (part.repeat_interleave(groups, 1).unflatten(2, (S, n)) for part in (k, v))  # (B, heads, S, n, D)
        of_text = (q @ theirs[0].to(q.dtype).transpose(2, 3)).unflatten(2, (S, n))  # (B, heads, S, n, T)
        of_text = of_text.masked_fill(~sees[:, None, :, None], -torch.inf)
        mine = (q.unflatten(2, (S, n)) @ k.transpose(3, 4)).masked_fill(~own, -torch.inf)
        share = (torch.cat((of_text, mine), -1) * scale).softmax(-1)
        from_text, from_block = share.split([sees.shape[2], n], -1)
        output = (from_text.flatten(2, 3) @ theirs[1].to(q.dtype)) + (from_block @ v).flatten(2, 3)
        return output.transpose(1, 2).flatten(2)

    return attend
