"""A draft that is told the temperature while it trains: each text is learnt at its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from cotrain.config.groups import Draft, Init
from cotrain.students.base import Guess, Seen
from cotrain.students.independent import Independent
from inference.proposers.conditioned import Conditioned as Proposer
from inference.proposers.conditioned_network import KNOTS, TABLE, Scale, conditioned, table_in


class Conditioned(Independent):
    """The student of `inference.proposers.conditioned`: an independent draft whose head reads its states times a scale
    of the temperature, learnt at those of draft.temperatures."""

    kind = "conditioned"
    takes = ("temperatures",)

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """As the independent draft's, with a scale of 1. draft.path may name a folder of either kind: one that was told
        temperatures keeps its scale. Raises ValueError naming the key that is wrong."""
        network = super().initial(draft, init, target)
        learnt = getattr(network.config, KNOTS, None)
        if learnt is not None and list(learnt) != list(draft.temperatures):
            raise ValueError(f"draft.temperatures: {draft.path} was told {learnt}: draft.temperatures={learnt}")
        try:
            conditioned(network, list(draft.temperatures))
        except ValueError as error:
            raise ValueError(f"draft.temperatures: {error}") from error
        if learnt is not None and not network.device.type == "meta":
            network.get_parameter(TABLE).data.copy_(table_in(str(draft.path)))
        return network

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        states = self.read(batch["ids"], batch.get("position_ids"))
        states = states * self._scale(batch["temperature"]).to(states)
        return [Guess.everywhere(states, self.head, tuple(self.network.get_output_embeddings().parameters()))]

    def _scale(self, temperature: Tensor) -> Tensor:
        """Of texts (B,), or of each of their tokens (B, T) -> (B, 1 or T, D)."""
        return Scale(self.network).at(temperature if temperature.ndim == 2 else temperature.unsqueeze(1))

    def proposer(
        self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False,
        shape: Sequence[int] | None = None,
    ) -> Proposer:  # fmt: skip
        return Proposer(self.network, greedy, compile=compile, int8=int8, shape=shape)
