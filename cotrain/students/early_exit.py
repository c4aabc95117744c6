"""An early exit while it trains: rounds that start at every token of a text, all of them in one pass.

A round reads the text as the target stored it and its own drafts as the changed layers stored them, so a draft's
distribution depends on its depth. The pass holds the text K + 1 times: as the target reads it, and once a depth, where
the column of token t at depth j stands for a round whose text ends with token t - j: it sees the target's keys before
that token, and those of the depths before it from there on. B texts, T tokens, K depths, H heads, D size of a head.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from cotrain.config.groups import Draft, Init
from cotrain.students.base import Guess, Seen, Student
from cotrain.students.pretrained import network_of
from cotrain.teacher.target_model import Read, halves
from inference.models.cache import sliding_window
from inference.models.taps import decoder_layers
from inference.proposers.early_exit import EarlyExit as Proposer
from inference.proposers.early_exit_network import ExitNetwork, begun, learning

MOST = 15  # exits that are considered where draft.layers is null
ROUNDS = "cotrain_rounds"  # the name of `attention` among transformers' own


class EarlyExit(Student):
    """The student of `inference.proposers.early_exit`: a guess for each depth, one for all where nothing is changed but
    the norm."""

    kind = "early_exit"
    takes = ("rank", "depths")
    network: ExitNetwork

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """draft.layers, rank and depths say which exit, whatever init= is; but for init=pretrained: a folder of one,
        draft.path, and depths. Layers that are not chosen yet: the most that a choice may be, for what is asked before.
        Raises as `refuse`."""
        if draft.depths is None:
            raise ValueError("draft.depths: drafts of a round that the exit is trained for: give it, as draft.depths=4")
        if init.kind == "pretrained":
            found: ExitNetwork = network_of(draft, target)
            _refuse_windows(target, found.config.rank)
            found.config.depths = draft.depths
            return found
        _refuse_windows(target, draft.rank)
        layers = draft.layers or candidates(len(decoder_layers(target)))[-1]
        try:
            return begun(target, layers, draft.rank, draft.depths)
        except ValueError as error:
            raise ValueError(f"draft.layers: {error}") from error

    @cached_property
    def model(self) -> PreTrainedModel:
        assert self.target is not None
        return learning(self.network, self.target).eval()

    @cached_property
    def whole(self) -> Read:
        return halves(self.model, self.vocabulary)[0]

    def refuse(self) -> None:
        """Raises ValueError for a target whose layers see a window of the text alone: rounds are not told apart
        there."""
        assert self.target is not None
        _refuse_windows(self.target, self.network.config.rank)

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        ids, places = batch["ids"].to(self.model.device), batch.get("position_ids")
        head = halves(self.model, self.vocabulary)[1]
        if not self.network.config.rank:
            return [Guess.everywhere(self.whole(ids, places), head)]
        within = _within(ids, places)
        flat = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        found = []
        for depth, states in enumerate(self._by_depth(ids, within)):
            there = within >= depth  # a round starts behind a first token
            found.append(Guess(depth, flat[there], states[there], head))
        return found

    def _by_depth(self, ids: Tensor, within: Tensor) -> list[Tensor]:
        """States (B, T, W) of each depth."""
        copies, T = self.network.config.depths + 1, ids.shape[1]
        model = self._apart(T)
        found = model.base_model(
            input_ids=ids.repeat(1, copies),
            position_ids=within.repeat(1, copies),
            attention_mask=_seen(within).unsqueeze(1),
            use_cache=False,
        ).last_hidden_state
        return list(found.view(len(ids), copies, T, -1).unbind(1)[1:])

    def _apart(self, T: int) -> PreTrainedModel:
        """The model whose first T columns are the target's own; kept for texts of one length."""
        kept: tuple[int, PreTrainedModel] | None = self.__dict__.get("kept")
        if kept is None or kept[0] != T:
            AttentionInterface.register(ROUNDS, attention)
            model = learning(self.network, self.target, T).eval()  # type: ignore[arg-type]
            model.config.get_text_config()._attn_implementation = ROUNDS
            self.__dict__["kept"] = kept = T, model
        return kept[1]

    def proposer(
        self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False,
        shape: Sequence[int] | None = None,
    ) -> Proposer:  # fmt: skip
        """int8 changes nothing: its weights are the target's."""
        assert self.target is not None
        return Proposer(self.network, self.target, greedy, compile=compile, shape=shape)


