"""A block draft. It drafts all tokens of a round in one pass, by layers that attend to the target's states (DFlash,
2602.06036).

The context is not embedded. The target's low, middle and high states of each token, joined by `fc`, give the keys and
values of that token in every layer. The queries of a round are the anchor and K mask tokens after it. The anchor is the
text's last token; the target has not read it yet. The queries attend to the context and to each other: to all queries
of the block, or only to earlier ones if the draft is causal. Mask token i is at the position of draft i and predicts
this draft.

A Markov head (`models.markov`) may add a term for the preceding token to a draft's logits (DSpark, 2607.05147). Tensors
have the names and shapes that serving engines load (`DFlashDraftModel`). The embedding is the target's. As in published
drafts, the head may be the target's too, and the mask the target's embedding of one of its tokens. Otherwise the
network has a head of its own, and `mask_embedding`, which is an addition of this project.

A cache slot s here has the keys and values of token s, in all layers. A round first stores the keys and values of the
accepted tokens, computed from the states of the target pass. Then it stores those of its queries; the next round
overwrites these. Only tokens that the target has read stay stored, so a text of n tokens uses n - 1 slots (the anchor
has none).

H width of the target's states and of the draft, D width of an attention head, G heads of keys and values, A rows, n
tokens per row, K drafts per round, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.models.cache import Window
from inference.models.forward import picked_columns
from inference.models.markov import MarkovHead
from inference.models.pretrained import head_weight
from inference.models.small_heads import fill
from inference.models.step import Drafts, behind
from inference.proposers.base import Host
from inference.proposers.eagle import (
    Attend,
    Eagle,
    EagleConfig,
    EagleDrafting,
    FeatureNetwork,
    Gated,
    Norm,
    PairSlots,
    Projections,
    output_layers,
    rotated,
)
from inference.proposers.trees import from_one_pass

Embed = Callable[[Tensor], Tensor]  # ids (...) -> embeddings (..., H)

ARCHITECTURES = ["DFlashDraftModel"]
# what engines read of the heads that drafts of earlier versions have; they are not loaded
NO_CONFIDENCE = {"enable_confidence_head": False, "confidence_head_with_markov": False}


class BlockConfig(EagleConfig):
    """The config of a block draft, an `EagleConfig` with more keys. depths: number of drafts per round in training.
    causal: whether a query attends only to earlier queries. markov_rank: rank of the Markov head, 0 for none.
    target_head: whether the head is the target's, and the mask the target's embedding of the mask token. dflash_config:
    the form that serving engines read, with `causal`, the id of the mask token (None until it is chosen), and the
    layers that are read, numbered by their outputs.

    Raises ValueError for the target's head with a pruned vocabulary or a low rank."""

    model_type = "qwen3"
    loaded_as = ARCHITECTURES

    def __init__(
        self,
        num_hidden_layers: int = 1,
        causal: bool = False,
        markov_rank: int = 0,
        target_head: bool = False,
        dflash_config: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings | NO_CONFIDENCE)
        self.num_hidden_layers, self.markov_rank, self.target_head = num_hidden_layers, markov_rank, target_head
        if target_head and (self.draft_vocab_size != self.vocab_size or self.head_rank):
            raise ValueError("target_head: the target's head has all tokens and its full rank")
        self.causal = bool((dflash_config or {}).get("causal", causal))
        self.dflash_config = {
            "mask_token_id": None if target_head else self.vocab_size - 1,
            **(dflash_config or {}),
            "causal": self.causal,
            "target_layer_ids": output_layers(self.layers),
        }


class BlockNetwork(FeatureNetwork):
    """The network of a block draft: decoder layers over the queries of a block. mask_embedding (H,): the embedding of
    the mask token; None, like lm_head, if the target gives both."""

    config_class: Any = BlockConfig
    _keys_to_ignore_on_load_unexpected = [r"^confidence_head\."]
    config: BlockConfig
    markov_head: Any  # a MarkovHead or None

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        new = None if config.target_head else nn.Parameter(config.initializer_range * torch.randn(config.hidden_size))
        self.register_parameter("mask_embedding", new)
        if config.markov_rank:
            self.markov_head = MarkovHead(config.vocab_size, config.markov_rank, config.draft_vocab_size)
        self.post_init()

    def new_head(self, config: EagleConfig) -> Any:
        return None if config.target_head else super().new_head(config)

    def add_layers(self, config: EagleConfig) -> None:
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))

    def context(self, features: Tensor, cos: Tensor, sin: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values (A, n, G, D) of each layer. features (A, n, H): the target's features. cos, sin
        (A, n, 1, D): of the rotary angles of the tokens' positions."""
        x = self.hidden_norm(features)
        layers: Any = self.layers
        return [layer.self_attn.keys_values(x, cos, sin) for layer in layers]

    def queries(self, anchors: Tensor, K: int, embed: Embed) -> Tensor:
        """Return the queries (..., 1 + K, H) of blocks: the anchor's, then K mask tokens'. anchors (...): ids. embed:
        the target's embedding."""
        if self.mask_embedding is None:
            masks = anchors.new_full((*anchors.shape, K), self.config.dflash_config["mask_token_id"])
            return embed(torch.cat((anchors.unsqueeze(-1), masks), -1))
        embedded = embed(anchors)
        masks = self.mask_embedding.to(embedded.dtype).expand(*embedded.shape[:-1], K, -1)
        return torch.cat((embedded.unsqueeze(-2), masks), -2)

    @torch.no_grad()
    def copy_head(self, target: PreTrainedModel) -> None:
        """Give the network a head and a mask of its own, in place: copies of what the target gives it."""
        config, rows = self.config, head_weight(target)
        config.target_head = False
        with torch.device(self.fc.weight.device):
            self.lm_head = self.new_head(config).to(self.dtype)
        fill(self.lm_head, rows[: config.vocab_size])
        embedding: Any = target.get_input_embeddings()
        mask = embedding(torch.tensor([config.dflash_config["mask_token_id"]], device=embedding.weight.device))[0]
        self.mask_embedding = nn.Parameter(mask.to(self.fc.weight, copy=True))

    def states(self, x: Tensor, cos: Tensor, sin: Tensor, attends: Sequence[Attend]) -> Tensor:
        """Return the states (A, n, H) that `head` reads. x (A, n, H): the queries. cos, sin (A, n, 1, D): of the rotary
        angles of the queries' positions. attends: the attention function of each layer."""
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, cos, sin, attend)
        return self.norm(x)


