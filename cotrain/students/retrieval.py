"""Look-up without a model: settings, and no weights to train."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from cotrain.config.groups import Draft, Init
from cotrain.students.base import Guess, Seen, Student, refuse_keys
from inference.proposers.retrieval import LookupConfig, LookupNetwork, Retrieval

LAYOUTS = {"vllm": "cotrain.export.lookup_layout"}  # of look-up, alone or with a model


class RetrievalStudent(Student):
    """The student of `inference.proposers.retrieval`: it makes no guesses and learns nothing."""

    kind = "retrieval"
    takes = ("datastore", "shortest")
    trained = False
    layouts: Mapping[str, str] = LAYOUTS

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Its settings. Raises ValueError for draft.path, and as `lookup`."""
        refuse_keys(draft, "path")
        return LookupNetwork(LookupConfig(lookup(draft)))

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        """Raises ValueError."""
        raise ValueError("draft=retrieval is not trained")

    def proposer(self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False) -> Any:
        return Retrieval.of_settings(self.network.config.lookup)


def lookup(draft: Draft) -> dict[str, Any]:
    """The look-up settings of a config. Raises FileNotFoundError or ValueError for a folder that holds no datastore."""
    folder = str(Path(draft.datastore).resolve()) if draft.datastore else None
    settings = {"datastore": folder, "shortest": draft.shortest}
    Retrieval.of_settings(settings)
    return settings
