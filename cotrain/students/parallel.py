"""Drafts that predict all tokens of a round in one pass, at mask tokens after the text: causal LMs (PARD) and feature
drafts (P-EAGLE).

A start is a position of the text at which a round begins. The round's mask tokens, at depths 1, 2, ..., follow it. A
mask token attends to the text up to its start, and to the mask tokens of the same start up to its own depth. One pass
reads the mask tokens of all rounds, after the T tokens of the text (An et al. 2025, 2504.18583).

B texts, T tokens, S starts, M mask tokens of a text, L = T + M, H width, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PretrainedConfig, PreTrainedModel

from cotrain.config.drafts import Draft
from cotrain.config.groups import Init
from cotrain.losses.guess import chosen, numbers, sent
from cotrain.students.base import Guess, Seen
from cotrain.students.eagle import EagleRounds, EagleStudent, places, refuse_other, segments
from cotrain.students.independent import IndependentStudent
from cotrain.students.markov import after_tokens
from inference.models.forward import additive
from inference.models.markov import MARKOV, markov_of, put_markov_head, spread_of
from inference.models.pretrained import id_of, sliding_window
from inference.models.small_heads import VOCABULARY
from inference.proposers import parallel
from inference.proposers.eagle import Attend
from inference.proposers.p_eagle import PEagleNetwork
from inference.proposers.parallel import MASK, mask_of

DEPTHS = 8  # default number of depths in training
KEEP = 0.7  # in training, masks of depth j follow a share KEEP ** j of the starts (2504.18583)


class ParallelStudent(IndependentStudent):
    """Trains the draft that `inference.proposers.parallel` serves (PARD: An et al. 2025, 2504.18583). It makes one
    guess for each depth: depth 0 at the text's last token (the anchor), later depths at the mask tokens after it. The
    network is a causal LM whose config has the id of the mask token and the number of depths."""

    kind = "parallel"
    sourced = False
    begins_with = ("independent", "hybrid")
    parallel = True

    def prepare(self) -> None:
        super().prepare()
        name_mask(self.network, self.vocabulary)
        self.mask, self.depths = mask_of(self.network.config)

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Return an independent draft's network with the number of depths in its config. With draft.markov= it has a
        Markov head: the one in draft.path=, or a new one of this rank. Raises ValueError, which names the key to
        change, also for a network with sliding windows."""
        network = super().initial(draft, init, target)
        _refuse_window(network)
        learnt = getattr(network.config, parallel.DEPTHS, None)
        setattr(network.config, parallel.DEPTHS, draft.depths or learnt or DEPTHS)
        _with_markov_head(network, draft)
        return network

    def refuse(self) -> None:
        """Raise ValueError for a network that cannot be trained as this kind: its head does more than project, cap or
        scale, or it ignores the attention mask that it is given."""
        super().refuse()
        _refuse_window(self.network)
        if not self._follows_mask():
            raise ValueError(
                f"draft=parallel: {type(self.network).__name__} ignores the attention mask that is passed to it: use "
                "a model of another family, or set draft=independent"
            )

    @torch.no_grad()
    def _follows_mask(self) -> bool:
        """Return whether the network, given our attention mask with mask tokens after the text, computes the same
        states for the text as without them."""
        training = self.network.training
        self.network.eval()  # dropout would make any two passes differ
        ids = torch.arange(min(8, self.network.config.vocab_size), device=self.network.device).unsqueeze(0)
        states = self._states(ids, None, masks_after(ids[0], ids.shape[1], 2))[:, : ids.shape[1]]
        equal = torch.allclose(states, self.read(ids), rtol=1e-2, atol=1e-2)
        self.network.train(training)
        return equal

    def keeps_apart(self) -> bool:
        return True  # our attention mask separates the texts

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        """Return a guess of depth 0 at every position, and one guess for each later depth, after the starts.

        In a training step, which has `uniforms` (B, T), a start must come before a token that the loss counts, and
        depth j is computed after a random share KEEP ** j of the starts.
        """
        ids, position_ids, u = batch["ids"], batch.get("position_ids"), batch.get("uniforms")
        length = ids.shape[1]
        masks = masks_after(starts(batch), length, self.depths, None if u is None else u[0])
        texts = None if position_ids is None else segments(position_ids)
        states = self._states(ids, position_ids, masks)
        guesses = [self.everywhere(states[:, :length], depth=0)]
        for depth in range(1, self.depths):
            at, of_masks = positions_of(masks, depth, ids, texts)
            of_depth = chosen(states[:, length:], of_masks)
            share = 1.0 if u is None else KEEP**depth
            guesses.append(replace(guesses[0], depth=depth, at=at, states=of_depth, share=share))
        size = self.vocabulary or self.network.config.get_text_config().vocab_size
        return after_tokens(guesses, ids, markov_of(self.network), spread_of(self.network, size))

    def _states(self, ids: Tensor, position_ids: Tensor | None, masks: "Masks") -> Tensor:
        """Return the states (B, T + M, H) of the text's tokens, then of the mask tokens. ids (B, T). position_ids (B,
        T): only if texts are packed."""
        (rows, length), device = ids.shape, self.network.device
        positions = torch.arange(length).expand(rows, -1) if position_ids is None else position_ids
        texts = None if position_ids is None else sent(segments(positions), device)
        ids, positions, masks = sent(ids, device), sent(positions, device), masks.to(device)
        attention_mask = mask_visibility(masks, length, texts)
        if self.network.config._attn_implementation != "sdpa":
            attention_mask = additive(attention_mask, self.network.dtype)
        return self.network.base_model(
            input_ids=torch.cat([ids, ids.new_full((rows, len(masks.start)), self.mask)], 1),
            attention_mask=attention_mask,
            position_ids=torch.cat([positions, positions[:, masks.start] + masks.depth], 1),
            use_cache=False,
        ).last_hidden_state


