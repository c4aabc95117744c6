"""A feature draft: one decoder layer over the target's states of each token (EAGLE-3, Li et al. 2025, 2503.01840).

Its input is a sequence of pairs. Pair s joins the target's features at token s and the embedding of token s + 1. The
decoder layer's output at pair s, after reading pairs 0 to s, predicts token s + 2. Features are the target's states of
three layers, joined by `fc`. For a token that the target has not read yet, the features are the draft's own: the
layer's output at the pair before. Tensors have the names and shapes that serving engines load
(`LlamaForCausalLMEagle3`). The embedding is the target's and not part of the network.

While serving, the keys and values of pair s are in cache slot s, in a cache of one layer. A round first stores the
pairs of the accepted tokens, with features from the target pass. Then it drafts with pairs that have the draft's own
features; the next round overwrites these. In a tree of drafts the pair of node i is in slot anchor + 1 + i. In this
module the anchor of a tree is the text's last pair (see `Tree`).

H width of the target's states and of the draft, D width of an attention head, Vd tokens in the draft's vocabulary, V in
the target's, A rows, n pairs per row, K drafts per round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inference.drafts.compatibility import same_sizes
from inference.drafts.published import LAYER_IDS
from inference.models import llama, packing
from inference.models.cache import SlotCache, Window, tree_window
from inference.models.checksum import Stamp
from inference.models.forward import additive, attention, most_ids, picked_columns, visible
from inference.models.markov import FromZero, MarkovHead, Term
from inference.models.passes import LAST, States
from inference.models.pretrained import layers_of
from inference.models.replay import Replay, replay_of
from inference.models.small_heads import fill, projection, refuse_ids, spread_logits, spread_probs
from inference.models.step import Drafts, Nodes, behind, by_round, one_by_one
from inference.proposers.base import Host, LoadArguments, Outcome, Proposal, Proposer, Round
from inference.proposers.trees import StaticTrees, TreeShape, trees_of

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries (A, n, heads, D), keys, values -> (A, n, heads D)

ARCHITECTURES = ["LlamaForCausalLMEagle3"]


def output_layers(layers: Sequence[int]) -> list[int]:
    """Return, for each layer whose input is read, the number of the layer that has this input as its output: i - 1 for
    layer i. The input of layer 0 is the embeddings, numbered -1."""
    return [layer - 1 for layer in layers]


class EagleConfig(PretrainedConfig):
    """The config of a folder in the EAGLE-3 format. depths: number of drafts per round in training. head_rank: the rank
    of a low-rank head, an addition to the format; None for a full-rank head. norm_before_residual: whether the residual
    of the decoder layer is the normed features, as in many drafts of speculators, instead of the features.

    rope_parameters: the scaling of the rotary angles, as in transformers; None for none. Types whose angles depend on
    the text's length (dynamic, longrope) are not supported.

    eagle_aux_hidden_state_layer_ids: the layers whose inputs `fc` joins; vLLM reads this key first. eagle_config: for
    SGLang, the same states, numbered by the layers that output them. If only `eagle_config` is given, its numbers mean
    inputs, as in vLLM and in earlier folders of cotrain. Both keys are always written. The other keys are those of a
    Llama config; vocab_size is the target's and draft_vocab_size the draft's.
    """

    model_type = "llama"
    loaded_as = ARCHITECTURES  # the architecture by which engines know the network

    def __init__(
        self,
        hidden_size: int = 16,
        intermediate_size: int = 32,
        num_attention_heads: int = 2,
        num_key_value_heads: int = 1,
        head_dim: int = 8,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 10000.0,
        max_position_embeddings: int = 256,
        vocab_size: int = 32,
        draft_vocab_size: int | None = None,
        head_rank: int | None = None,
        eagle_config: Mapping[str, Any] | None = None,
        eagle_aux_hidden_state_layer_ids: Sequence[int] | None = None,
        depths: int = 4,
        norm_before_residual: bool = False,
        rope_parameters: Mapping[str, Any] | None = None,
        initializer_range: float = 0.02,
        **other: Any,
    ) -> None:
        self.hidden_size, self.intermediate_size, self.head_dim = hidden_size, intermediate_size, head_dim
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.rms_norm_eps, self.norm_before_residual = rms_norm_eps, norm_before_residual
        self.rope_parameters = {"rope_type": "default", **(rope_parameters or {}), "rope_theta": rope_theta}
        self.rope_theta = rope_theta
        self.max_position_embeddings, self.vocab_size = max_position_embeddings, vocab_size
        self.draft_vocab_size, self.head_rank = draft_vocab_size or vocab_size, head_rank
        self.num_hidden_layers, self.hidden_act, self.attention_bias, self.mlp_bias = 1, "silu", False, False
        layers = eagle_aux_hidden_state_layer_ids or (eagle_config or {}).get(LAYER_IDS) or ()
        self.eagle_aux_hidden_state_layer_ids = list(layers)
        self.eagle_config = {"use_aux_hidden_state": True, **(eagle_config or {}), LAYER_IDS: output_layers(layers)}
        self.depths, self.initializer_range = depths, initializer_range
        known = (
            "num_hidden_layers",
            "hidden_act",
            "attention_bias",
            "mlp_bias",
            "tie_word_embeddings",
            "architectures",
        )
        rest = {name: value for name, value in other.items() if name not in known}
        named: dict[str, Any] = {"tie_word_embeddings": False, "architectures": self.loaded_as}
        super().__init__(**named, **rest)

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the target's layers whose states `fc` joins, in order. Layer i stands for the states after i decoder
        layers, 0 for the embeddings."""
        return tuple(self.eagle_aux_hidden_state_layer_ids)


