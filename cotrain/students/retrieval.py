"""Look-up alone: there is nothing to train, what there is to know is how it is set."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from cotrain.config.settings import Draft, Init
from cotrain.students.base import Guess, Seen
from cotrain.students.hybrid import lookup
from inference.proposers.retrieval import Retrieval as Serving


class LookupConfig(PretrainedConfig):
    """lookup: shortest, and the folder of a datastore or None."""

    model_type = "lookup"

    def __init__(self, lookup: Mapping[str, Any] | None = None, **other: Any) -> None:
        super().__init__(**other)
        self.lookup = dict(lookup or {})


class Lookup(PreTrainedModel):
    """No weights: settings alone, in the place where other kinds have a network."""

    config_class = LookupConfig

    def __init__(self, config: LookupConfig) -> None:
        super().__init__(config)
        self.nothing = torch.nn.Parameter(torch.zeros(()), requires_grad=False)  # it has a device and a dtype
        self.generation_config = GenerationConfig()
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return None

    def get_output_embeddings(self) -> Any:
        return None


class Retrieval:
    """The student of `inference.proposers.retrieval`: it makes no guesses and learns nothing (`base.UNTRAINED`)."""

    kind = "retrieval"
    reads: tuple[int, ...] = ()

    def __init__(
        self, network: PreTrainedModel, target: PreTrainedModel | None = None, vocabulary: int | None = None
    ) -> None:
        self.network, self.vocabulary = network, vocabulary

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Its settings. Raises FileNotFoundError or ValueError for a datastore that is none."""
        return Lookup(LookupConfig(lookup(draft)))

    def of(self, network: PreTrainedModel) -> "Retrieval":
        return Retrieval(network, vocabulary=self.vocabulary)

    def refuse(self) -> None: ...

    def keeps_apart(self) -> bool:
        return True

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        """Raises ValueError: there are none to learn from."""
        raise ValueError("draft=retrieval is not trained")

    def proposer(self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False) -> Any:
        return Serving.of_settings(self.network.config.lookup)

    def save(self, folder: Path) -> None:
        self.network.save_pretrained(folder)

    @classmethod
    def load(cls, folder: Path, target: PreTrainedModel | None = None, vocabulary: int | None = None) -> "Retrieval":
        return cls(Lookup.from_pretrained(folder, dtype=torch.float32), target, vocabulary)
