"""The network of Medusa heads (Cai et al. 2024, 2401.10774), as it is trained and served.

Head j guesses the token j + 2 places behind the one whose state it reads: a round's newest state is that of the token
before the anchor, so head 0 guesses the first new token. A head is residual blocks over the state; the target's own
head makes its logits. Heads do not see the anchor, nor each other's drafts.

K heads, L blocks of each, D width of the target's states, N states.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from inference.drafts.compatibility import same_sizes


class MedusaConfig(PretrainedConfig):
    """hidden_size D and vocab_size of the target; num_heads K; num_hidden_layers L. vLLM's keys."""

    model_type = "medusa"

    def __init__(
        self, hidden_size: int = 16, vocab_size: int = 32, num_heads: int = 4, num_hidden_layers: int = 1, **other: Any
    ) -> None:
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_heads, self.num_hidden_layers = num_heads, num_hidden_layers
        super().__init__(**{"tie_word_embeddings": False} | other)


class Heads(PreTrainedModel):
    """What draft heads of every kind have in common: the sizes of their target, and no embeddings of their own."""

    base_model_prefix = ""

    def get_input_embeddings(self) -> Any:
        """None: they read the target's states."""
        return None

    def get_output_embeddings(self) -> Any:
        """None: the target's head makes their logits."""
        return None

    def _init_weights(self, module: nn.Module) -> None:
        """Weights are made as they begin."""

    @property
    def depths(self) -> int:
        """Drafts of a round at most."""
        return int(self.config.num_heads)

    def fits(self, target: PreTrainedModel, where: str) -> None:
        """Raise ValueError, beginning with `where`, for a target of other sizes than the heads were made for."""
        same_sizes(self.config, target, where)


class MedusaNetwork(Heads):
    """weight (K, L, D, D), bias (K, L, D): x + silu(W x + b), block after block. Zeros at first: every head then says
    what the target's own head says of the state."""

    config_class = MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        count = config.num_heads, config.num_hidden_layers
        self.weight = nn.Parameter(torch.zeros(*count, config.hidden_size, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(*count, config.hidden_size))
        self.post_init()

    def states(self, newest: Tensor, heads: int) -> Tensor:
        """newest (N, D) -> what the target's head reads for the first `heads` heads (heads, N, D), in one batched
        product a block."""
        x = newest.to(self.weight.dtype).expand(heads, *newest.shape)
        for weight, bias in zip(self.weight[:heads].unbind(1), self.bias[:heads].unbind(1), strict=True):
            x = x + F.silu(torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2)))
        return x
