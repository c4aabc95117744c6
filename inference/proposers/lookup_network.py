"""What stands in a folder of look-up alone, in the place where other kinds have a network."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel


class LookupConfig(PretrainedConfig):
    """lookup: shortest, and the folder of a datastore or None."""

    model_type = "lookup"

    def __init__(self, lookup: Mapping[str, Any] | None = None, **other: Any) -> None:
        super().__init__(**other)
        self.lookup = dict(lookup or {})


class LookupNetwork(PreTrainedModel):
    """No weights: settings alone."""

    config_class = LookupConfig

    def __init__(self, config: LookupConfig) -> None:
        super().__init__(config)
        self.nothing = torch.nn.Parameter(torch.zeros(()), requires_grad=False)  # it has a device and a dtype
        self.generation_config = GenerationConfig()
        self.post_init()

    def get_input_embeddings(self) -> Any:
        """None."""
        return None

    def get_output_embeddings(self) -> Any:
        """None."""
        return None