def candidates(total: int) -> list[int]:
    """Exits of a target of so many decoder layers: all but its end, or MOST of them, evenly spread. Raises ValueError
    for a target without any."""
    if total < 2:
        raise ValueError("draft.layers: the target has one decoder layer, which leaves no exit to choose before its "
                         "end: draft.layers=1")  # fmt: skip
    if total - 1 <= MOST:
        return list(range(1, total))
    return sorted({round(total * i / (MOST + 1)) for i in range(1, MOST + 1)})


def _refuse_windows(target: PreTrainedModel, rank: int) -> None:
    if rank and sliding_window(target.config.get_text_config()):
        raise ValueError(f"draft.kind: {type(target).__name__} has layers of sliding windows, whose rounds cannot be "
                         "trained: draft.rank=0")  # fmt: skip


def _within(ids: Tensor, places: Tensor | None) -> Tensor:
    """(B, T): each token's place in its own text, of texts that may be packed into one row."""
    every = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    if places is None:
        return every
    begins = nn.functional.pad(places.to(ids.device).diff(dim=1) != 1, (1, 0), value=True)
    return every - torch.where(begins, every, 0).cummax(1).values


def _seen(within: Tensor) -> Tensor:
    """(B, T, T) bool: [_, t, s] whether token s is of t's text and not behind it."""
    every = torch.arange(within.shape[1], device=within.device)
    back = every.unsqueeze(1) - every
    return (back >= 0) & (back <= within.unsqueeze(2))


class Heads(NamedTuple):
    """Queries, keys and values of the copies, (B, H, K + 1, T, D) each."""

    q: Tensor
    k: Tensor
    v: Tensor


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor,
    scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Of all rounds; as transformers calls it: query (B, H, (K + 1) T, D), keys and values of the groups of heads,
    attention_mask (B, 1, T, T), see `_seen` -> (B, (K + 1) T, H, D)."""
    T, scale = attention_mask.shape[-1], query.shape[-1] ** -0.5 if scaling is None else scaling
    heads = Heads(*(part.repeat_interleave(query.shape[1] // part.shape[1], 1).unflatten(2, (-1, T))
                    for part in (query * scale, key, value)))  # fmt: skip
    every = torch.arange(T, device=query.device)
    found = [_text(heads, attention_mask)]
    for depth in range(heads.q.shape[2] - 1):
        before = attention_mask & (every.unsqueeze(1) - every > depth)
        found.append(_drafts(heads, depth, before, attention_mask))
    return torch.cat(found, 2).transpose(1, 2).contiguous(), None


def _text(heads: Heads, seen: Tensor) -> Tensor:
    """Of the text as the target reads it (B, H, T, D)."""
    q, k, v = (part[:, :, 0] for part in heads)
    return nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=1.0)


def _drafts(heads: Heads, depth: int, before: Tensor, seen: Tensor) -> Tensor:
    """Of a depth (B, H, T, D): the text before the round's anchor, and of each depth up to this one the token that it
    read. before (B, 1, T, T): of the text; seen: see `_seen`, whose diagonals say which of these tokens are there."""
    q = heads.q[:, :, depth + 1]
    there = [_back(seen.diagonal(-back, 2, 3), back, -1) for back in range(depth + 1)]
    scores = [(q @ heads.k[:, :, 0].transpose(2, 3)).masked_fill(~before, -torch.inf)]
    for back in range(depth + 1):
        one = (q * _back(heads.k[:, :, depth + 1 - back, : q.shape[2] - back], back, 2)).sum(-1)
        scores.append(one.masked_fill(~there[back], -torch.inf).unsqueeze(-1))
    probs = torch.cat(scores, -1).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    text, *own = probs.split([q.shape[2], *[1] * (depth + 1)], -1)
    found = text @ heads.v[:, :, 0]
    for back, share in enumerate(own):
        found = found + share * _back(heads.v[:, :, depth + 1 - back, : q.shape[2] - back], back, 2)
    return found


def _back(values: Tensor, back: int, size: int) -> Tensor:
    """Moved so many places on along `size`, zeros before."""
    shape = list(values.shape)
    shape[size] = back
    return torch.cat([values.new_zeros(shape), values], size)
