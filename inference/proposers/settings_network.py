"""What stands in a folder of settings alone, in the place where other kinds have a network."""

from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel


class SettingsNetwork(PreTrainedModel):
    """No weights: settings alone. A kind names the class of its config."""

    def __init__(self, config: PretrainedConfig) -> None:
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
