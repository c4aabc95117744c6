"""A feature draft (EAGLE-3, Li et al. 2025, 2503.01840), which is trained in the way in which it drafts. The first
draft of a round reads features of the target; each later one also reads the draft's own outputs ("training-time test").

A pair joins the feature of a token and the embedding of the next token, see `inference.proposers.eagle`. A round whose
first new token is m + 2 has the target's features of tokens 0 .. m. Its guess at depth j (0-based), at position m + 1 +
j, is computed from the target's pairs 0 .. m and from j pairs of the draft. All rounds of a text, one for each m, are
computed together.

B texts, T tokens, H width, V vocabulary, N guesses at a depth, n rounds of a text.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel

from cotrain.config.drafts import Draft
from cotrain.config.groups import Init
from cotrain.losses.guess import Pruned, chosen, numbers, sent
from cotrain.students.base import Guess, Seen, Student
from cotrain.students.independent import plain_tensors, pretrained_network, refuse_sizes
from cotrain.students.markov import after_tokens
from inference.drafts.published import fused
from inference.models import packing
from inference.models.pretrained import head_weight, length_of, special_ids
from inference.models.small_heads import fill
from inference.proposers import kind_of
from inference.proposers.eagle import EagleNetwork, FeatureNetwork

INNER_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")  # config keys
PARTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "post_attention_layernorm",
)

# of a config -> the setting
KEYS = {"num_hidden_layers": "layers", "causal": "mask", "markov_rank": "markov", "target_head": "head"}
WORDS = {"causal": ("bidirectional", "causal"), "target_head": ("own", "target")}  # what false and true are as settings
JUDGED = 8  # evaluate at least this many depths, since served rounds may be longer than those in training


class EagleStudent(Student):
    """Trains the draft that `inference.proposers.eagle` serves. Raises ValueError if the network has another
    class."""

    kind = "eagle"
    features: tuple[str, ...] = ("eagle3", "speculators")

    network: Any  # a FeatureNetwork
    target: PreTrainedModel
    vocabulary: int

    def prepare(self) -> None:
        network, network_class = self.network, kind_of(self.kind).network_class
        if not isinstance(network, network_class):
            raise ValueError(
                f"draft.kind: {self.kind} drafts need their target and a network of class "
                f"{network_class.__name__}, not {type(network).__name__}"
            )
        self.vocabulary = self.vocabulary or network.config.vocab_size
        self.reads = tuple(sorted({*network.config.layers}))

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Return the network before training. Raises ValueError, which names the key to change.

        init=scratch: random weights. init=target_layers: the target's norm and head are copied, and the last of
        init.layers=, so that the draft reads the target's highest features. init=pretrained: the EAGLE-3 folder
        draft.path= is loaded.
        """
        _refuse_settings(draft, target)
        if init.kind == "pretrained":
            return cls._continued(draft, target)
        network_class: Any = kind_of(cls.kind).network_class
        chosen = {name: value for name, value in cls.settings_of(draft).items() if value is not None}
        config = network_class.config_class(**cls.sizes(draft, init, target), **chosen)
        network: EagleNetwork = network_class(config)
        if network.pruned:  # the first ids, until `know` has counts of texts
            network.know(range(network.config.draft_vocab_size))
        if init.kind == "target_layers":
            cls.copy_layers(network, target, init.layers)
        if network.lm_head is not None and (init.kind == "target_layers" or draft.head_rank):
            rows = head_weight(target)
            fill(network.lm_head, rows[network.known] if network.pruned else rows)
        return network

    @classmethod
    def sizes(cls, draft: Draft, init: Init, target: PreTrainedModel) -> dict[str, Any]:
        """Return the sizes and special ids of the draft, as entries of the network's config, for every kind that reads
        the target's states."""
        return sizes_of(draft, target, init.kind == "target_layers")

    @classmethod
    def settings_of(cls, draft: Draft) -> dict[str, Any]:
        """Return the entries of the network's config that only this kind has. An entry is None if its setting is
        null."""
        return {}

    @classmethod
    def copy_layers(cls, network: Any, target: PreTrainedModel, layers: list[int]) -> None:
        """Copy the last of the target's `layers` and the target's last norm into the network, in place. The copied
        layer reads the target's highest features and ignores the embedding."""
        norm = copy_layer(network.midlayer, target, layers)
        copy_ends(network, network.midlayer.hidden_norm, norm, target)

    @classmethod
    def loaded(cls, draft: Draft, target: PreTrainedModel) -> Any:
        """Return the network in draft.path=, see `pretrained_network`."""
        return pretrained_network(cls, draft, target)

    @classmethod
    def _continued(cls, draft: Draft, target: PreTrainedModel) -> EagleNetwork:
        """Return the network in draft.path=. If draft.head_rank= is set, a whole head is replaced by the nearest head
        of this rank. Raises ValueError if the folder's vocabulary does not have draft.vocabulary= tokens, or if its
        head has another rank."""
        network: EagleNetwork = cls.loaded(draft, target)
        known, rank = network.config.draft_vocab_size, network.config.head_rank
        if draft.vocabulary not in (None, known):
            raise ValueError(
                f"draft.vocabulary={draft.vocabulary}: draft.path={draft.path} has {known} tokens; "
                "set draft.vocabulary=null"
            )
        if rank is None and draft.head_rank:
            network.lower_head(draft.head_rank)
        elif draft.head_rank not in (None, rank):
            raise ValueError(
                f"draft.head_rank={draft.head_rank}: draft.path={draft.path} has a head of rank {rank}; "
                "set draft.head_rank=null"
            )
        network.config.depths = draft.depths
        refuse_other(network, draft, cls.settings_of(draft))
        return network

    def refuse(self) -> None:
        """Raise ValueError if the network was made for another width, or for layers that the target does not have."""
        self.network.fits(self.target, "draft")

    @property
    def known(self) -> Tensor:
        if self.network.pruned:
            return self.network.t2d[: self.vocabulary]
        return super().known

    @property
    def pruned(self) -> Pruned | None:
        """Return the part of a pruned head that has finite logits, or None for a whole vocabulary."""
        network = self.network
        return self.pruned_to(network.known, network.lm_head, self.vocabulary) if network.pruned else None

    def know(self, counts: Tensor) -> None:
        """Choose the most frequent tokens as the draft's vocabulary, and copy their rows from the target's head, in
        place. counts (V,): how often each id occurs in the texts."""
        if self.network.pruned:
            top = counts[: self.vocabulary].topk(self.network.config.draft_vocab_size).indices
            self.largest = None
            self.network.know(sorted(top.tolist()), head_weight(self.target))

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        network, ids = self.network, batch["ids"]
        rounds = EagleRounds(ids, batch.get("position_ids"), network.device)
        features, attention = network.features(seen.states), RoundAttention(network.groups, network.scale)
        guesses, pruned = [], self.pruned
        depths = network.config.depths if torch.is_grad_enabled() else max(network.config.depths, JUDGED)
        for depth in range(min(depths, ids.shape[1] - 1)):
            count = ids.shape[1] - 1 - depth
            embedded = self.embedded(ids[:, depth + 1 :])
            attend = attention.at(depth, rounds.sees[:, :count])
            angles = network.angles(rounds.positions[:, :count] + depth)
            features = network.layer(embedded, features[:, :count], *angles, attend)
            at, inside = places(ids, rounds.packed, depth + 1)
            states = chosen(network.norm(features), inside)
            guesses.append(Guess(depth, at, states, self.head, tuple(network.lm_head.parameters()), pruned=pruned))
        return guesses

    def embedded(self, ids: Tensor) -> Tensor:
        """Return the target's embeddings (B, n, H) for ids (B, n), in the draft's dtype."""
        with torch.no_grad():
            embedded: Tensor = self.target.get_input_embeddings()(sent(ids, self.network.device))
        return embedded.to(self.network.fc.weight.dtype)

    def after_tokens(self, guesses: list[Guess], ids: Tensor) -> list[Guess]:
        """Return the guesses with the Markov head's term added to their logits; the same guesses if the network has no
        Markov head. The term depends on the token before the guess, which is read from the texts ids (B, T)."""
        network, vocabulary = self.network, self.vocabulary
        return after_tokens(guesses, ids, network.markov_head, lambda logits: network.spread(logits, vocabulary))

    def head(self, states: Tensor) -> Tensor:
        return self.network.head(states, self.vocabulary)

    @classmethod
    def takes_int8(cls, network: Any) -> bool:
        return packing.serves(network)


