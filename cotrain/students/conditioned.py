"""A draft that depends on the temperature. It learns each text at that text's own temperature.

B texts, T tokens, D width.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from cotrain.config.drafts import Draft
from cotrain.config.groups import Init
from cotrain.losses.guess import sent
from cotrain.students.base import Guess, Seen
from cotrain.students.independent import IndependentStudent
from inference.proposers.conditioned import KNOTS, TABLE, Scale, conditioned, table_in


class ConditionedStudent(IndependentStudent):
    """Trains the draft that `inference.proposers.conditioned` serves: an independent draft whose states are multiplied
    by a scale before its head reads them. The scale depends on the temperature, and is learnt at
    draft.temperatures=."""

    kind = "conditioned"
    sourced = False
    begins_with = ("independent", "hybrid", "parallel")

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Return an independent draft's network, with a scale of 1 at all temperatures or, if draft.path= is a
        conditioned draft, with its learnt scale. Raises ValueError, which names the key to change."""
        network = super().initial(draft, init, target)
        learnt = getattr(network.config, KNOTS, None)
        if learnt is not None and list(learnt) != draft.temperatures:
            raise ValueError(f"draft.temperatures: {draft.path} has learnt {learnt}: set draft.temperatures={learnt}")
        try:
            conditioned(network, draft.temperatures)
        except ValueError as error:
            raise ValueError(f"draft.temperatures: {error}") from error
        if learnt is not None and not network.device.type == "meta":
            network.get_parameter(TABLE).data.copy_(table_in(str(draft.path)))
        return network

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        states = self.read(batch["ids"], batch.get("position_ids"))
        states = states * self._scale(sent(batch["temperature"], states.device)).to(states)
        return [self.everywhere(states)]

    def _scale(self, temperature: Tensor) -> Tensor:
        """Return the factor of the states at each temperature: (B, 1, D) for temperatures (B,) of texts, (B, T, D) for
        temperatures (B, T) of tokens."""
        return Scale(self.network).at(temperature if temperature.ndim == 2 else temperature.unsqueeze(1))
