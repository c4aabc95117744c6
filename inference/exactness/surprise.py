"""(e) of the verdict: whether the emitted texts are the target's own, from its surprise at their tokens.

Calls and acceptance are judged given the text, whatever distribution drew it: they do not see a last token of each
round that is drawn wrongly, nor coins that are the draft's own numbers. Given the text before, both of these have mean
0 if p drew x, and are uncorrelated from token to token, so that their sums over their standard deviations are about
normal: -log p(x) - H(p), of variance sum_v p log^2 p - H^2, which sees distributions that are sharper or flatter; and
where the middle of x lies in the distribution function, sum_{v<x} p_v + p_x / 2 - 1/2, of variance (1 - sum_v p^3) /
12, which sees draws that lean to one side of it.
"""

import math

import torch
from torch import Tensor

from inference.engine import Engine
from inference.exactness.teacher_forced import whole_texts
from inference.exactness.verdict import SurpriseCheck
from inference.measure.timing import Emitted
from inference.sampling import Sampling, probs


def check_surprise(engine: Engine, texts: Emitted, sampling: Sampling) -> SurpriseCheck:
    """Over all tokens of the texts, with p of transformers' own forward of each whole text: what is wrong with the
    engine's passes, late in a text too, is not in it."""
    sums, tokens, impossible = torch.zeros(5, dtype=torch.float64), 0, 0
    lm = engine.target
    for block in whole_texts(lm.model, texts.prompts, texts.tokens, sampling, lm.vocabulary):
        terms = moments(probs(block.logits, sampling), block.x)[block.valid]  # (n, 5)
        possible = terms[:, 0].isfinite()
        sums += terms[possible].sum(0).cpu()
        tokens, impossible = tokens + len(terms), impossible + int((~possible).sum())
    surprise, entropy, variance, place, spread = sums.tolist()
    count = max(tokens - impossible, 1)
    z, place_z = _sigmas(surprise - entropy, variance), _sigmas(place, spread)
    return SurpriseCheck(tokens, surprise / count, entropy / count, z, place_z, impossible)


def _sigmas(difference: float, variance: float) -> float:
    """0 where nothing was left to chance."""
    return difference / math.sqrt(variance) if variance > 0 else 0.0


def moments(p: Tensor, x: Tensor) -> Tensor:
    """-log p(x), H(p) and the variance of -log p under p; the place of x less 1/2, and its variance: distributions
    (..., V) and tokens x (...) -> (..., 5) float64."""
    x = x.unsqueeze(-1)
    logs, before = p.where(p > 0, 1.0).log(), torch.arange(p.shape[-1], device=p.device) < x
    entropy, square = (-(p * logs).sum(-1, dtype=torch.float64), (p * logs.square()).sum(-1, dtype=torch.float64))
    px = p.gather(-1, x).squeeze(-1).double()
    place = (p * before).sum(-1, dtype=torch.float64) + px / 2 - 0.5
    spread = (1 - p.pow(3).sum(-1, dtype=torch.float64)) / 12
    return torch.stack([-px.log(), entropy, square - entropy.square(), place, spread], -1)
