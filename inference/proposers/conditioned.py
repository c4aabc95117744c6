"""A draft that is told the temperature: one small causal LM for all rows, whatever temperature each is served at."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from inference.models.lm import LM
from inference.proposers.base import Host, Proposal, Round
from inference.proposers.conditioned_network import ConditionedNetwork, Scale, knots_of
from inference.proposers.growing import Shape
from inference.proposers.independent import Independent


class Conditioned(Independent):
    """Drafts as `Independent`; what the head reads of a row is multiplied by the scale of the row's own temperature.

    At temperature 0 the scale still chooses which token is the likeliest. model: with a scale, see
    `conditioned_network`; greedy, compile, int8, shape: as of `Independent`. Raises ValueError for a model without one.
    """

    network_class: Any = ConditionedNetwork
    scaled = True

    def __init__(
        self, model: PreTrainedModel, greedy: bool = False, *, compile: bool | None = None, int8: bool = False,
        shape: Shape = None,
    ) -> None:  # fmt: skip
        super().__init__(model, greedy, compile=compile, int8=int8, shape=shape)
        knots_of(model.config)
        self.scale_of: Scale
        self.written: Tensor | None = None  # the temperatures whose scales `LM.scale` holds

    def language_model(self, rows: int, vocabulary: int) -> LM | None:
        """None: its distribution depends on the row's temperature, which forced rounds know."""
        return None

    def open(self, host: Host) -> None:
        super().open(host)
        self.scale_of, self.written = Scale(self.model), None  # the model may have moved since the last call

    def propose(self, round: Round) -> Proposal:
        self._write(round.temperature)
        return super().propose(round)

    def _write(self, temperature: Tensor) -> None:
        """The scale of each row, to where passes read it: recorded ones too, so never to another tensor."""
        if temperature is not self.written:
            assert self.lm.scale is not None
            self.lm.scale[: len(temperature)].copy_(self.scale_of.at(temperature))
            self.written = temperature