class EagleRounds:
    """The rounds of texts, one for each position m = 0 .. T-2, the newest token whose feature the round has.

    ids (B, T). position_ids (B, T): only if texts are packed; a round then reads and drafts only its own text. Both are
    on the CPU; tensors for networks are on `device`.
    positions (B, T-1): the position of each pair in its text.
    text (B, T), on the CPU: the number of each token's text within its row. packed: the same; None unless texts are
    packed.
    sees (B, T-1, T-1) bool: entry [b, m, s] is whether round m reads the target's pair s.
    """

    def __init__(self, ids: Tensor, position_ids: Tensor | None, device: torch.device) -> None:
        every = torch.arange(ids.shape[1])
        positions = every.expand(ids.shape) if position_ids is None else position_ids
        self.text = segments(positions)
        self.packed = None if position_ids is None else self.text
        self.positions, of, before = (sent(one, device) for one in (positions[:, :-1], self.text[:, :-1], every[:-1]))
        self.sees = (of.unsqueeze(2) == of.unsqueeze(1)) & (before <= before.unsqueeze(1))


def places(ids: Tensor, text: Tensor | None, gap: int) -> tuple[Tensor, Tensor | None]:
    """Return the guesses of one depth, as two CPU tensors. Round m = 0 .. T-1-gap of a row guesses at position t = m +
    gap, if this is in its own text. First (N,): flat positions b * T + t; the guess there predicts token t + 1. Second
    (N,): the round of each guess, as index b * (T - gap) + m; None unless texts are packed: then all rounds guess.

    ids (B, T). text (B, T), on the CPU: the number of each token's text within its row; None unless texts are packed.
    gap: 0 or more.
    """
    at = torch.arange(ids.numel()).view(ids.shape)[:, gap:]
    inside = None if text is None else numbers(text[:, : -gap or None] == text[:, gap:])
    return chosen(at, inside), inside