def _refuse_window(network: PreTrainedModel) -> None:
    if window := sliding_window(network.config):
        raise ValueError(
            f"draft=parallel: {type(network).__name__} attends only to the last {window} tokens, but must read the "
            "whole text: use a model of another family, or set draft=independent"
        )


def _with_markov_head(network: PreTrainedModel, draft: Draft) -> None:
    """Put a Markov head of rank draft.markov= on a network without one, in place. Raises ValueError, which names the
    key, if the Markov head in draft.path= has another rank, or other tokens than the draft's vocabulary."""
    if own := markov_of(network):
        refuse_other(network, draft, {MARKOV: draft.markov})
        tokens = getattr(network.config, VOCABULARY, None) or network.config.get_text_config().vocab_size
        if own.markov_w2.out_features != tokens:
            raise ValueError(
                f"draft.vocabulary={draft.vocabulary}: draft.path={draft.path} has a Markov head over all "
                f"{own.markov_w2.out_features} tokens: set draft.vocabulary=null"
            )
    elif draft.markov:
        network.config.update({MARKOV: draft.markov})
        try:
            put_markov_head(network)
        except ValueError as error:
            raise ValueError(f"draft.markov: {error}") from error


class PEagleStudent(EagleStudent):
    """Trains the draft that `inference.proposers.p_eagle` serves (P-EAGLE, 2602.01469). Pairs are defined in
    `cotrain.students.eagle`. A text has P = T - 1 pairs.

    A round with newest pair m makes its guess at depth j (0-based) at position m + 1 + j, from the target's pairs 0 ..
    m and from the mask tokens of start m at depths 1 .. j.
    """

    kind = "p_eagle"
    begins_with = ("eagle",)
    fresh = frozenset({"mask_hidden"})
    parallel = True
    network: PEagleNetwork

    def prepare(self) -> None:
        super().prepare()
        name_mask(self.network, self.vocabulary)

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        """Return one guess for each depth.

        In a training step, which has `uniforms` (B, T), later depths are computed only for rounds that come before a
        token that the loss counts; depth j for a random share KEEP ** j of these.
        """
        ids, u, depths = batch["ids"], batch.get("uniforms"), self.network.config.depths
        rounds = EagleRounds(ids, batch.get("position_ids"), self.network.device)
        masks = masks_after(starts(batch, 1), ids.shape[1] - 1, depths, None if u is None else u[0, 1:])
        states = self._states(ids, seen, rounds, masks)
        head = (self.head, tuple(self.network.lm_head.parameters()))
        at, inside = places(ids, rounds.packed, 1)
        pruned = self.pruned
        guesses = [Guess(0, at, chosen(states[:, : ids.shape[1] - 1], inside), *head, pruned=pruned)]
        for depth in range(1, depths):
            at, of_masks = positions_of(masks, depth, ids, rounds.packed, 1)
            of_depth = chosen(states[:, ids.shape[1] - 1 :], of_masks)
            share = 1.0 if u is None else KEEP**depth
            guesses.append(Guess(depth, at, of_depth, *head, share=share, pruned=pruned))
        return self.after_tokens(guesses, ids)

    @classmethod
    def settings_of(cls, draft: Draft) -> dict[str, Any]:
        """Return the rank of the Markov head as an entry of the network's config; None if draft.markov is null."""
        return {"markov_rank": draft.markov}

    def _states(self, ids: Tensor, seen: Seen, rounds: EagleRounds, masks: "Masks") -> Tensor:
        """Return the states (B, P + M, H) of the pairs, then of the mask tokens, after the norm. ids (B, T)."""
        network, (rows, length) = self.network, ids.shape
        text, masks = sent(rounds.text[:, :-1], network.device), masks.to(network.device)
        ids = sent(ids, network.device)
        tokens = torch.cat([ids[:, 1:], ids.new_full((rows, len(masks.start)), network.mask)], 1)
        theirs = network.features(seen.states)[:, : length - 1]
        ours = network.mask_features().expand(rows, len(masks.start), -1)
        positions = torch.cat([rounds.positions, rounds.positions[:, masks.start] + masks.depth], 1)
        attend = attend_under(mask_visibility(masks, length - 1, text), network.groups, network.scale)
        features = torch.cat([theirs, ours], 1)
        return network.norm(network.layer(self.embedded(tokens), features, *network.angles(positions), attend))


