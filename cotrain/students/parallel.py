"""A parallel draft: a small causal LM that guesses all tokens of a round in one pass, at masks behind the text."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cotrain.config.groups import Draft, Init
from cotrain.students.base import Guess, Seen
from cotrain.students.independent import Independent, first_weights
from cotrain.students.mask_blocks import Blocks, blocks, places_of, segments, starts, visible
from inference import proposers
from inference.models.cache import sliding_window
from inference.models.forward import additive
from inference.proposers import parallel
from inference.proposers.parallel import MASK, mask_of

DEPTHS = 8  # drafts that it learns, where nothing else is said
KEEP = 0.7  # of the starts of a depth, the share that the next depth keeps while it trains (2504.18583)


class Parallel(Independent):
    """The student of `inference.proposers.parallel`: a guess a depth, at the anchor and at the masks behind it (PARD:
    An et al. 2025, 2504.18583). Its network is a causal LM whose config names the mask's id and the depths."""

    kind = "parallel"
    takes = ("depths",)

    def __init__(
        self, network: PreTrainedModel, target: PreTrainedModel | None = None, vocabulary: int | None = None
    ) -> None:
        super().__init__(network, target, vocabulary)
        name_mask(network, vocabulary)
        self.mask, self.depths = mask_of(network.config)

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """As the independent draft's: draft.path may name one of either kind. Raises ValueError for one that sees a
        window of the text alone."""
        network = first_weights(draft, init, target)
        _refuse_window(network)
        learnt = getattr(network.config, parallel.DEPTHS, None)
        setattr(network.config, parallel.DEPTHS, draft.depths or learnt or DEPTHS)
        return network

    def of(self, network: PreTrainedModel) -> "Parallel":
        return Parallel(network, vocabulary=self.vocabulary)

    def refuse(self) -> None:
        """Raises as the independent draft, and for a network that cannot be told what each token sees."""
        super().refuse()
        _refuse_window(self.network)
        if not self._told():
            raise ValueError(f"draft: {type(self.network).__name__} does not follow a mask of what each token sees; "
                             "another family, or draft=independent")  # fmt: skip

    @torch.no_grad()
    def _told(self) -> bool:
        """Whether states under our own mask are those of the network's."""
        training = self.network.training
        self.network.eval()  # dropout would make any two passes differ
        ids = torch.arange(min(8, self.network.config.vocab_size), device=self.network.device).unsqueeze(0)
        masks = blocks(ids[0], ids.shape[1], 2)
        found = torch.allclose(self._states(ids, None, masks)[:, : ids.shape[1]], self.read(ids), rtol=1e-2, atol=1e-2)
        self.network.train(training)
        return found

    def keeps_apart(self) -> bool:
        return True  # what each token sees is said here

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        """At depth 0 everywhere. At others behind every start; where the batch has `uniforms` (B, T), which a step of
        training gives, behind those that these keep, of places that are learnt from."""
        device, u = self.network.device, batch.get("uniforms")
        ids, position_ids = batch["ids"].to(device), batch.get("position_ids")
        length = ids.shape[1]
        masks = blocks(starts(batch, device), length, self.depths, None if u is None else u[0].to(device), KEEP)
        texts = None if position_ids is None else segments(position_ids.to(device))
        states = self._states(ids, position_ids, masks)
        head = (self.head, tuple(self.network.get_output_embeddings().parameters()))
        found = [Guess.everywhere(states[:, :length], *head, depth=0)]
        for depth in range(1, self.depths):
            at, of_masks = places_of(masks, depth, ids, texts)
            behind = states[:, length:].flatten(0, 1)[of_masks]
            found.append(Guess(depth, at, behind, *head, share=1.0 if u is None else KEEP**depth))
        return found

    def _states(self, ids: Tensor, position_ids: Tensor | None, masks: Blocks) -> Tensor:
        """(B, T + M, D) of the texts' tokens and of the masks behind them."""
        rows, length = ids.shape
        places = torch.arange(length, device=ids.device).expand(rows, -1) if position_ids is None else position_ids
        places = places.to(ids.device)
        shown = visible(masks, length, None if position_ids is None else segments(places))
        if self.network.config._attn_implementation != "sdpa":
            shown = additive(shown, self.network.dtype)
        found: Tensor = self.network.base_model(
            input_ids=torch.cat([ids, ids.new_full((rows, len(masks.start)), self.mask)], 1),
            attention_mask=shown,
            position_ids=torch.cat([places, places[:, masks.start] + masks.depth], 1),
            use_cache=False,
        ).last_hidden_state
        return found

    def proposer(
        self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False,
        shape: Sequence[int] | None = None,
    ) -> proposers.Parallel:  # fmt: skip
        return proposers.Parallel(self.network, greedy, compile=compile, int8=int8, shape=shape)


def _refuse_window(network: PreTrainedModel) -> None:
    if window := sliding_window(network.config):
        raise ValueError(f"draft: {type(network).__name__} sees the last {window} tokens; a parallel draft's masks are "
                         "read behind a text that all of it sees: another family, or draft=independent")  # fmt: skip


def name_mask(network: PreTrainedModel, vocabulary: int | None) -> None:
    """Say in the network's config which id is read as a mask, where it does not: a row behind the ids that have mass,
    else the padding, which no text holds, else the last id, for which a text rarely has use."""
    config = network.config
    if getattr(config, MASK, None) is not None:
        return
    padding, ends = config.pad_token_id, config.eos_token_id
    if vocabulary is not None and vocabulary < config.vocab_size:
        mask = vocabulary
    elif padding is not None and padding not in (ends if isinstance(ends, list) else [ends]):
        mask = padding
    else:
        mask = config.vocab_size - 1
    setattr(config, MASK, mask)