def segments(position_ids: Tensor) -> Tensor:
    """Return (B, T): the number of each token's text within its row, from 0 on. A text begins at each position id that
    does not follow the one before it. position_ids (B, T): the position of each token in its text."""
    begins = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return pad(begins.cumsum(1), (1, 0))


class RoundAttention:
    """Attention for all rounds of a batch. At each depth, a round attends to the target's pairs before it and to its
    own pairs drafted so far.

    groups: number of query heads per key head. scale: of the scores.
    """

    def __init__(self, groups: int, scale: float) -> None:
        self.groups, self.scale = groups, scale
        self.cache: list[tuple[Tensor, Tensor]] = []  # for each depth, keys and values (B, heads, n, D)

    def at(self, depth: int, sees: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return the attention at a depth (0-based), as a function from queries, keys and values (B, n, heads, D) to
        outputs (B, n, heads * D). Depths must be asked for in order from 0 on, since each call stores its keys and
        values. sees (B, n, T-1) bool: whether each round reads each of the target's pairs."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            k, v = (part.repeat_interleave(self.groups, 1) for part in (k, v))  # for the query heads of each group
            self.cache.append((k, v))
            return self._attended(q * self.scale, depth, sees).transpose(1, 2).flatten(2)

        return attend

    def _attended(self, q: Tensor, depth: int, sees: Tensor) -> Tensor:
        """Return the attention output (B, heads, n, D) of queries q (B, heads, n, D) at a depth (0-based). The softmax
        is over the target's pairs and the round's own pairs. sees (B, n, T-1) bool: whether each round reads each of
        the target's pairs."""
        (keys, values), *later = self.cache
        own = [(k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]) for k, v in later]
        scores = (q @ keys.transpose(2, 3)).masked_fill(~sees.unsqueeze(1), -torch.inf)
        mine = [(q * k).sum(-1, keepdim=True) for k, _ in own]
        share = torch.cat((scores, *mine), -1).softmax(-1)
        theirs, *each = share.split([keys.shape[2], *[1] * depth], -1)
        return sum((w * v for w, (_, v) in zip(each, own, strict=True)), theirs @ values)


def _refuse_settings(draft: Draft, target: PreTrainedModel) -> None:
    """Raise ValueError if draft.depths is null, or if draft.vocabulary or draft.head_rank exceeds the target's
    sizes."""
    size = target.config.get_text_config().vocab_size
    if draft.depths is None:
        raise ValueError(
            f"draft.depths=null: set how many drafts per round the {draft.kind} draft is trained for, for example "
            "draft.depths=6"
        )
    refuse_sizes(draft, size, target.config.get_text_config().hidden_size)