def attend_under(mask: Tensor, groups: int, scale: float) -> Attend:
    """Return attention under a mask, as a function from queries (B, n, heads, D), keys and values (B, n, key heads, D)
    to outputs (B, n, heads * D). mask (B, 1, n, n) bool: entry [b, 0, i, j] is whether i attends to j. groups: number
    of query heads per key head. scale: the factor of the scores."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.to(v.dtype).transpose(1, 2) for part in (q, k, v))  # mixed precision: angles are float32
        k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
        return scaled_dot_product_attention(q, k, v, mask, scale=scale).transpose(1, 2).flatten(2)

    return attend


def name_mask(network: PreTrainedModel, vocabulary: int | None) -> None:
    """Set the id of the mask token in the network's config, in place, unless it is set. vocabulary: see `unused_id`."""
    if getattr(network.config, MASK, None) is None:
        setattr(network.config, MASK, unused_id(network.config, vocabulary))


def unused_id(config: PretrainedConfig, vocabulary: int | None) -> int:
    """Return the id of a token that texts do not have, or rarely, for use as a mask.

    It is the first id past `vocabulary`, which is in no text; the published drafts of DFlash have the same one, since
    they add a mask token to the tokenizer. Without such an id it is the padding id, unless this id ends texts; else the
    last id, which is often a reserved token. vocabulary: the number of ids that can have mass, or None.
    """
    padding, ends = id_of(config, "pad_token_id"), id_of(config, "eos_token_id")
    if vocabulary is not None and vocabulary < config.vocab_size:
        return vocabulary
    if padding is not None and padding not in (ends if isinstance(ends, list) else [ends]):
        return padding
    return int(config.vocab_size) - 1


