"""Losses of whole texts, from the log-probabilities of the tokens that the target sampled.

logp, logq: log p(x) and log q(x) of each text's tokens, (B,T), or logq and logp (B,T,K) for proposers whose
distribution depends
on the depth: at a token, when a round that starts j tokens before it drafts it. k: draft length; lengths (B,) tokens
of each text. Each function returns a sum; `registry.Loss.over` says what it is divided by. Gradients reach q through
the chances of acceptance alone, so these losses want texts of the target itself: on others they teach what the target
would never emit. They say nothing of tokens that the text does not hold, and nothing where q is nearly 0: warm-start
with a divergence. Formulas in `cotrain.acceptance`.
"""

from torch import Tensor

from cotrain import acceptance
from cotrain.losses.divergences import tv
from cotrain.losses.registry import LOSSES, Loss, loss


@loss(over="texts")
def length(logp: Tensor, logq: Tensor, k: int, lengths: Tensor) -> Tensor:
    """Minus the expected tokens of a round by the token rule, averaged over a text's starts: `acceptance.length`."""
    return acceptance.length(acceptance.r_from(logp, logq), k, lengths).sum()


@loss(over="texts")
def length_block(logp: Tensor, logq: Tensor, k: int, lengths: Tensor) -> Tensor:
    """The same under block verification: `acceptance.length_block`."""
    return acceptance.length_block(acceptance.l_from(logp, logq), k, lengths).sum()


@loss(over="tokens")
def calls(logp: Tensor, logq: Tensor, k: int, lengths: Tensor) -> Tensor:
    """Expected target calls: over the tokens it is the inverse of tau, see `acceptance.calls`."""
    return acceptance.calls(acceptance.r_from(logp, logq), k, lengths).sum()


@loss(over="tokens")
def calls_block(logp: Tensor, logq: Tensor, k: int, lengths: Tensor) -> Tensor:
    """The same under block verification: the inverse of block tau, see `acceptance.calls_block`."""
    return acceptance.calls_block(acceptance.l_from(logp, logq), k, lengths).sum()


# total variation at each position, weighted by `acceptance.call_weights`: the slope of `calls` with less variance
LOSSES["calls_tv"] = Loss(tv, weighted=True)
