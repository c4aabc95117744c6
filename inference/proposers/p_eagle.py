"""A feature draft that predicts all tokens of a round in one pass, at mask tokens after the text (P-EAGLE, 2602.01469).

The network is an `EagleNetwork` with one more vector. A pair joins the target's states at one token and the embedding
of the next token, as in `eagle`. Mask tokens follow the text's last pair. A mask token is a pair that has the learnt
`mask_hidden` in place of the target's states, and the id `pard_token` in place of the next token. Tensors have the
names and shapes that vLLM loads.

A rows, n pairs per row, K drafts per round, H width of the target's states and of the draft, V vocabulary.
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
from inference.proposers.trees import from_one_pass


class PEagleConfig(EagleConfig):
    """The config of a P-EAGLE draft, an `EagleConfig` with two more keys. pard_token: the id of the mask token, None
    before training sets it. markov_rank: rank of the Markov head, 0 for none."""

    def __init__(self, pard_token: int | None = None, markov_rank: int = 0, **settings: Any) -> None:
        self.pard_token, self.markov_rank = pard_token, markov_rank
        super().__init__(**settings)


class PEagleNetwork(EagleNetwork):
    """The network of a P-EAGLE draft. mask_hidden (3H,): the states at a mask token, which `fc` joins as it joins the
    target's. They start with a size near 1, like the target's states: a norm follows `fc`, so a small input would have
    large gradients."""

    config_class: Any = PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(self.fc.in_features))
        if config.markov_rank:
            self.markov_head = MarkovHead(config.vocab_size, config.markov_rank, config.draft_vocab_size)

    @property
    def mask(self) -> int:
        """Return the id of the mask token. Raises ValueError if the config has none."""
        if self.config.pard_token is None:
            raise ValueError(
                "config.json of a p_eagle draft has no pard_token, the id of the mask token: export the draft again"
            )
        return int(self.config.pard_token)

    def mask_features(self) -> Tensor:
        """Return the features (H,) at a mask token, in place of the target's."""
        return self.fc(self.mask_hidden)


class PEagleDrafting(EagleDrafting):
    """Drafts a round in one pass, as a function of tensors. The pass reads the pairs that are not stored yet, then K -
    1 mask tokens. Its constructor has the arguments of `EagleDrafting`."""

    def forward(self, round: Any, given: Mapping[str, Any], K: int) -> Drafts:
        ids, features, pairs, only = (given[name] for name in ("lacking", "features", "pairs", "only"))
        anchor = picked_columns(ids, only)[:, 0]  # the last pair's second token
        columns = torch.arange(ids.shape[1] + K - 1, device=ids.device)
        text = columns <= only.unsqueeze(1)  # (A, n): which are pairs of the text
        ids = pad(ids, (0, K - 1)).masked_fill(~text, self.network.mask)
        features = torch.where(text.unsqueeze(-1), pad(features, (0, 0, 0, K - 1)), self.network.mask_features())
        window = Window(0, len(ids), pairs.unsqueeze(1) + columns, None, given["slots"].shape[0])
        _, last = self.layer(self.slots(given), ids, features, window)
        logits, term = self.logits(picked_columns(last, behind(only, K))), self.network.term(self.vocabulary)
        return from_one_pass(round, logits, self.branching, self.greedy, anchor, term)


class PEagle(Eagle):
    """A proposer that drafts k tokens from one pass over the pairs of the accepted tokens and k - 1 mask tokens.

    Without a Markov head, the distribution at depth j (0-based) depends on the text and j mask tokens, not on earlier
    drafts, so all nodes at one depth of a tree have the same distribution. The head adds a term for the preceding
    token. A round stores keys and values of mask tokens after the text's pairs; the next round overwrites them. A round
    drafts at most as many tokens as in training (`depths` of the config).

    network, int8: as in `Eagle`. greedy: whether to draft the likeliest tokens. shape: the tree to draft, as
    the parent of each node (-1 for the text); None for chains. Raises ValueError if the config has no `pard_token`.
    """

    network_class = PEagleNetwork
    network: PEagleNetwork
    drafting = PEagleDrafting
    one_pass = True

    def prepare(self) -> None:
        self.mask = self.network.mask
