"""A feature draft, trained as it drafts: on features of the target first, then on its own outputs (EAGLE-3, Li et al.
2025, 2503.01840, "training-time test").

A pair is a feature and the embedding of the next token, see `inference.proposers.eagle`. A round whose first
new token is m + 2 has features of tokens 0 .. m: its guess of depth j, at position m + 1 + j, is computed from pairs
0 .. m of the target's features and j pairs of its own. All rounds of a text, one for each m, are computed together.
B texts, T tokens, H width, n rounds a text.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cotrain.config.groups import Draft, Init
from cotrain.students.base import Guess, Seen, Student
from cotrain.students.independent import plain, pretrained_network
from inference.proposers import eagle, kind_of
from inference.proposers.eagle import EagleNetwork, fused

PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
         "mlp.down_proj", "post_attention_layernorm")  # fmt: skip

JUDGED = 8  # depths that are evaluated, at least: rounds may draft deeper than the depths that were trained


class EagleStudent(Student):
    """The student of `inference.proposers.eagle`."""

    kind = "eagle"
    takes = ("depths", "vocabulary")
    features = True

    network: EagleNetwork
    target: PreTrainedModel

    def __init__(
        self, network: PreTrainedModel, target: PreTrainedModel | None = None, vocabulary: int | None = None
    ) -> None:
        network_class: Any = kind_of(self.kind).network_class
        if target is None or not isinstance(network, network_class):
            raise ValueError(f"draft.kind: {self.kind} drafts are of {network_class.__name__} beside its target, not "
                             f"of {type(network).__name__}")  # fmt: skip
        super().__init__(network, target, vocabulary or network.config.vocab_size)
        self.reads = tuple(sorted({*network.config.layers}))

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """scratch: random; target_layers: the last of init.layers, on the highest features, and the target's norm and
        head; pretrained: a folder in the EAGLE-3 format, draft.path. Raises ValueError naming the wrong key."""
        _refuse_settings(draft, target)
        if init.kind == "pretrained":
            return cls._continued(draft, target)
        if init.kind not in ("scratch", "target_layers"):
            raise ValueError(
                f"init.kind: {init.kind!r} is none of scratch, target_layers, pretrained (with draft.path=)"
            )
        network_class: Any = kind_of(cls.kind).network_class
        config = network_class.config_class(**_sizes(draft, target, init.kind == "target_layers"))
        network: EagleNetwork = network_class(config)
        if network.pruned:  # until texts are counted
            network.know(range(network.config.draft_vocab_size))
        if init.kind == "target_layers":
            _copy_layer(network, target, init.layers)
        return network

    @classmethod
    def _continued(cls, draft: Draft, target: PreTrainedModel) -> EagleNetwork:
        """The network of draft.path. Raises ValueError if its vocabulary is not of draft.vocabulary tokens."""
        network: EagleNetwork = pretrained_network(cls, draft, target)
        known = network.config.draft_vocab_size
        if draft.vocabulary not in (None, known):
            raise ValueError(f"draft.vocabulary={draft.vocabulary}: draft.path={draft.path} knows {known} tokens; "
                             "draft.vocabulary=null")  # fmt: skip
        network.config.depths = draft.depths
        return network

    def refuse(self) -> None:
        """Raises ValueError for states of another width, and for layers that the target lacks."""
        self.network.fits(self.target, "draft")

    @property
    def known(self) -> Tensor:
        if self.network.pruned:
            return self.network.t2d[: self.vocabulary]
        return super().known

    def know(self, counts: Tensor) -> None:
        """Give a pruned vocabulary the most frequent tokens by counts (V,), with their rows of the target's head."""
        if self.network.pruned:
            top = counts[: self.vocabulary].topk(self.network.config.draft_vocab_size).indices
            self.network.know(sorted(top.tolist()), self.target.get_output_embeddings().weight)

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        network, ids = self.network, batch["ids"]
        rounds = EagleRounds(ids, batch.get("position_ids"))
        features, attention = network.features(seen.states), RoundAttention(network.groups, network.scale)
        guesses = []
        depths = network.config.depths if torch.is_grad_enabled() else max(network.config.depths, JUDGED)
        for depth in range(min(depths, ids.shape[1] - 1)):
            count = ids.shape[1] - 1 - depth
            embedded = self.embedded(ids[:, depth + 1 :])
            attend = attention.at(depth, rounds.sees[:, :count])
            angles = network.angles(rounds.positions[:, :count] + depth)
            features = network.layer(embedded, features[:, :count], *angles, attend)
            at, inside = rounds.of(depth)
            states = network.norm(features)[inside]
            guesses.append(Guess(depth, at, states, self.head, tuple(network.lm_head.parameters())))
        return guesses

    def embedded(self, ids: Tensor) -> Tensor:
        """The target's embeddings of ids (B, n) -> (B, n, H), in the draft's dtype."""
        with torch.no_grad():
            embedded: Tensor = self.target.get_input_embeddings()(ids)
        return embedded.to(self.network.fc.weight.dtype)

    def head(self, states: Tensor) -> Tensor:
        return self.network.head(states, self.vocabulary or self.network.config.vocab_size)

    def proposer(
        self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False,
        shape: Sequence[int] | None = None,
    ) -> eagle.Eagle:  # fmt: skip
        return eagle.Eagle(self.network, greedy, compile=compile, shape=shape)