class Masks(NamedTuple):
    """The M mask tokens of a text, in order of depth. start (M,): the start that each belongs to, a position. depth
    (M,): its depth, 1-based."""

    start: Tensor
    depth: Tensor

    def to(self, device: torch.device) -> "Masks":
        return Masks(sent(self.start, device), sent(self.depth, device))

    @property
    def position(self) -> Tensor:
        """Return (M,): start + depth, the position at which each mask token makes its guess."""
        return self.start + self.depth


def masks_after(starts: Tensor, length: int, depths: int, u: Tensor | None = None) -> Masks:
    """Return mask tokens at depths 1 .. depths - 1 after each start, in order of depth, up to the end of a text of
    `length` tokens.

    starts (S,): positions. depths: the number of depths, with depth 0, which has no mask token. u (length,): a uniform
    for each position, or None to keep all mask tokens. A start has a mask token of depth j only if its u < KEEP ** j,
    so it then also has those of lower depths.
    """
    by_depth = []
    for depth in range(1, depths):
        here = starts[starts + depth < length]
        by_depth.append(here if u is None else here[u[here] < KEEP**depth])
    each = torch.arange(1, depths).repeat_interleave(torch.tensor([len(here) for here in by_depth], dtype=torch.int64))
    return Masks(torch.cat([starts[:0], *by_depth]), each)


def starts(batch: Mapping[str, Any], gap: int = 0) -> Tensor:
    """Return the starts (S,) of rounds, the same for all texts of a batch. A start is the anchor's position (the last
    token of the round's text) minus `gap`.

    batch: ids (B, T); in a training step also uniforms (B, T) and predicted (B, T-1) bool: entry t is whether the loss
    counts token t + 1. gap: 0 for causal LMs; 1 for P-EAGLE, whose start is a pair.

    In a training step a start is returned only if the loss counts the token after its anchor in at least one text.
    Otherwise all T - gap positions are returned.
    """
    if "uniforms" not in batch:
        return torch.arange(batch["ids"].shape[1] - gap)
    return numbers(batch["predicted"][:, gap:].any(0))


def positions_of(masks: Masks, depth: int, ids: Tensor, texts: Tensor | None, gap: int = 0) -> tuple[Tensor, Tensor]:
    """Return two tensors for the mask tokens of one depth (1-based), in every row of ids (B, T): the flat positions b *
    T + t of their guesses, (N,), and their flat indices b * M + m among the mask tokens of the batch, (N,).

    texts (B, T): the number of each token's text within its row, or None if no texts are packed. Mask tokens outside
    their round's text are left out. gap: the anchor's position minus the start: 0 for causal LMs, 1 for P-EAGLE.
    """
    rows, column = torch.arange(len(ids)).unsqueeze(1), numbers(masks.depth == depth)
    position = masks.position[column] + gap
    at, of_masks = rows * ids.shape[1] + position, rows * len(masks.depth) + column
    if texts is None:
        return at.flatten(), of_masks.flatten()
    same = texts[:, position] == texts[:, masks.start[column]]
    return at[same], of_masks[same]


def mask_visibility(masks: Masks, length: int, texts: Tensor | None = None) -> Tensor:
    """Return an attention mask (B or 1, 1, L, L) bool: entry [b, 0, i, j] is whether i attends to j. A token of the
    text attends to tokens up to itself. A mask token attends to the text up to its start, and to the mask tokens of the
    same start up to its own depth.

    length: T. texts (B, T): the number of each token's text within its row, or None if no texts are packed. Nothing
    then attends to another text.
    """
    at = torch.arange(length, device=masks.start.device)
    until = torch.cat([at, masks.start])  # the last token that each sees
    tokens = at <= until.unsqueeze(1)  # (L, T)
    if texts is not None:
        tokens = tokens & (texts[:, until].unsqueeze(2) == texts.unsqueeze(1))
    same = (masks.start.unsqueeze(1) == masks.start) & (masks.depth.unsqueeze(1) >= masks.depth)
    others = pad(same, (0, 0, length, 0))  # (L, M): a token sees no mask
    others = others.expand(*tokens.shape[:-1], others.shape[1])
    return torch.cat([tokens, others], -1).view(-1, 1, len(until), len(until))
