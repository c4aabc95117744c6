"""RUT, the rank-based uniformity test of Zhu et al. (arXiv 2506.06975), to compare the audit with.

Of each prompt a server gives one text, and the target gives N references. A text's score is the mean of log r over its
tokens, where r is the token's rank (1: the likeliest) under the target. If the server has the target, the rank of its
text's score among the references' is uniform; the test is Cramér and von Mises's. Ties are drawn. Here a rank is
(references below + u (references equal + 1)) / (N + 1), which is uniform for each N, not for a large one alone.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

STEPS = 2000  # of the integral over each of PIECES intervals
PIECES = 4


@torch.inference_mode()
def log_ranks(model: PreTrainedModel, prompt: list[int], texts: Sequence[list[int]]) -> Tensor:
    """Return the score (N,) of N texts of a prompt, each with at least one token."""
    length = max(map(len, texts))
    after = torch.tensor([[*text, *[0] * (length - len(text))] for text in texts])
    ids = torch.cat([torch.tensor([prompt]).expand(len(texts), -1), after], 1)
    logits = model(ids[:, :-1]).logits[:, len(prompt) - 1 :]  # padding comes after the text, and changes none of them
    ranks = (logits > logits.gather(-1, after.unsqueeze(-1))).sum(-1) + 1
    inside = torch.tensor([[j < len(text) for j in range(length)] for text in texts])
    return (ranks.double().log() * inside).sum(-1) / inside.sum(-1)


def uniform_rank(score: Tensor, references: Tensor, u: Tensor) -> Tensor:
    """Return the rank (n,) in [0, 1] of scores (n,) among references (n, N). u (n,): uniform."""
    below, equal = (found.sum(-1) for found in (references < score[:, None], references == score[:, None]))
    return (below + u * (equal + 1)) / (references.shape[-1] + 1)


def cramer_von_mises(ranks: Tensor) -> float:
    """Return the statistic of ranks (n,): n times the integral of the squared distance to the uniform distribution."""
    n = len(ranks)
    middle = (2 * torch.arange(1, n + 1, dtype=torch.float64) - 1) / (2 * n)
    return 1 / (12 * n) + float((ranks.double().sort().values - middle).square().sum())


def tail(statistic: float) -> float:
    """Return the probability of a larger statistic of many uniform ranks, by Smirnov's formula: 1 / pi times the sum
    over j, with alternating signs, of the integrals over y from ((2j - 1) pi)^2 to (2j pi)^2 of exp(-y s / 2)
    sqrt(-sqrt(y) / sin sqrt(y)) / y. Here sqrt(y) = (2j - 1) pi + pi sin^2(a), which has no poles at the ends."""
    a = (torch.arange(STEPS, dtype=torch.float64) + 0.5) * (math.pi / 2 / STEPS)
    total = 0.0
    for j in range(1, PIECES + 1):
        t = (2 * j - 1) * math.pi + math.pi * a.sin().square()
        root = (t / (math.pi * a.sin().square()).sin()).sqrt()  # -sin t = sin(pi sin^2 a) for odd multiples of pi
        terms = 2 / t * root * (-statistic * t.square() / 2).exp() * (2 * math.pi * a.sin() * a.cos())
        total += (-1) ** (j + 1) * float(terms.sum()) * (math.pi / 2 / STEPS)
    return min(max(total / math.pi, 0.0), 1.0)
