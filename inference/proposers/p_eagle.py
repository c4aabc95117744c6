"""A feature draft that predicts all tokens of a round in one pass, at masks after the text (P-EAGLE, 2602.01469).

The network is an `EagleNetwork` with one more vector. Masks follow the text's last pair. A mask is a pair with the
learnt `mask_hidden` in place of the target's states, and a token of the vocabulary, `pard_token`, in place of the next
token. Names and shapes are those that vLLM loads.

A rows, n pairs per row, `width` the largest number of pairs that a slot lacks, K drafts per round, H width of the
target's states and of the draft, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from inference.models.cache import Window
from inference.models.forward import picked_columns
from inference.models.markov import MarkovHead
from inference.models.step import Drafts, behind
from inference.proposers.eagle import Eagle, EagleConfig, EagleDrafting, EagleNetwork
from inference.proposers.trees import TreeShape, from_one_pass


class PEagleConfig(EagleConfig):
    """The config of a P-EAGLE draft, an `EagleConfig` with two more keys. pard_token: the id whose embedding a mask
    has, None before training sets it. markov_rank: rank of the Markov head, 0 for none."""

    def __init__(self, pard_token: int | None = None, markov_rank: int = 0, **settings: Any) -> None:
        self.pard_token, self.markov_rank = pard_token, markov_rank
        super().__init__(**settings)


class PEagleNetwork(EagleNetwork):
    """The network of a P-EAGLE draft. mask_hidden (3H,): the states of a mask, which `fc` joins like the target's. They
    start near 1, the size of states: a norm follows `fc`, and a small input would have large gradients."""

    config_class: Any = PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(self.fc.in_features))
        if config.markov_rank:
            self.markov_head = MarkovHead(config.vocab_size, config.markov_rank, config.draft_vocab_size)

    @property
    def mask(self) -> int:
        """Return the id whose embedding a mask has. Raises ValueError if the config has none."""
        if self.config.pard_token is None:
            raise ValueError(
                "config.json of a p_eagle draft must have pard_token, the id that the draft reads as a mask"
            )
        return int(self.config.pard_token)

    def mask_features(self) -> Tensor:
        """Return the features (H,) that a mask has in place of the target's."""
        features: Tensor = self.fc(self.mask_hidden)
        return features


class PEagleDrafting(EagleDrafting):
    """The drafts of a round from one pass over the pairs that a slot lacks and K - 1 masks after them, as a function of
    tensors. Arguments as in `EagleDrafting`."""

    def forward(self, round: Any, given: Mapping[str, Any], K: int) -> Drafts:
        ids, features, pairs, only = (given[name] for name in ("lacking", "features", "pairs", "only"))
        anchor = picked_columns(ids, only)[:, 0]  # the last pair's second token
        columns = torch.arange(ids.shape[1] + K - 1, device=ids.device)
        text = columns <= only.unsqueeze(1)  # (A, n): which are pairs of the text
        ids = pad(ids, (0, K - 1)).masked_fill(~text, self.network.mask)
        features = torch.where(text.unsqueeze(-1), pad(features, (0, 0, 0, K - 1)), self.network.mask_features())
        window = Window(0, len(ids), pairs.unsqueeze(1) + columns, None, given["slots"].shape[0])
        output = self.layer(self.slots(given), ids, features, window)
        logits, term = self.logits(picked_columns(output, behind(only, K))), self.network.term(self.vocabulary)
        return from_one_pass(round, logits, self.branching, self.greedy, anchor, term)


class PEagle(Eagle):
    """A proposer that drafts k tokens from one pass over the pairs of the accepted tokens and k - 1 masks.

    Without a Markov head, the distribution at depth j depends on the text and j masks, not on earlier drafts, so all
    nodes at one depth of a tree have the same distribution. The head adds a term for the preceding token. A round
    stores masks after the text's pairs; the next round overwrites them. The number of drafts per round is at most that
    of training, which the config states. The arguments are those of `Eagle`. Raises ValueError if the network's config
    names no mask.
    """

    network_class = PEagleNetwork
    network: PEagleNetwork
    drafting = PEagleDrafting
    compiles = False

    def __init__(
        self,
        network: PEagleNetwork,
        greedy: bool = False,
        *,
        compile: bool | None = None,
        int8: bool = False,
        shape: TreeShape = None,
    ) -> None:
        super().__init__(network, greedy, compile=compile, int8=int8, shape=shape)
        self.mask, self.depths = network.mask, network.config.depths

    @property
    def asks(self) -> bool:
        return False  # one pass drafts all tokens: to end the round after some of them would save nothing of it