class FeatureNetwork(PreTrainedModel):
    """The common part of networks that read the target's states: `fc`, a norm and a head. `fc` joins the states of
    several layers. A subclass defines `add_layers` and calls `post_init` at the end of its `__init__`."""

    config_class: Any = EagleConfig
    base_model_prefix = ""
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(len(config.layers) * width, width, bias=False)
        self.add_layers(config)
        self.norm = Norm(width, config.rms_norm_eps)
        self.markov_head: MarkovHead | None = None  # of the kinds that have one
        self.lm_head: Any = self.new_head(config)
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.scale = config.head_dim**-0.5
        self.pruned = config.draft_vocab_size < config.vocab_size
        if self.pruned:  # token i of the draft is the target's i + d2t[i]
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def add_layers(self, config: EagleConfig) -> None:
        """Add the modules between `fc` and the norm."""
        raise NotImplementedError(f"{type(self).__name__}.add_layers")

    def new_head(self, config: EagleConfig) -> Any:
        """Return an untrained head, a module from states (..., H) to logits (..., Vd); None if the network has none."""
        return projection(config.hidden_size, config.draft_vocab_size, config.head_rank)

    def get_input_embeddings(self) -> Any:
        """Return None, since the network reads the target's embeddings."""
        return None

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:  # type: ignore[override]
        """Save the network in a folder, with the architecture name that serving engines load. options: as in
        transformers. save_directory: the folder."""
        super().save_pretrained(save_directory, **options)
        self.config.architectures = self.config.loaded_as
        self.config.save_pretrained(save_directory)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and not isinstance(module, FromZero):
            nn.init.normal_(module.weight, std=self.config.initializer_range)

    def fits(self, target: PreTrainedModel, where: str) -> None:
        """Raise ValueError if the target's sizes differ from the network's, if the target lacks a layer that the
        network reads, or if the ids of a pruned vocabulary are wrong. where: the start of the message."""
        same_sizes(self.config, target, where)
        layers = layers_of(target.config)
        if max(self.config.layers) >= layers:
            raise ValueError(
                f"{where}: it reads the states of layers {list(self.config.layers)}, but the target has only {layers} "
                "layers: give the target that the draft was trained for"
            )
        if self.pruned:
            refuse_ids(self.known, self.config.vocab_size, f"{where}: tensor d2t")
            if not self.t2d.is_meta and not torch.equal(self.t2d.nonzero()[:, 0], self.known.sort().values):
                raise ValueError(f"{where}: the tensors t2d and d2t name different tokens: export the draft again")

    def features(self, states: Mapping[int, Tensor]) -> Tensor:
        """Return the features (..., H) that `fc` makes of the target's states. states: by layer, (..., H); the layers
        are those of the config."""
        return self.fc(torch.cat([states[layer].to(self.dtype) for layer in self.config.layers], -1))

    def head(self, states: Tensor, vocabulary: int) -> Tensor:
        """Return logits (..., vocabulary) over the target's ids; tokens outside the draft's vocabulary get -inf. states
        (..., H): after `norm`."""
        return self.spread(self.lm_head(states), vocabulary)

    def spread(self, logits: Tensor, vocabulary: int) -> Tensor:
        """Return logits (..., vocabulary) over the target's ids; tokens outside the draft's vocabulary get -inf. logits
        (..., Vd): over the draft's own tokens."""
        if not self.pruned:
            return logits[..., :vocabulary]
        size = max(vocabulary, self.config.vocab_size)  # the draft's vocabulary may have ids of the target's padding
        return spread_logits(logits, self.known, size)[..., :vocabulary]

    def own_logits(self, states: Tensor, vocabulary: int) -> Tensor:
        """Return logits (..., Vd) over the draft's own tokens; tokens whose target id is not below `vocabulary` get
        -inf. states (..., H): after `norm`."""
        logits: Tensor = self.lm_head(states)
        if self.pruned and vocabulary < self.config.vocab_size:
            return logits.masked_fill(self.known >= vocabulary, -torch.inf)
        return logits if self.pruned else logits[..., :vocabulary]

    def target_ids(self, ids: Tensor) -> Tensor:
        """Return the target's ids (...) of the draft's own tokens. ids (...): numbers of tokens in the draft's
        vocabulary."""
        return ids + self.d2t[ids] if self.pruned else ids

    def target_probs(self, probs: Tensor, vocabulary: int) -> Tensor:
        """Return distributions (..., vocabulary) over the target's ids. probs (..., Vd): over the draft's own
        tokens."""
        if not self.pruned:
            return probs
        return spread_probs(probs, self.known, max(vocabulary, self.config.vocab_size))[..., :vocabulary]

    def term(self, vocabulary: int) -> Term | None:
        """Return a function from the ids (...) of the preceding tokens to the terms (..., vocabulary) that the Markov
        head adds to the next token's logits. Return None without such a head."""
        markov = self.markov_head
        return None if markov is None else lambda ids: self.spread(markov(ids), vocabulary)

    @property
    def known(self) -> Tensor:
        """Return the target's ids (Vd,) of the tokens in the draft's vocabulary."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @torch.no_grad()
    def know(self, ids: Sequence[int], rows: Tensor | None = None) -> None:
        """Set the draft's vocabulary, in place. ids: Vd target ids, in ascending order. rows (V, H): the weight of a
        head for all target ids; its rows for these ids become the draft's head. None to keep the head."""
        chosen = torch.tensor(list(ids), device=self.lm_head.weight.device)
        self.d2t.copy_(chosen - torch.arange(len(chosen), device=chosen.device))
        self.t2d.zero_()[chosen] = True
        if rows is not None:
            fill(self.lm_head, rows[chosen.to(rows.device)].to(chosen.device))

    def lower_head(self, rank: int) -> None:
        """Replace a full-rank head by the nearest product of this rank, in place. Raises ValueError for a rank above
        the smaller size of the head."""
        whole = self.lm_head.weight.detach()
        head = projection(self.config.hidden_size, len(whole), rank).to(whole.device, whole.dtype)
        fill(head, whole)
        self.lm_head, self.config.head_rank = head, rank

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin (..., 1, D) of the rotary angles at positions (...). `sin` already has the signs that
        `rotated` needs."""
        size, factor = self.config.head_dim, 1.0
        if (scaling := self.config.rope_parameters["rope_type"]) == "default":
            steps = torch.arange(0, size, 2, device=positions.device, dtype=torch.float64) / size
            frequencies = self.config.rope_theta**-steps
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[scaling](self.config, positions.device)
        turns = positions.double().unsqueeze(-1) * frequencies
        cos, sin = (part.mul(factor).to(self.dtype).unsqueeze(-2) for part in (turns.cos(), turns.sin()))
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class EagleNetwork(FeatureNetwork):
    """The network of a feature draft: one decoder layer over pairs."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.post_init()

    def add_layers(self, config: EagleConfig) -> None:
        self.midlayer = _Layer(config)

    def layer(self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return the decoder layer's output (A, n, H). After `norm`, `head` reads it. It also serves as the next pair's
        features if the target has none yet.

        embedded, features (A, n, H): the two parts of each pair. cos, sin (A or 1, n, 1, D): of the rotary angles of
        the pairs' positions. attend: the attention function, from queries, keys and values (A, n, heads, D) to (A, n,
        heads D).
        """
        w = self.midlayer
        normed, size = w.hidden_norm(features), self.config.head_dim
        x = torch.cat((w.input_layernorm(embedded), normed), -1)
        q, k, v = (part.unflatten(-1, (-1, size)) for part in w.self_attn(x))
        residual = normed if self.config.norm_before_residual else features
        x = residual + w.self_attn.o_proj(attend(rotated(q, cos, sin), rotated(k, cos, sin), v))
        return x + w.mlp(w.post_attention_layernorm(x))

    def of_kernel(self, int8: bool) -> list[Tensor] | None:
        """Return what `llama.of_kernel` returns, for the decoder layer; None if it cannot run there. Its weights become
        views of joined ones, in place. int8: whether copies are rounded to 8 bits."""
        w = self.midlayer
        if self.config.norm_before_residual:
            return None
        attention, mlp = w.self_attn, w.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        products = (qkv, (attention.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,))
        layer = llama.packed_layer(w.hidden_norm.weight, w.post_attention_layernorm.weight, products, int8)
        return llama.of_kernel([layer], self.norm.weight.data)


class Norm(nn.RMSNorm):
    """An RMS norm that computes in the dtype of its weight (float32 in mixed-precision training) and returns the
    input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class _Layer(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm = Norm(width, eps), Norm(width, eps)
        self.self_attn = Projections(config)
        self.post_attention_layernorm = Norm(width, eps)
        self.mlp = Gated(width, config.intermediate_size)


class Projections(nn.Module):
    """The projections of an attention that reads `inputs` joined vectors (H,)."""

    def __init__(self, config: EagleConfig, inputs: int = 2) -> None:
        super().__init__()
        width, size = config.hidden_size, config.head_dim
        heads, groups = config.num_attention_heads * size, config.num_key_value_heads * size
        self.q_proj = nn.Linear(inputs * width, heads, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(inputs * width, groups, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(heads, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class Gated(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (A, n, heads, D) rotated by the angles of its positions. cos, sin (A or 1, n, 1, D): of these angles;
    `sin` has the signs that `FeatureNetwork.angles` gives it."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class PairSlots(NamedTuple):
    """The cache slots of pairs: S slots per row. shape: sizes of the attention. cos, sin (S, 1, D): angles of all
    positions. keys, values: for each layer, (rows, G, S, D), with G heads of keys and values."""

    shape: llama.ModelShape
    cos: Tensor
    sin: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin (A, n, 1, D) of the rotary angles at positions (A, n)."""
        return self.cos[positions], self.sin[positions]

    def mask(self, window: Window) -> Tensor:
        """Return the attention mask (A, 1, n, limit) of a window, to be added to the attention scores."""
        return additive(visible(window, window.positions.device), self.shape.held)

    def attend(self, layer: int, window: Window, mask: Tensor) -> Attend:
        """Return the attention function of a layer (0-based). The function stores new keys and values in the window's
        slots, then reads the slots up to the window's limit. mask (A, 1, n, limit): added to the attention scores."""
        held, rows = self.shape.held, slice(window.low, window.high)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.store(layer, window, k, v)
            stored = self.keys[layer][rows, :, : window.limit], self.values[layer][rows, :, : window.limit]
            return attention(mask, self.shape)(q.to(held).transpose(1, 2), *stored).to(q.dtype)

        return attend

    def store(self, layer: int, window: Window, k: Tensor, v: Tensor) -> None:
        """Write the keys k and values v (A, n, G, D) of a layer (0-based) to the window's slots."""
        row = torch.arange(window.low, window.high, device=k.device).unsqueeze(1)
        for slots, new in ((self.keys[layer], k), (self.values[layer], v)):
            slots.transpose(1, 2).index_put_((row, window.slots), new.to(self.shape.held))


class EagleDrafting(nn.Module):
    """Drafts a round, as a function of tensors. embedding: the target's embedding. shape: sizes of the attention.
    vocabulary: number of the target's ids. branching: the trees to draft, None for chains. greedy: whether to draft the
    likeliest tokens. network: makes the drafts."""

    def __init__(
        self,
        network: Any,
        embedding: nn.Module,
        shape: llama.ModelShape,
        vocabulary: int,
        branching: StaticTrees | None,
        greedy: bool,
    ) -> None:
        super().__init__()
        self.network, self.embedding, self.shape = network, embedding, shape
        self.vocabulary, self.branching, self.greedy = vocabulary, branching, greedy
        # whether draws among the draft's own tokens are those among all
        self.ordered = not network.pruned or bool((network.known.diff() > 0).all())
        self.known = network.known if network.pruned else torch.empty(0, dtype=torch.int64)
        self.flat: list[Tensor] | None = None  # the layer's weights, for `llama.in_kernel`

    def forward(self, round: Any, given: Mapping[str, Any], K: int) -> Drafts:
        """Return the drafts of K depths, (A, K) or (A, N) for trees, and their distributions (A, K or N, V). Drafts of
        chains are drawn among the tokens of the draft's vocabulary, unless the round reads the tokens' ids.

        given: tensors by name: the pairs that are not stored yet (`Eagle._given`), and the slots, angles, keys and
        values that the passes read (`Eagle._reads`).
        """
        ids, features, pairs, only = (given[name] for name in ("lacking", "features", "pairs", "only"))
        slots, limit = self.slots(given), given["slots"].shape[0]
        own, choose = self.ordered and not (self.branching or round.reads_ids), by_round(round, self.greedy)
        fast = own and self.chains and ids.shape[1] <= llama.SHORT and not round.decides
        if fast and (draws := round.chain_draws(K, self.greedy)):
            head = self.network.lm_head.product
            drafts, probs = torch.ops.inference.chain(
                *(ids, features, pairs, only, self.embedding.weight, self.network.midlayer.input_layernorm.weight),
                *(self.flat, slots.keys, slots.values, slots.cos, slots.sin, head.weight, head.exact, self.known),
                *(*draws, K, limit, head.outputs, *llama.of_shape(self.shape)),
            )
            return drafts, self.network.target_probs(probs, self.vocabulary)
        anchor = pairs + only
        window = Window(0, len(ids), behind(pairs, ids.shape[1]), None, limit)
        above, last = (picked_columns(part, only) for part in self.layer(slots, ids, features, window))

        def follow(ids: Tensor, nodes: Nodes) -> Tensor:
            nonlocal above, last
            window = draft_window(anchor, nodes, ids.shape[1], limit)
            above, last = self.layer(slots, ids, nodes.of_parents(above), window)  # outputs at that level
            return self.logits(last, own)

        def chosen(logits: Tensor, drafts: list[Tensor]) -> Drafts:
            ids, probs = choose(logits, drafts)
            return self.network.target_ids(ids), probs

        logits = self.logits(last, own)[:, 0]
        if self.branching:
            return self.branching.grown(round, K, logits, follow, self.greedy)
        x, q = one_by_one(K, logits, follow, chosen if own else choose, round.goes_on)
        return x, self.network.target_probs(q, self.vocabulary) if own else q

    @property
    def chains(self) -> bool:
        """Return whether one operator of `kernels.cpp` can draft a chain."""
        head, whole = self.network.lm_head, self.vocabulary >= self.network.config.vocab_size
        plain = type(self.embedding) is nn.Embedding and not llama.hooked(self.embedding)
        plain = plain and self.embedding.max_norm is None
        packed = isinstance(head, llama.PackedLinear) and isinstance(head.product, packing.Widened)
        return self.flat is not None and packed and plain and whole

    def slots(self, given: Mapping[str, Any]) -> PairSlots:
        return PairSlots(self.shape, *(given[name] for name in ("cos", "sin", "keys", "values")))

    def layer(self, slots: PairSlots, ids: Tensor, features: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Return the decoder layer's output (A, n, H) for pairs of ids (A, n) and features (A, n, H), and the output
        after `norm`, which the head reads. This writes the pairs' keys and values to the window's slots, and reads the
        slots up to the window's limit. slots: the cache slots of all pairs. window: which slots the pass writes and
        reads."""
        embedded, mask = self.embedding(ids).to(features.dtype), slots.mask(window)
        angles = slots.angles(window.positions)
        if self.flat is not None and ids.shape[1] <= most_ids(window):
            stored, norm = (slots.keys, slots.values), self.network.midlayer.input_layernorm.weight
            where = window.slots, mask, window.limit, window.low, (1, LAST)
            states = llama.in_kernel(features, self.flat, self.shape, angles, stored, *where, (embedded, norm))
            return states[1], states[LAST]
        output = self.network.layer(embedded, features, *angles, slots.attend(0, window, mask))
        return output, self.network.norm(output)

    def store(self, slots: PairSlots, ids: Tensor, features: Tensor, window: Window) -> None:
        """Store the keys and values of pairs, in the slots of `window`. The arguments are those of `layer`."""
        self.layer(slots, ids, features, window)

    def logits(self, states: Tensor, own: bool = False) -> Tensor:
        """Return logits (A, n, V), or (A, n, Vd) over the draft's own tokens if `own`. states (A, n, H): after
        `norm`."""
        head = self.network.own_logits if own else self.network.head
        return head(states, self.vocabulary)


FIRST_SLOTS, CHUNK = 256, 512  # slots at first; pairs of a prompt that are stored at once


class Eagle(Proposer):
    """A proposer that drafts with an `EagleNetwork`. The network must have been trained for the engine's target. It
    runs on the target's device.

    A text of one token gets no drafts, since the target has read no token yet. greedy: whether to draft the likeliest
    tokens, with one-hot distributions. int8: whether the weights are rounded to 8 bits, for a network in float32 that
    `packing.serves`; q is then the distribution of the rounded network. shape: the tree to draft, as the parent of each
    node (-1 for the text); None for chains."""

    network_class: Any = EagleNetwork
    drafts_trees = True
    one_pass = False  # whether one pass drafts all tokens of a round, at most as many as in training
    network: Any
    drafting: type[EagleDrafting] = EagleDrafting

    def __init__(
        self,
        network: FeatureNetwork,
        greedy: bool = False,
        *,
        int8: bool = False,
        shape: TreeShape = None,
    ) -> None:
        self.network, self.greedy, self.int8 = network.eval(), greedy, int8
        self.served: Any = network  # with rounded or packed weights, once it is open
        self.branching = trees_of(shape)
        self.reads = tuple(sorted({*network.config.layers}))
        self.depths = network.config.depths if self.one_pass else None
        self.host: Host | None = None
        self.stamp: Stamp  # of the network
        self.stored: list[int] = []  # pairs of each row that its slot holds
        self.waiting: list[int] = []  # pairs after the stored ones, whose features are in `features`
        self.longest = 0  # drafts of a graph, the same number each time
        self.prepare()

    def prepare(self) -> None:
        """Set what a kind needs besides, from its network. Raises ValueError for a network of another kind."""

    @classmethod
    def load(cls, folder: Path, arguments: LoadArguments) -> "Eagle":
        """Return a proposer for a folder in the EAGLE-3 format. Raises FileNotFoundError if the folder does not exist,
        and ValueError if its files or weights are damaged or if the network does not fit the target."""
        draft = cls.load_network(folder, arguments)
        network = cast(EagleNetwork, packing.widened_draft(draft))
        return cls(network, arguments.greedy, int8=arguments.int8 and packing.serves(network), shape=arguments.shape)

    @classmethod
    def fits(cls, network: Any, target: PreTrainedModel, where: str) -> None:
        network.fits(target, where)

    @property
    def asks(self) -> bool:
        # to end a round after some drafts of one pass would save nothing of it
        return not self.one_pass and self.branching is None and not self.replay.records

    @property
    def weights(self) -> str:
        return "int8" if self.int8 else str(self.network.dtype).removeprefix("torch.")

    def open(self, host: Host) -> None:
        config, device = self.network.config, host.target.device
        if self.branching:
            self.branching.require(host.vocabulary, self.depths)
        held = self.network.dtype if device.type == "cuda" else torch.promote_types(self.network.dtype, torch.float32)
        if host != self.host or not self.stamp.holds(self.network):  # slots last from call to call
            self.host, rows = host, host.rows + host.spare
            packs = packing.can_pack(self.network) and self.network.dtype == torch.float32
            self.int8 = self.int8 and packs and packing.has_kernels()
            # first, since it moves weights, which are stamped and shared after it
            flat = self.network.of_kernel(self.int8) if packs and isinstance(self.network, EagleNetwork) else None
            self.served = llama.packed_copy(self.network, self.int8) if packs else self.network
            copies = self.served is not self.network
            self.stamp = Stamp(self.network, addresses=True, values=copies)  # recordings read it
            self.embedding = host.target.model.get_input_embeddings()
            self.shape = llama.ModelShape(
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                self.network.scale,
                config.rms_norm_eps,
                held,
            )
            self.cache = SlotCache(config.num_hidden_layers, rows, min(FIRST_SLOTS, host.context), host.context)
            self.cache.before_growth(self._forget)
            self.plain, self.replay = Replay(self.network), replay_of(self.network, host.target.graphs)
            trees, greedy = self.branching, self.greedy
            self.module = self.drafting(self.served, self.embedding, self.shape, host.vocabulary, trees, greedy)
            self.module.flat = flat
            self._forget()
        self.features = self.network.fc.weight.new_zeros(host.rows + host.spare, 1, config.hidden_size)
        self.stored, self.waiting, self.longest = [], [], 0

    def _forget(self) -> None:
        """Drop slots, angles and recordings, which depend on the number of slots."""
        self.slots: dict[str, Any] = {}
        self.replay.drop()

    @property
    def features_device(self) -> torch.device:
        return self.network.fc.weight.device

    def stage(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        """Store every pair of each prompt except the last one, in slots low, low + 1, ... The last pair's features are
        kept for the first round. states: by layer, the target's states (A, n, H) at the prompts' tokens, column j for
        token j."""
        A, features = len(prompts), self._features(states)
        width = features.shape[1]
        ids = [prompt[1:] + prompt[-1:] * (width + 1 - len(prompt)) for prompt in prompts]
        every = torch.arange(width, device=features.device).expand(A, width)
        for begin in range(0, width, CHUNK):
            part = slice(begin, begin + CHUNK)
            here = torch.tensor([one[part] for one in ids], device=features.device)
            limit = begin + here.shape[1]
            slots, window = self._reads(limit), Window(low, low + A, every[:, part], None, limit)
            self.module.store(self.module.slots(slots), here, features[:, part], window)
        last = torch.tensor([max(len(prompt) - 2, 0) for prompt in prompts], device=features.device)
        self.features[low : low + A, 0] = picked_columns(features, last)[:, 0] if width else 0.0

    def admit(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        self.stage(low, prompts, states)
        for prompt in prompts:
            self._begin(prompt)

    def enter(self, source: int, target: int, prompt: list[int]) -> None:
        self._begin(prompt)
        self._copy(source, target)

    def _begin(self, prompt: list[int]) -> None:
        self.stored.append(max(len(prompt) - 2, 0))
        self.waiting.append(min(len(prompt) - 1, 1))

    def _features(self, states: States) -> Tensor:
        """Return the features (A, n, H) of the target's states. states: by layer, (A, n, H). Numbers that are not
        finite become 0, so that no slot contains NaN. Rows with such numbers end, or get no drafts."""
        return self.served.features(states).nan_to_num(0.0, 0.0, 0.0)

    def propose(self, round: Round) -> Proposal:
        """Return the drafts of a round, at most round.k[b] for row b. Rows whose text has one token get none."""
        pairs = [len(text) - 1 for text in round.texts]
        lacking = [one - stored for one, stored in zip(pairs, self.stored, strict=True)]
        most = self.depths or max(round.k)
        k = [min(k, most) if one else 0 for k, one in zip(round.k, pairs, strict=True)]
        self.longest = max(self.longest, *k)
        if not max(k):
            return Proposal.empty(k, self.features_device)
        shape, longest, wanted = self.branching, self.longest, max(k)
        if shape:
            longest, wanted = min(longest, shape.depth), min(wanted, shape.depth)
        replay = self.replay if self.replay.ready and max(lacking) <= self.longest + 1 else self.plain
        width, K = replay.width(max(*lacking, 1), (self.longest + 1,)), replay.depth(wanted, longest)
        given, reads = self._given(round, k, lacking, width), self._reads(max(self.stored) + width + self._room_for(K))
        x, q = replay.of_round(
            round, ("draft",), given, self.module, wanted, K, reads, greedy=self.greedy, trees=bool(shape)
        )
        self.stored, self.waiting = pairs, [0] * len(k)
        return shape.proposal(k, x, q) if shape else Proposal(x[:, : max(k)], q[:, : max(k)], k)

    def _room_for(self, K: int) -> int:
        """Return the number of cache slots that a round of K depths needs after the pairs of its text."""
        return self.branching.counts[-1] if self.branching else K

    def _given(self, round: Round, k: list[int], lacking: list[int], width: int) -> dict[str, Tensor]:
        """Return the inputs of a round, for the pairs that are not stored yet: `lacking` (A, width), the ids of their
        second tokens; `features` (A, width, H); `pairs` (A,), the position of the first such pair; and `only` (A,), the
        column of the last one. Columns after it are padding. k: drafts per row. lacking: for each row, the number of
        these pairs. width: the number of columns."""
        tails = [text[-max(one, 1) :] for text, one in zip(round.texts, lacking, strict=True)]
        ids = [tail + tail[-1:] * (width - len(tail)) for tail in tails]
        shape, only = self.branching, [max(one - 1, 0) for one in lacking]
        sent = round.send(shape.nodes(k) if shape else k, lacking=ids, pairs=self.stored, only=only)
        self._room(width)
        given = {name: sent[name].to(self.features_device) for name in ("lacking", "pairs", "only")}
        return given | {"features": self.features[: len(k), :width]}

    def _reads(self, limit: int) -> dict[str, Any]:
        """Make room for `limit` cache slots. Return the tensors that rounds read in place: the numbers of the slots to
        read, the angles of all positions, and keys and values."""
        self.cache.aim(Window(0, 0, torch.empty(0, 1), None, limit))
        if not self.slots or len(self.slots["cos"]) < self.cache.slots:  # new slots; a copy is not told
            with torch.no_grad():
                numbers = torch.arange(self.cache.slots, device=self.features_device)
                cos, sin = self.network.angles(numbers)
            like, stores = torch.empty(0, dtype=self.shape.held, device=self.features_device), self.cache.stores
            self.cache.allocate(self.shape.groups, self.shape.size, like)
            keys, values = [one.keys for one in stores], [one.values for one in stores]
            self.slots = {"cos": cos, "sin": sin, "keys": keys, "values": values, "slots": numbers}
        return self.slots | {"slots": self.slots["slots"][: self.replay.slots(limit, self.cache.slots)]}

    def commit(self, outcome: Outcome) -> None:
        new = self._features(outcome.states)
        A, width = new.shape[:2]
        self._room(max(self.waiting) + width)
        if any(self.waiting):  # after rounds without drafts
            row = torch.arange(A, device=new.device).unsqueeze(1)
            columns = torch.tensor(self.waiting, device=new.device).unsqueeze(1)
            self.features[row, columns + torch.arange(width, device=new.device)] = new
        else:
            self.features[:A, :width] = new
        self.stored = [max(min(stored, valid - 1), 0) for stored, valid in zip(self.stored, outcome.valid, strict=True)]
        self.waiting = [max(valid - stored, 0) for stored, valid in zip(self.stored, outcome.valid, strict=True)]
        for slot, valid in enumerate(outcome.valid):
            if valid == 0:
                self.cache.clear(slot)

    def _room(self, width: int) -> None:
        """Make room for the features of `width` pairs per row."""
        rows, held, size = self.features.shape
        if width > held:
            wider = self.features.new_zeros(rows, max(width, 2 * held), size)
            wider[:, :held] = self.features
            self.features = wider

    def move(self, source: int, target: int) -> None:
        if source != target:
            self.stored[target], self.waiting[target] = self.stored[source], self.waiting[source]
            self._copy(source, target)
            self.cache.clear(source)  # it may contain NaN past the text
        self.stored.pop()
        self.waiting.pop()

    def _copy(self, source: int, target: int) -> None:
        """Copy a row's state from slot `source` to slot `target`. The row's entry in `stored` is already at
        `target`."""
        self.cache.move(source, target, self.stored[target])
        self.features[target] = self.features[source]


def draft_window(anchor: Tensor, nodes: Nodes, n: int, limit: int) -> Window:
    """Return the window of the pairs of n drafts per row. anchor (A,): cache slot of each text's last pair. nodes: the
    depth and the tree of these drafts. limit: number of cache slots to read."""
    if nodes.tree is None:
        return Window(0, len(anchor), anchor.unsqueeze(1) + nodes.depth, None, limit)
    return replace(tree_window(nodes.tree.on(anchor.device), n, anchor, 0), limit=limit)
