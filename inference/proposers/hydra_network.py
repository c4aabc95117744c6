"""The network of sequential draft heads (Hydra, Ankner et al. 2024, 2402.05109), as it is trained and served.

Head j guesses the token j + 2 places behind the one whose state it reads, as in `medusa_network`, and reads besides the
embeddings of the j + 1 tokens between: the anchor and the drafts before its own. Logits are made by the target's head.

K heads, D width of the target's states, N states. What a token is to heads i, i + 1, ... is one product: token i, the
anchor being token 0, adds to what all heads read that come behind it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inference.proposers.medusa_network import Heads, MedusaConfig


class HydraConfig(MedusaConfig):
    """num_hidden_layers: hidden layers of each head, always 1."""

    model_type = "hydra"

    def __init__(self, **settings: Any) -> None:  # transformers would make one of its own
        super().__init__(**settings)


class HydraNetwork(Heads):
    """Head j of state s and embeddings e_0 .. e_j, each scaled to a mean square of 1: s + U_j silu(W_j s + b_j +
    sum_i V_ij e_i). U is zero at first: every head then says what the target's own head says of the state.

    state, out (K, D, D); bias (K, D); tokens (K (K + 1) / 2, D, D): V_ij, by i, then by j >= i.
    """

    config_class = HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        K, D = config.num_heads, config.hidden_size
        self.state = nn.Parameter(torch.empty(K, D, D).normal_(std=D**-0.5))
        self.bias = nn.Parameter(torch.zeros(K, D))
        self.tokens = nn.Parameter(torch.empty(K * (K + 1) // 2, D, D).normal_(std=D**-0.5))
        self.out = nn.Parameter(torch.zeros(K, D, D))
        self.post_init()

    def begun(self, newest: Tensor, heads: int) -> Tensor:
        """newest (N, D) -> what the first `heads` heads read of the states alone (heads, N, D)."""
        x = newest.to(self.state.dtype).expand(heads, *newest.shape)
        return torch.baddbmm(self.bias[:heads].unsqueeze(1), x, self.state[:heads].transpose(1, 2))

    def read(self, sums: Tensor, embedded: Tensor, i: int) -> Tensor:
        """What heads i, i + 1, ... read (n, N, D) with token i too, of embeddings (N, D) or (n, N, D)."""
        first = i * self.depths - i * (i - 1) // 2
        e = F.rms_norm(embedded.to(self.tokens.dtype), embedded.shape[-1:]).expand(sums.shape)
        return torch.baddbmm(sums, e, self.tokens[first : first + len(sums)].transpose(1, 2))

    def head_states(self, sums: Tensor, newest: Tensor, j: int) -> Tensor:
        """Of head j, which has read all its tokens, sums and newest (N, D) -> what the target's head reads (N, D)."""
        return torch.addmm(newest.to(self.out.dtype), F.silu(sums), self.out[j].T)
