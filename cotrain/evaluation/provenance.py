"""Whether texts were sampled from the target: their mean negative log-likelihood beside the entropy of its
distributions."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cotrain import losses
from cotrain.evaluation.held_out import HeldOut
from cotrain.losses.chunked import CHUNK
from cotrain.losses.served_distributions import log_probs, served
from cotrain.teacher.target_distributions import Head

IMPOSSIBLE, SIGMAS = 0.02, 6.0  # kernels differ a little between machines: what is refused differs much


@dataclass(frozen=True)
class Provenance:
    """Over N tokens, in nats: the mean of -log p(x), and of the entropy of p, its expectation had p drawn x; z: their
    difference over its standard deviation. impossible: share of tokens that p gives no mass, left out of the means."""

    tokens: int
    surprise: float
    entropy: float
    z: float
    impossible: float

    @property
    def own(self) -> bool:
        """Whether the texts may be the target's."""
        return abs(self.z) < SIGMAS and self.impossible < IMPOSSIBLE

    def line(self) -> str:
        return (f"the target's surprise at them is {self.surprise:.2f} nats a token, at its own it would be "
                f"{self.entropy:.2f} (z = {self.z:+.0f}, {self.tokens} tokens, {100 * self.impossible:.1f} % of them "
                "impossible)")  # fmt: skip


@torch.no_grad()
def provenance(held: HeldOut, head: Head, device: torch.device | str = "cpu", batch: int = 16) -> Provenance:
    """Of the sampled tokens of texts that the target has read, in their regime; head: of the target, on a device.

    Given the text before, -log p(x) - H(p) has mean 0 and variance sum_v p log^2 p - H^2 if p drew x, and such
    differences are uncorrelated: then z is about standard normal.
    """
    parts = []
    for at in torch.arange(len(held.texts)).split(batch):
        inside, x = held.texts.predicted[at], held.texts.ids[at, 1:]
        chunks = zip(held.hidden[at][inside].split(CHUNK), x[inside].split(CHUNK), strict=True)
        parts += [_found(head(states.to(device)), x, held).double().cpu() for states, x in chunks]
    found = torch.cat(parts)  # (N, 3)
    possible = found[:, 0].isfinite()
    sums, count = found[possible].sum(0), max(int(possible.sum()), 1)
    spread = math.sqrt(max(float(sums[2]), 0.0))
    z = float(sums[0] - sums[1]) / spread if spread else 0.0
    return Provenance(
        len(found), float(sums[0]) / count, float(sums[1]) / count, z, 1 - float(possible.double().mean())
    )


def _found(logits: Tensor, x: Tensor, held: HeldOut) -> Tensor:
    """-log p(x), H(p) and the variance of -log p under p, of logits (n, V) and tokens x (n,) -> (n, 3)."""
    t, x = torch.full((len(x),), held.temperature, device=logits.device), x.to(logits.device)
    logs = served(log_probs(logits, t), t, held.truncate)
    entropy = losses.entropy(logs)
    square = (logs.exp() * logs.masked_fill(logs == -math.inf, 0.0).square()).sum(-1)
    return torch.stack([-logs.gather(-1, x[:, None])[:, 0], entropy, square - entropy.square()], -1)