class _Layer(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)
        self.self_attn = _Attention(config)
        self.mlp = Gated(width, config.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        read = self.input_layernorm(x)
        k, v = self.self_attn.keys_values(read, cos, sin)
        x = x + self.self_attn.o_proj(attend(self.self_attn.queries(read, cos, sin), k, v))
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(Projections):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, 1)
        self.size = config.head_dim
        self.q_norm, self.k_norm = (Norm(self.size, config.rms_norm_eps) for _ in range(2))

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotated(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.size))), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (part(x).unflatten(-1, (-1, self.size)) for part in (self.k_proj, self.v_proj))
        return rotated(self.k_norm(k), cos, sin), v


class BlockDrafting(EagleDrafting):
    """Drafts a round in one pass over a block, as a function of tensors. Its constructor has the arguments of
    `EagleDrafting`. target_head: the target's head, states (..., H) -> logits (..., V), for a network without one."""

    target_head: Callable[[Tensor], Tensor]

    def forward(self, round: Any, given: Mapping[str, Any], K: int) -> Drafts:
        ids, features, pairs, only = (given[name] for name in ("lacking", "features", "pairs", "only"))
        slots, limit, network = self.slots(given), given["slots"].shape[0], self.network
        self.store(slots, ids, features, Window(0, len(ids), behind(pairs, ids.shape[1]), None, limit))
        anchor = picked_columns(ids, only)[:, 0]
        x = network.queries(anchor, masks_of(network, K), lambda ids: self.embedding(ids).to(features.dtype))
        positions = behind(pairs + only + 1, x.shape[1])
        window = ends = Window(0, len(ids), positions, None, limit)
        if not network.config.causal:
            ends = replace(window, positions=positions[:, -1:].expand_as(positions))
        mask = slots.mask(ends)
        attends = [slots.attend(layer, window, mask) for layer in range(len(network.layers))]
        states = network.states(x, *slots.angles(positions), attends)[:, 1 : K + 1]
        logits = self.target_head(states) if network.lm_head is None else network.head(states, self.vocabulary)
        return from_one_pass(round, logits, self.branching, self.greedy, anchor, network.term(self.vocabulary))

    def store(self, slots: PairSlots, ids: Tensor, features: Tensor, window: Window) -> None:
        """Store the keys and values of tokens in all layers, in the slots of `window`. features (A, n, H): the tokens'
        features. ids (A, n) are not read."""
        for layer, (k, v) in enumerate(self.network.context(features, *slots.angles(window.positions))):
            slots.store(layer, window, k, v)


def masks_of(network: BlockNetwork, K: int) -> int:
    """Return the number of mask tokens in a pass that drafts K tokens: K for a causal draft, else always the number of
    drafts per round in training. network: says whether the draft is causal."""
    return K if network.config.causal else network.config.depths


class Block(Eagle):
    """A proposer that drafts k tokens from one pass over a block of mask tokens. It drafts for the target that its
    network was trained for.

    If the draft is not causal, a mask token sees all mask tokens of its block. Each round therefore reads as many mask
    tokens as in training, so that a row's distributions do not depend on the other rows of its batch. A round drafts at
    most `depths` tokens, the number of drafts per round in training.

    network, int8: as in `Eagle`. greedy: whether to draft the likeliest tokens. shape: the tree to draft, as
    the parent of each node (-1 for the text); None for chains.
    """

    network_class = BlockNetwork
    network: BlockNetwork
    drafting = BlockDrafting
    one_pass = True

    def _room_for(self, K: int) -> int:
        return 1 + masks_of(self.network, K)

    def open(self, host: Host) -> None:
        super().open(host)
        if self.network.lm_head is None:
            assert isinstance(self.module, BlockDrafting)
            self.module.target_head = host.target.head
