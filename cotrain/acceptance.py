"""Expected target calls and tokens per call as functions of acceptance, the basis of the sequence losses.

The recursion is in `inference.verify.predict_chain`, because the exactness verdict needs it while serving. Its public
functions are re-exported here; shapes of r, l, k and lengths are the same.
"""

import torch
from torch import Tensor

from inference.verify.predict_chain import (
    calls_variance,
    calls_variance_block,
    conditional,
    expected_calls,
    expected_calls_block,
    l_from,
    prefix,
    r_from,
    reach,
    reach_block,
    tau,
    tau_block,
)
from inference.verify.predict_tree import calls_variance_tree, expected_calls_tree, reach_tree, tau_tree

__all__ = [
    "call_weights",
    "calls",
    "calls_block",
    "calls_variance",
    "calls_variance_block",
    "calls_variance_tree",
    "conditional",
    "expected_calls",
    "expected_calls_block",
    "expected_calls_tree",
    "iid_tau",
    "l_from",
    "length",
    "length_block",
    "prefix",
    "r_from",
    "reach_tree",
    "tau",
    "tau_block",
    "tau_tree",
]


def iid_tau(alpha: float, K: int) -> float:
    """Return tokens per target call if acceptances were independent with the same probability alpha. The value is
    sum_{i<=K} alpha^i = (1 - alpha^(K+1)) / (1 - alpha).

    Use it only as a sanity bound: if alpha varies, it is too low (Leviathan et al. 2023, arXiv 2211.17192).
    """
    return float(sum(alpha**i for i in range(K + 1)))


def length(r: Tensor, k: int | Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return minus the expected tokens of a round under the token rule, averaged over starts t < L -> (B,).

    The value is -mean_t (1 + sum_{n=1..k} prod_{j<n} r[t+j, j]), without tokens past the text's end. It is
    differentiable in r.
    """
    return _length(reach(r, k, lengths), lengths)


def length_block(l: Tensor, k: int | Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return `length` under block verification, from l = log q - log p of the text's tokens -> (B,). It is
    differentiable in l."""
    return _length(reach_block(l, k, lengths), lengths)


def calls(r: Tensor, k: int | Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the expected target calls of each text as a loss -> (B,), see `expected_calls`. It is differentiable in r.

    Unlike `length`, it weights each start by the probability that a round begins there.
    """
    return expected_calls(r, k, lengths)


def calls_block(l: Tensor, k: int | Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return `calls` under block verification, from l = log q - log p of the text's tokens -> (B,). It is
    differentiable in l."""
    return expected_calls_block(l, k, lengths)


def call_weights(r: Tensor, k: int | Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the number of target calls that a unit of acceptance saves at each token. It is -d calls / d r, detached,
    with the shape of r.

    If the loss `tv` is weighted with them at each position, its gradient is that of `calls` with alpha in place of the
    sampled ratio. alpha has less variance. For r (B,T) no weight is negative.
    """
    with torch.enable_grad():
        r = r.detach().requires_grad_()
        total = expected_calls(r, k, lengths).sum() + 0 * r.sum()  # a text of one token depends on no r
        (slope,) = torch.autograd.grad(total, r)
    return -slope


def _length(reach: Tensor, lengths: Tensor | None) -> Tensor:
    """Return minus the mean over t < L of sum_{n < L-t} reach_n. A round emits one token more than it accepts, so n
    counts from 0."""
    total, depths = reach.shape[1:]
    at = torch.arange(total, device=reach.device)
    end = torch.full_like(reach[:, 0, 0], total) if lengths is None else lengths.to(reach)
    inside = (at[:, None] + torch.arange(depths, device=reach.device)) < end[:, None, None]  # (B,T,K+1)
    return -(reach * inside).sum((1, 2)) / end.clamp(min=1)
