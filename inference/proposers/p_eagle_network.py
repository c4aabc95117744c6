"""The network of a feature draft that guesses all tokens of a round in one pass (P-EAGLE, 2602.01469), as it is trained
and served.

It is that of `eagle_network` with one vector more. Behind the text's last pair stand masks: pairs that put the learnt
`mask_hidden` in place of the target's states, and a token of the vocabulary, `pard_token`, in place of the next one.
Names and shapes are those that vLLM loads.

H width of the target's states and of the draft.
"""

from typing import Any

import torch
from torch import Tensor, nn

from inference.proposers.eagle_network import EagleConfig, EagleNetwork


class PEagleConfig(EagleConfig):
    """As `EagleConfig`; pard_token: the id whose embedding a mask has, None until a student names it."""

    def __init__(self, pard_token: int | None = None, **settings: Any) -> None:
        self.pard_token = pard_token
        super().__init__(**settings)


class PEagleNetwork(EagleNetwork):
    """mask_hidden (3H,): the states of a mask, which `fc` joins as it does the target's. It begins with the size of
    states, near 1: behind `fc` stands a norm, whose slopes are the larger the smaller it is."""

    config_class: Any = PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(self.fc.in_features))

    @property
    def mask(self) -> int:
        """The id that stands at a mask. Raises ValueError where the config names none."""
        if self.config.pard_token is None:
            raise ValueError("config.json: a p_eagle draft names pard_token, the id that it reads as a mask")
        return int(self.config.pard_token)

    def mask_features(self) -> Tensor:
        """(H,): what stands for the features of a mask's pair."""
        found: Tensor = self.fc(self.mask_hidden)
        return found
