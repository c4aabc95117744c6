"""Expected target calls and tokens per target call as functions of acceptance. The sequence losses are built on them.

The recursion itself is in `inference.verify.predict_chain`, because the exactness verdict needs it while serving. Its
public functions are re-exported here. The shapes of r, l, k and lengths are the same as there.
"""

import torch
from torch import Tensor

from inference.verify.predict_chain import expected_calls, expected_calls_block, l_from, r_from, tau

__all__ = ["call_weights", "expected_calls", "expected_calls_block", "iid_tau", "l_from", "r_from", "tau"]


def iid_tau(alpha: float, K: int) -> float:
    """Return the tokens per target call at draft length K if every drafted token were accepted independently with
    probability alpha: sum_{i<=K} alpha^i = (1 - alpha^(K+1)) / (1 - alpha).

    Use it only as a sanity bound: if alpha varies between positions, the value is too low (Leviathan et al. 2023, arXiv
    2211.17192).
    """
    return float(sum(alpha**i for i in range(K + 1)))


def call_weights(r: Tensor, k: int | Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return how many target calls one more unit of acceptance saves at each token: -d calls / d r, detached, in the
    shape of r.

    r: the acceptance of each token. Shape (B, T), or (B, T, K) if it depends on the depth: entry (t, j) is token t as
    draft j (0-based) of the round that starts at t - j. k: draft length, at most K: an int, (B,), or (B, T) for the
    round that starts at t. lengths (B,): tokens in each text; None: T.

    With these weights at each position, the loss `tv` has the gradient of the calls with alpha in place of the sampled
    ratio r. The variance of alpha is lower. For r (B, T) no weight is negative. Raises ValueError as
    `expected_calls` does.
    """
    with torch.enable_grad():
        r = r.detach().requires_grad_()
        total = expected_calls(r, k, lengths).sum() + 0 * r.sum()  # a text of one token depends on no r
        (slope,) = torch.autograd.grad(total, r)
    return -slope