class EagleRounds:
    """The rounds of texts ids (B, T), one for each position m but the last; position_ids (B, T) of packed texts: a
    round reads and drafts only its own text.

    positions (B, T-1) of pairs; sees (B, T-1, T-1): which pairs of the target a round has.
    """

    def __init__(self, ids: Tensor, position_ids: Tensor | None) -> None:
        B, T = ids.shape
        every = torch.arange(T, device=ids.device).expand(B, T)
        positions = every if position_ids is None else position_ids
        self.text = (positions == 0).cumsum(1)  # number of each token's text in its row
        self.positions = positions[:, :-1]
        of = self.text[:, :-1]
        self.sees = (of.unsqueeze(2) == of.unsqueeze(1)) & (every[:, None, :-1] <= every[:, :-1, None])

    def of(self, depth: int) -> tuple[Tensor, Tensor]:
        """Flat positions (N,) of the guesses of a depth, and which of the rounds (B, T-1-depth) make one: those whose
        drafts stay within their text."""
        T = self.text.shape[1]
        inside = self.text[:, : T - 1 - depth] == self.text[:, depth + 1 :]
        every = torch.arange(self.text.numel(), device=self.text.device).view(self.text.shape)
        return every[:, depth + 1 :][inside], inside


class RoundAttention:
    """Attention of rounds, at each depth over the target's pairs that the round has and the round's own pairs so
    far."""

    def __init__(self, groups: int, scale: float) -> None:
        self.groups, self.scale = groups, scale
        self.cache: list[tuple[Tensor, Tensor]] = []  # of each depth, keys and values (B, heads, n, D)

    def at(self, depth: int, sees: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """sees (B, n, T-1): of the n rounds of this depth."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            self.cache.append((self._repeat(k), self._repeat(v)))
            return self._attended(q * self.scale, depth, sees).transpose(1, 2).flatten(2)

        return attend

    def _repeat(self, part: Tensor) -> Tensor:
        """From one a group of heads to one a head."""
        return part.repeat_interleave(self.groups, 1)

    def _attended(self, q: Tensor, depth: int, sees: Tensor) -> Tensor:
        """q (B, heads, n, D) -> the same: one softmax over the target's pairs and the round's own."""
        (keys, values), *later = self.cache
        own = [(k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]) for k, v in later]
        scores = (q @ keys.transpose(2, 3)).masked_fill(~sees.unsqueeze(1), -torch.inf)
        mine = [(q * k).sum(-1, keepdim=True) for k, _ in own]
        share = torch.cat((scores, *mine), -1).softmax(-1)
        theirs, *each = share.split([keys.shape[2], *[1] * depth], -1)
        return sum((w * v for w, (_, v) in zip(each, own, strict=True)), theirs @ values)


def _refuse_settings(draft: Draft, target: PreTrainedModel) -> None:
    """Raise ValueError for settings that every init needs, and for more tokens than the target has."""
    size = target.config.get_text_config().vocab_size
    if draft.depths is None:
        raise ValueError("draft.depths: set the drafts of a round that an eagle trains for, as draft.depths=6")
    if draft.vocabulary and draft.vocabulary > size:
        raise ValueError(f"draft.vocabulary: {draft.vocabulary} of {size} tokens; null for all")


def _sizes(draft: Draft, target: PreTrainedModel, like: bool) -> dict[str, Any]:
    """The arguments of a config. like: give the decoder layer the shape of the target's."""
    theirs = target.config.get_text_config()
    if draft.intermediate is None or draft.head_dim is None or draft.kv_heads is None:
        raise ValueError("draft.intermediate, head_dim, kv_heads: an eagle needs all three, as draft.head_dim=64")
    width, rope = theirs.hidden_size, theirs.to_dict().get("rope_parameters") or {}
    heads = theirs.num_attention_heads if like else max(width // draft.head_dim, 1)
    layers = fused(theirs.num_hidden_layers)
    return {
        "hidden_size": width,
        "intermediate_size": theirs.intermediate_size if like else draft.intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": theirs.num_key_value_heads if like else min(draft.kv_heads, heads),
        "head_dim": (getattr(theirs, "head_dim", None) or width // heads) if like else draft.head_dim,
        "rms_norm_eps": getattr(theirs, "rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta", 10000.0),
        "max_position_embeddings": theirs.max_position_embeddings,
        "vocab_size": theirs.vocab_size,
        "draft_vocab_size": draft.vocabulary,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "depths": draft.depths,
        "bos_token_id": theirs.bos_token_id,
        "eos_token_id": theirs.eos_token_id,
        "pad_token_id": theirs.pad_token_id,
    }


@torch.no_grad()
def _copy_layer(network: EagleNetwork, target: PreTrainedModel, layers: list[int]) -> None:
    """Copy the last of `layers` of the target, its norm and its head; the layer reads the target's highest features
    and ignores the embedding."""
    count, width = target.config.get_text_config().num_hidden_layers, network.config.hidden_size
    if not layers or not -count <= layers[-1] < count:
        raise ValueError(f"init.layers: {list(layers)}: its last is none of the target's {count} layers")
    source, prefix = plain(target), f"layers.{layers[-1] % count}."
    named = {name.partition(prefix)[2]: weight for name, weight in source.items() if prefix in name}
    for part in PARTS:
        ours, theirs = network.midlayer.get_parameter(f"{part}.weight"), named.get(f"{part}.weight")
        if theirs is None or theirs.shape[0] != ours.shape[0]:
            raise ValueError(f"init=target_layers: the target's {prefix} has no {part} that fits; init=scratch")
        ours.zero_()[..., -theirs.shape[-1] :] = theirs
    network.midlayer.hidden_norm.weight.copy_(named["input_layernorm.weight"])
    network.fc.weight.zero_()[:, -width:] = torch.eye(width, device=network.fc.weight.device)
    norms = [weight for name, weight in source.items() if name.endswith(".norm.weight") and weight.shape == (width,)]
    if norms:
        network.norm.weight.copy_(norms[-1])
    rows = target.get_output_embeddings().weight
    network.lm_head.weight.copy_(rows[network.known] if network.pruned else rows)
