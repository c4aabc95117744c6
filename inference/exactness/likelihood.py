"""Check (e) of the verdict: the emitted tokens must be as likely under the target as tokens drawn from it.

Checks (b) and (c) are conditional on the text, whatever distribution it was drawn from. So they miss a wrong draw of
each round's last token, and acceptance tests that reuse the drafts' random numbers. Two statistics of a token x detect
these faults:

-log p(x) - H(p), of variance sum_v p log^2 p - H^2: is large if the distribution was sharper or flatter than p
sum_{v<x} p_v + p_x / 2 - 1/2, of variance (1 - sum_v p^3) / 12: is large if draws favour low or high ids

If x was drawn from p, both have mean 0 given the text before it, and are uncorrelated between tokens. So each sum over
a text, divided by its standard deviation, is about normal.
"""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.engine import Engine
from inference.exactness.teacher_forced import whole_texts
from inference.models import llama, packing
from inference.models.lm import LM
from inference.models.pretrained import cast
from inference.output import Emitted
from inference.sampling import Sampling, at_ids, probs, up_to

SIGMAS, IMPOSSIBLE = 5, 0.02  # log probabilities have heavy tails, and rounding changes which tokens are cut


@dataclass(frozen=True)
class LikelihoodCheck:
    """The result of check (e) over `tokens` emitted tokens.

    surprise, entropy: means of -log p(x) and of the entropy of p, in nats per token. They are equal in expectation if x
    was drawn from p. z: surprise - entropy, in standard deviations of their sums. place_z: the sum over tokens of
    sum_{v<x} p_v + p_x / 2 - 1/2, in standard deviations; it is large if draws favour low or high ids. impossible:
    number of tokens whose probability under p is 0; the means omit them. Rounding causes a few of them, at a tie or at
    the edge of top-k, top-p or min-p.
    """

    tokens: int
    surprise: float
    entropy: float
    z: float
    place_z: float
    impossible: int

    @property
    def passed(self) -> bool:
        likely = max(abs(self.z), abs(self.place_z)) < SIGMAS
        return likely and self.impossible <= IMPOSSIBLE * self.tokens

    def line(self) -> str:
        """Return this check's numbers as one sentence. `Verdict.lines` appends whether the check passed."""
        return (
            f"likelihood of the emitted tokens under the target: {self.surprise:.3f} nats per token, "
            f"{self.entropy:.3f} expected (z {self.z:+.2f}; for the distribution function at the tokens "
            f"z {self.place_z:+.2f}); {self.impossible} of {self.tokens} tokens have probability 0"
        )


def check_likelihood(engine: Engine, texts: Emitted, sampling: Sampling) -> LikelihoodCheck:
    """Return the result of check (e) over all tokens of the texts. p comes from transformers' own forward of each whole
    text (`as_served`), so faults of the engine's passes do not affect it. engine: has the target. sampling: the
    settings of the run that emitted the texts."""
    sums, tokens, impossible = torch.zeros(5, dtype=torch.float64), 0, 0
    lm = engine.target
    for block in whole_texts(as_served(lm), texts.prompts, texts.tokens, sampling, lm.vocabulary):
        terms = moments(probs(block.logits, sampling), block.x)[block.valid]  # (n, 5)
        possible = terms[:, 0].isfinite()
        sums += terms[possible].sum(0).cpu()
        tokens, impossible = tokens + len(terms), impossible + int((~possible).sum())
    surprise, entropy, variance, middle, spread = sums.tolist()
    count = max(tokens - impossible, 1)
    z, middle_z = _sigmas(surprise - entropy, variance), _sigmas(middle, spread)
    return LikelihoodCheck(tokens, surprise / count, entropy / count, z, middle_z, impossible)


def as_served(lm: LM) -> PreTrainedModel:
    """Return a model whose own forward rounds as the passes of an LM do: the LM's model; or, if packed weights serve a
    model in half precision, a copy in float32, with the numbers of the rounded copy if weights are in 8 bits, and with
    products that round what they multiply if the LM's do."""
    model = lm.model
    if lm.dtype == model.dtype:
        return model
    copied = cast(copy.deepcopy(model), torch.float32)
    if lm.weights == "int8":
        return llama.in_int8_rows(copied)
    if packing.rounds(model.dtype):
        for module in copied.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda _, given: (given[0].bfloat16().float(),))
    return copied


def _sigmas(difference: float, variance: float) -> float:
    return difference / math.sqrt(variance) if variance > 0 else 0.0


def moments(p: Tensor, x: Tensor) -> Tensor:
    """Return five numbers per token, (..., 5) float64: -log p(x); the entropy H(p); the variance of -log p; sum_{v<x}
    p_v + p_x / 2 - 1/2; and the variance of this number. p: distributions (..., V). x: tokens (...)."""
    logs, before = p.where(p > 0, 1.0).log(), up_to(x, p.shape[-1])
    entropy, square = (-(p * logs).sum(-1, dtype=torch.float64), (p * logs.square()).sum(-1, dtype=torch.float64))
    px = at_ids(p, x).double()
    middle = (p * before).sum(-1, dtype=torch.float64) + px / 2 - 0.5
    spread = (1 - p.pow(3).sum(-1, dtype=torch.float64)) / 12
    return torch.stack([-px.log(), entropy, square - entropy.square(), middle, spread], -1)