def refuse_other(network: PreTrainedModel, draft: Draft, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a setting differs from the config of the network that was loaded from draft.path=. settings:
    value by name of the config's entry; None is not compared."""
    for name, value in settings.items():
        if value is not None and value != getattr(network.config, name):
            key, own = KEYS[name], getattr(network.config, name)
            own = WORDS[name][own] if name in WORDS else own
            raise ValueError(
                f"draft.{key}={getattr(draft, key)}: the weights in draft.path={draft.path} are for "
                f"draft.{key}={own}: set draft.{key}={own}"
            )


def sizes_of(draft: Draft, target: PreTrainedModel, like: bool) -> dict[str, Any]:
    """Return the draft's sizes and special ids as entries of its network's config. like: True gives the draft's layer
    the shape of the target's layers; False the shape that the settings draft.* say. Raises ValueError for a size that
    is then null."""
    theirs = target.config.get_text_config()
    if draft.intermediate is None or draft.head_dim is None or draft.kv_heads is None:
        raise ValueError(
            f"draft.intermediate, draft.head_dim, draft.kv_heads: {draft.kind} drafts need all three: set those "
            "that are null, for example draft.intermediate=512 draft.head_dim=64 draft.kv_heads=2"
        )
    width, rope = theirs.hidden_size, theirs.to_dict().get("rope_parameters") or {}
    heads = theirs.num_attention_heads if like else max(width // draft.head_dim, 1)
    layers = fused(theirs.num_hidden_layers)
    return {
        "hidden_size": width,
        "intermediate_size": inner_width(theirs) if like else draft.intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(theirs, "num_key_value_heads", heads) if like else min(draft.kv_heads, heads),
        "head_dim": (getattr(theirs, "head_dim", None) or width // heads) if like else draft.head_dim,
        "rms_norm_eps": getattr(theirs, "rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta", 10000.0),
        "max_position_embeddings": length_of(theirs),
        "vocab_size": theirs.vocab_size,
        "draft_vocab_size": draft.vocabulary,
        "head_rank": draft.head_rank,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "depths": draft.depths,
        **special_ids(theirs),
    }


def inner_width(config: PretrainedConfig) -> int:
    """Return the width inside a target's feed-forward layers, or 4 times the target's width if the config does not
    state it."""
    widths = [getattr(config, key, None) for key in INNER_WIDTHS]
    return int(next((width for width in widths if width), 4 * config.hidden_size))


@torch.no_grad()
def copy_layer(layer: nn.Module, target: PreTrainedModel, layers: list[int]) -> Tensor:
    """Copy the last of the target's `layers` into the draft's `layer`, in place. If a projection of the draft's layer
    has a wider input, the copied weights become its last columns, and its other columns become 0. Return the weight
    (H,) of the copied layer's first norm. Raises ValueError for a layer that the target does not have, or that does not
    fit."""
    count = target.config.get_text_config().num_hidden_layers
    if not layers or not -count <= layers[-1] < count:
        raise ValueError(
            f"init.layers={list(layers)}: the last number is not one of the target's {count} layers, 0 to "
            f"{count - 1}: set for example init.layers=[{count - 1}]"
        )
    source, prefix = plain_tensors(target), f"layers.{layers[-1] % count}."
    named = {name.partition(prefix)[2]: weight for name, weight in source.items() if prefix in name}
    for part in PARTS:
        ours, theirs = layer.get_parameter(f"{part}.weight"), named.get(f"{part}.weight")
        if theirs is None or theirs.shape[0] != ours.shape[0]:
            raise ValueError(
                f"init=target_layers: the target has no weight {prefix}{part} that fits the draft's layer: "
                "set init=scratch"
            )
        ours.zero_()[..., -theirs.shape[-1] :] = theirs
    if "input_layernorm.weight" not in named:
        raise ValueError(f"init=target_layers: the target has no weight {prefix}input_layernorm: set init=scratch")
    return named["input_layernorm.weight"]


@torch.no_grad()
def copy_ends(network: FeatureNetwork, hidden_norm: nn.Module, norm: Tensor, target: PreTrainedModel) -> None:
    """Copy the target's last norm into the network, in place, and set `fc` so that it returns the highest features.
    norm (H,): the weight for `hidden_norm`, which scales these features."""
    source, width = plain_tensors(target), network.config.hidden_size
    hidden_norm.get_parameter("weight").copy_(norm)
    network.fc.weight.zero_()[:, -width:] = torch.eye(width, device=network.fc.weight.device)
    norms = [weight for name, weight in source.items() if name.endswith(".norm.weight") and weight.shape == (width,)]
    if norms:
        network.norm.weight.copy_(norms[-1])
