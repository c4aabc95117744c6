"""How far joint training moved a target away from the original, on held-out texts, with a certificate that the KL is
within a bound.

The figures are for plain next-token distributions at temperature 1, whatever the regime. Texts count as clusters:
tokens of one text depend on each other, so a bound on the mean KL treats each text as one draw.

N tokens in all texts, M texts, T tokens of the longest text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cotrain.data.texts import Texts
from cotrain.evaluation.divergence import Decode
from cotrain.losses import divergences
from cotrain.losses.chunked import chunk_positions
from cotrain.teacher.target_model import Head, Reader
from inference.models.passes import LAST
from inference.sampling import at_ids, wide

# of a bound: what reports say, and what is computed, since the KL of texts is skewed: a bound computed at .99 covers
# .94 to .99 of samples of 12 to 36 texts with lognormal means (deviation .8)
CLAIMED, CONFIDENCE = 0.95, 0.99
SHARES = (0.001, 0.01, 0.1)  # of the tokens, those of the largest KL, whose share of the whole KL is reported
TOP = 12  # tokens that are shown with the largest mean KL


@dataclass(frozen=True)
class Movement:
    """How a target's distributions moved, at each of N tokens.

    kl: KL(original || moved) in nats. reverse: KL(moved || original) in nats.
    same: 1 if both have the same most probable token, else 0.
    original, moved: the log-probability of the text's token under each target. token: its id.
    text: the index of the token's text. All of these are (N,).
    domain: the domain of each of the M texts.
    """

    kl: Tensor
    reverse: Tensor
    same: Tensor
    original: Tensor
    moved: Tensor
    token: Tensor
    text: Tensor
    domain: Sequence[str]

    def bound(self, confidence: float) -> float:
        """Return an upper confidence bound on the mean KL(original || moved) in nats, with texts as clusters; infinite
        for fewer than two texts. confidence: in (.5, 1)."""
        return upper_bound(self.kl, self.text, confidence)


@torch.no_grad()
def movement(original: tuple[Reader, Head], moved: tuple[Reader, Head], texts: Texts, batch: int = 8) -> Movement:
    """Return how the distributions moved on the tokens after the texts' prompts. original, moved: each target as two
    functions, ids (B, T) -> states (B, T, D) by layer and last states -> logits (`target_model.served`). batch: texts
    per pass."""
    parts: list[list[Tensor]] = []
    for rows in torch.arange(len(texts)).split(batch):
        ids, places, *_ = texts.read(rows)
        inside = texts.predicted[rows]
        both = [(read(ids.long(), places)[LAST][:, :-1][inside], head) for read, head in (original, moved)]
        token, text = ids[:, 1:][inside], rows.unsqueeze(1).expand(inside.shape)[inside]
        vocabulary = moved[1](both[1][0][:1]).shape[-1]
        for at in torch.arange(len(token)).split(chunk_positions(vocabulary, both[1][0].device.type)):
            p, new = (torch.log_softmax(wide(head(states[at])), -1) for states, head in both)
            x = token[at].long().to(p.device)
            figures = [
                divergences.kl(p, new),
                divergences.kl(new, p),
                (p.argmax(-1) == new.argmax(-1)).to(p),
                at_ids(p, x),
                at_ids(new, x),
            ]
            parts.append([*(one.cpu() for one in figures), token[at], text[at]])
    kl, reverse, same, one, other, tokens, text = (torch.cat(column) for column in zip(*parts, strict=True))
    return Movement(kl, reverse, same, one, other, tokens, text, texts.domain)


def upper_bound(values: Tensor, text: Tensor, confidence: float) -> float:
    """Return an upper confidence bound on the mean of `values` (N,). text (N,): the index of each token's text.
    confidence: in (.5, 1). Infinite for fewer than two texts.

    The bound is the mean over all tokens, plus Student's quantile times the standard error (from leaving out one text
    at a time), plus Johnson's correction for skewness (1978, JASA 73, 536) if this is positive. The KL of texts is
    skewed, so the interval without the correction covers less than it claims.
    """
    _, at = text.unique(return_inverse=True)
    sums, counts = (
        torch.zeros(int(at.max()) + 1, dtype=torch.float64).index_add_(0, at, part.double())
        for part in (values, torch.ones_like(values))
    )
    count = len(sums)
    if count < 2:
        return math.inf
    without = (sums.sum() - sums) / (counts.sum() - counts)
    effect = (count - 1) * (without.mean() - without)  # of each text on the mean; their mean is 0
    variance = effect.square().sum() / (count - 1)
    if not float(variance):
        return float(sums.sum() / counts.sum())
    quantile = student_quantile(confidence, count - 1)
    skewed = effect.pow(3).mean() * (1 + 2 * quantile**2) / (6 * variance * count)
    return float(sums.sum() / counts.sum() + quantile * (variance / count).sqrt() + skewed.clamp(min=0))


def student_quantile(confidence: float, freedom: int) -> float:
    """Return Student's quantile for a confidence above .5. It is computed by numerical integration of P(|t| <= x) in
    double precision. freedom: degrees of freedom."""
    angle = torch.linspace(0, math.pi / 2, 200_001, dtype=torch.float64)  # t = sqrt(freedom) * tan(angle)
    density = angle.cos().pow(freedom - 1)
    mass = torch.cumulative_trapezoid(density, angle)
    share = mass / mass[-1]  # P(|t| <= sqrt(freedom) tan(angle))
    at = int(torch.searchsorted(share, 2 * confidence - 1))
    return math.sqrt(freedom) * math.tan(float(angle[at + 1]))


def movement_figures(one: Movement, confidence: float, decode: Decode) -> dict[str, Any]:
    """Return the figures of a movement for reports: KL in both directions (mean, bound, 99.9th percentile), also by
    domain; how often both targets have the same most probable token; and how the KL is distributed over tokens.

    one: the movement. confidence: the level of the bound, in (.5, 1). decode: token ids -> text.
    """
    of_text = [one.domain[text] for text in one.text.tolist()]
    domains = {}
    for name in sorted(set(one.domain)):
        inside = torch.tensor([domain == name for domain in of_text])
        if bool(inside.any()):
            domains[name] = _summary(one, inside)
    return _summary(one, torch.ones(len(one.kl), dtype=torch.bool)) | {
        "bound": one.bound(confidence),
        "domains": domains,
        "lorenz": _lorenz(one.kl),
        "tokens_moved": _most_moved(one, decode),
    }


def _summary(one: Movement, inside: Tensor) -> dict[str, Any]:
    kl = one.kl[inside].double()
    return {
        "tokens": int(inside.sum()),
        "kl": float(kl.mean()),
        "reverse_kl": float(one.reverse[inside].double().mean()),
        "kl_999": float(np.quantile(kl.numpy(), 0.999)),  # torch's quantile has a limit of 2**24 values
        "same_top": float(one.same[inside].double().mean()),
        "nats": [float(-logs[inside].double().mean()) for logs in (one.original, one.moved)],
    }


def _lorenz(kl: Tensor) -> dict[str, float]:
    """Return, for each share s of SHARES, the part of the total KL that falls on the fraction s of tokens with the
    largest KL, keyed by s as text. kl (N,)."""
    ordered = kl.double().sort(descending=True).values.cumsum(0)
    return {
        f"{share:g}": float(ordered[max(int(share * len(kl)), 1) - 1] / ordered[-1].clamp(min=1e-300))
        for share in SHARES
    }


def _most_moved(one: Movement, decode: Decode) -> list[dict[str, Any]]:
    """Return the `TOP` token ids with the largest KL, summed over the positions that predict them, as entries of the
    report. decode: token ids -> text."""
    size = int(one.token.max()) + 1
    sums = torch.zeros(size, dtype=torch.float64).index_add_(0, one.token.long(), one.kl.double())
    counts = torch.bincount(one.token.long(), minlength=size)
    top = sums.topk(min(TOP, size)).indices.tolist()
    return [
        {
            "token": decode([token]),
            "share": float(sums[token] / sums.sum().clamp(min=1e-300)),
            "mean": float(sums[token] / counts[token].clamp(min=1)),
            "count": int(counts[token]),
        }
        for token in top
        if counts[token]
    ]
