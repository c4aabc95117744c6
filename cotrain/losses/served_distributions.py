"""Logits to the log distributions that are sampled from: temperature, then the regime's cut.

n places, V vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor

from inference.sampling import Truncate, log_probs_at, one_hot, wide


class Distributions(Protocol):
    """The target's distributions of a batch of texts, see `cotrain.teacher.target_distributions`."""

    def logs(self, at: Tensor, logq: Tensor, temperature: Tensor, truncate: Truncate | None) -> Tensor:
        """log p as served at flat places at (n,), beside log q there (n,V); temperature (n,) -> (n,V)."""


def log_probs(logits: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / temperature) in float32 at least, (n,V) and (n,) -> (n,V); at 0 as at 1."""
    return log_probs_at(wide(logits), temperature.masked_fill(temperature == 0, 1.0).to(logits.device))


def greedy_probs(logs: Tensor, temperature: Tensor) -> Tensor:
    """The one-hot log distribution of the first maximum where the temperature is 0, else logs, (n,V)."""
    zero = temperature == 0
    if not bool(zero.any()):
        return logs
    return torch.where(zero[:, None], one_hot(logs.argmax(-1), logs).log(), logs)


def served(logs: Tensor, temperature: Tensor, truncate: Truncate | None) -> Tensor:
    """The log distribution that is sampled from, of log distributions (n,V) made at a temperature (n,) -> (n,V)."""
    logs = greedy_probs(logs, temperature)
    return logs if truncate is None else torch.log_softmax(truncate(logs), -1)
