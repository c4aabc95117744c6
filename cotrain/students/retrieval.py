"""Look-up alone: no trained weights, settings alone."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from cotrain.config.groups import Draft, Init
from cotrain.students.base import Guess, Seen, Student, refuse_keys
from cotrain.students.hybrid import lookup
from inference.proposers.lookup_network import LookupConfig, LookupNetwork
from inference.proposers.retrieval import Retrieval as Serving


class Retrieval(Student):
    """The student of `inference.proposers.retrieval`: it makes no guesses and learns nothing (`base.UNTRAINED`)."""

    kind = "retrieval"
    takes = ("datastore", "shortest")

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Its settings. Raises FileNotFoundError or ValueError for a datastore that is none, or weights."""
        refuse_keys(draft, "path")
        return LookupNetwork(LookupConfig(lookup(draft)))

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        """Raises ValueError: there are none to learn from."""
        raise ValueError("draft=retrieval is not trained")

    def proposer(self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False) -> Any:
        return Serving.of_settings(self.network.config.lookup)
