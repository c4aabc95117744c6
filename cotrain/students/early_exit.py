"""An early exit while it trains. One pass computes all rounds of a text, one round for every token.

A round reads the keys and values of its text from the target, and those of its drafted tokens from the changed layers.
So the distribution of a drafted token depends on its depth. The pass has K + 1 copies of the text: one as the target
reads it, and one for each depth. The anchor of a round is the last token of its text. Column t of depth j belongs to
the round with anchor t - j. It attends to the target's keys before the anchor, and from the anchor on to one key of
each depth 0 .. j.

B texts, T tokens, K depths, H heads, D size of a head.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from cotrain.config.drafts import Draft
from cotrain.config.groups import Init
from cotrain.losses.guess import chosen, sent
from cotrain.students.base import Guess, Seen, Student
from cotrain.students.eagle import places, segments
from cotrain.students.independent import pretrained_network
from cotrain.students.rounding import fit_rounding
from cotrain.teacher.target_model import Read, halves
from inference.models.pretrained import decoder_layers, sliding_window
from inference.proposers.early_exit import EarlyExit, ExitNetwork, FourBits, learning, untrained_exit

MOST = 15  # the largest number of exits to choose from if draft.layers is null
ROUNDS = "cotrain_rounds"  # transformers' name for `attend_rounds`


class EarlyExitStudent(Student):
    """Trains the draft that `inference.proposers.early_exit` serves. It makes one guess for each depth. At rank 0 only
    the norm differs from the target, so a single guess holds for all depths.

    rounds: the text length and the model that `_with_rounds` has cached; None before the first use.
    """

    kind = "early_exit"
    open_layers = True
    begins_with: tuple[str, ...] = ("hybrid_exit",)
    layouts = {}
    network: ExitNetwork
    rounds: tuple[int, PreTrainedModel] | None = None  # text length and model of `_with_rounds`

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Return the network before training: an exit after draft.layers layers of the target, or with init=pretrained
        the exit in the folder draft.path=. If draft.layers is null, the exit is after the most layers that
        `candidate_exits` offers, or with draft.bits= after all. Raises ValueError, which names the key to change."""
        if draft.depths is None:
            raise ValueError(
                "draft.depths=null: set how many drafts per round the exit is trained for, for example draft.depths=4"
            )
        if init.kind == "pretrained":
            network: ExitNetwork = pretrained_network(cls, draft, target)
            _refuse_windows(target, network.config)
            network.config.depths = draft.depths
            return network
        _refuse_windows(target, draft)
        total = len(decoder_layers(target))
        layers = draft.layers or (total if draft.bits else candidate_exits(total)[-1])
        try:
            return untrained_exit(target, layers, 0 if draft.bits else draft.rank, draft.depths, draft.bits)
        except ValueError as error:
            raise ValueError(f"draft.layers: {error}") from error

    @cached_property
    def model(self) -> PreTrainedModel:
        """Return one model that consists of the target's layers up to the exit, with the exit's changes, and
        of its norm and head. The network's weights are shared, so training the network changes this model."""
        assert self.target is not None
        return learning(self.network, self.target).eval()

    @cached_property
    def whole(self) -> Read:
        return halves(self.model, self.vocabulary)[0]

    def refuse(self) -> None:
        """Raise ValueError for a target with sliding windows if its projections are changed, because training rounds
        support no window."""
        assert self.target is not None
        _refuse_windows(self.target, self.network.config)

    def fit(self, texts: Iterable[Tensor]) -> None:
        assert self.target is not None
        fit_rounding(self.network, self.target, texts)

    @classmethod
    def cast(cls, network: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
        """Cast weights in 4 bits once they are whole numbers: half precision lacks many between them."""
        for part in network.modules():
            if isinstance(part, FourBits):
                part.fold()
        return super().cast(network, dtype)

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        ids, position_ids = batch["ids"], batch.get("position_ids")
        head = halves(self.model, self.vocabulary)[1]
        if not self.network.config.changed:
            return [Guess.everywhere(self.whole(ids, position_ids), head)]
        text, guesses = None if position_ids is None else segments(position_ids), []
        for depth, states in enumerate(self._by_depth(ids, _within(ids, text))):
            at, inside = places(ids, text, depth)
            guesses.append(Guess(depth, at, chosen(states[:, depth:], inside), head))
        return guesses

    def _by_depth(self, ids: Tensor, within: Tensor) -> list[Tensor]:
        """Return the states (B, T, width) of each depth, as a list of K. ids (B, T). within (B, T): each token's
        position in its own text."""
        copies, T = self.network.config.depths + 1, ids.shape[1]
        ids, within = (sent(one, self.model.device) for one in (ids, within))
        model = self._with_rounds(T)
        states = model.base_model(
            input_ids=ids.repeat(1, copies),
            position_ids=within.repeat(1, copies),
            attention_mask=_visible(within).unsqueeze(1),
            use_cache=False,
        ).last_hidden_state
        return list(states.view(len(ids), copies, T, -1).unbind(1)[1:])

    def _with_rounds(self, T: int) -> PreTrainedModel:
        """Return a model that reads its first T columns as the target does, and all later ones with the exit's changed
        layers. The model for one T, the last that was asked for, is cached."""
        if self.rounds is None or self.rounds[0] != T:
            AttentionInterface.register(ROUNDS, attend_rounds)
            model = learning(self.network, self.target, T).eval()  # type: ignore[arg-type]
            model.config.get_text_config()._attn_implementation = ROUNDS
            self.rounds = T, model
        return self.rounds[1]

    def proposer(self, *, greedy: bool = False, int8: bool = False, shape: Sequence[int] | None = None) -> EarlyExit:
        """Return the proposer that serves the exit. greedy: draft the most probable tokens. int8: has no effect,
        because draft.bits decides. shape: for a tree, the index of each node's parent; None for chains."""
        assert self.target is not None
        return EarlyExit(self.network, self.target, greedy, shape=shape)


def candidate_exits(total: int) -> list[int]:
    """Return the exits to choose from in a target with `total` decoder layers, as numbers of layers below the exit: one
    exit after each layer except the last, or MOST evenly spread ones if there are more. Raises ValueError for a target
    with one layer."""
    if total < 2:
        raise ValueError(
            "draft.layers=null: it chooses an exit before the target's last layer, but the target has one layer: set "
            "draft.layers=1, with which the draft is the whole target"
        )
    if total - 1 <= MOST:
        return list(range(1, total))
    return sorted({round(total * i / (MOST + 1)) for i in range(1, MOST + 1)})


def _refuse_windows(target: PreTrainedModel, ask: Any) -> None:
    """Raise ValueError for a target with sliding windows if its projections are changed. ask: has rank and bits."""
    if (ask.rank or ask.bits) and sliding_window(target.config.get_text_config()):
        key, others = ("bits=4", " and draft.bits=null") if ask.bits else (f"rank={ask.rank}", "")
        raise ValueError(
            f"draft.{key}: the target ({type(target).__name__}) has sliding windows, for which rounds cannot be "
            f"trained: set draft.rank=0{others}"
        )


def _within(ids: Tensor, text: Tensor | None) -> Tensor:
    """Return (B, T): each token's position in its own text. ids (B, T). text (B, T): the number of each token's text
    within its row, or None if no texts are packed."""
    every = torch.arange(ids.shape[1]).expand(ids.shape)
    if text is None:
        return every
    begins = nn.functional.pad(text.diff(dim=1) > 0, (1, 0), value=True)
    return every - torch.where(begins, every, 0).cummax(1).values


def _visible(within: Tensor) -> Tensor:
    """Return (B, T, T) bool: entry [b, t, s] is True if tokens s and t are in the same text and s <= t. within (B, T):
    each token's position in its own text."""
    every = torch.arange(within.shape[1], device=within.device)
    back = every.unsqueeze(1) - every
    return (back >= 0) & (back <= within.unsqueeze(2))


class _Copies(NamedTuple):
    """Queries, keys and values of all copies of the text, (B, H, K + 1, T, D) each."""

    q: Tensor
    k: Tensor
    v: Tensor


def attend_rounds(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention output of all rounds (B, (K + 1) T, H, D), and None in place of attention weights.
    transformers calls this function instead of its own attention.

    query (B, H, (K + 1) T, D). key, value (B, G, (K + 1) T, D), with G < H if several query heads share one.
    attention_mask (B, 1, T, T) bool: entry [b, 0, t, s] is True if tokens s and t are in the same text and s <= t.
    scaling: the factor of the scores; None: D ** -0.5.
    """
    T, scale = attention_mask.shape[-1], query.shape[-1] ** -0.5 if scaling is None else scaling
    copies = _Copies(
        *(
            part.repeat_interleave(query.shape[1] // part.shape[1], 1).unflatten(2, (-1, T))
            for part in (query * scale, key, value)
        )
    )
    every = torch.arange(T, device=query.device)
    q, k, v = (part[:, :, 0] for part in copies)
    outputs = [nn.functional.scaled_dot_product_attention(q, k, v, attention_mask, scale=1.0)]  # the target's copy
    for depth in range(copies.q.shape[2] - 1):
        before = attention_mask & (every.unsqueeze(1) - every > depth)
        outputs.append(_drafts(copies, depth, before, attention_mask))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _drafts(copies: _Copies, depth: int, before: Tensor, visible: Tensor) -> Tensor:
    """Return the attention output (B, H, T, D) of a depth (0-based). Each drafted token attends to the text before its
    round's anchor (the last token of the round's text), and to one token of each depth up to its own.

    before (B, 1, T, T) bool: entry [b, 0, t, s] is True if s is before t in the same text. visible (B, 1, T, T) bool:
    the same with s = t allowed; entry [b, 0, t, t - i] says whether the token i positions before t is in its text.
    """
    q = copies.q[:, :, depth + 1]
    same_text = [_shift(visible.diagonal(-back, 2, 3), back, -1) for back in range(depth + 1)]
    scores = [(q @ copies.k[:, :, 0].transpose(2, 3)).masked_fill(~before, -torch.inf)]
    for back in range(depth + 1):
        score = (q * _shift(copies.k[:, :, depth + 1 - back, : q.shape[2] - back], back, 2)).sum(-1)
        scores.append(score.masked_fill(~same_text[back], -torch.inf).unsqueeze(-1))
    probs = torch.cat(scores, -1).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    text, *own = probs.split([q.shape[2], *[1] * (depth + 1)], -1)
    output = text @ copies.v[:, :, 0]
    for back, share in enumerate(own):
        output = output + share * _shift(copies.v[:, :, depth + 1 - back, : q.shape[2] - back], back, 2)
    return output


def _shift(values: Tensor, count: int, dim: int) -> Tensor:
    """Return `values` with `count` zeros inserted at the beginning of dimension `dim`."""
    shape = list(values.shape)
    shape[dim] = count
    return torch.cat([values.new_zeros(shape), values], dim)
