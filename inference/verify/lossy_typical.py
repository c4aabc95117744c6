"""The rule `verify="lossy_typical"`. It changes the text's distribution, and reports about it say "exactness: no"."""

import torch
from torch import Tensor

from inference.sampling import at_ids, wide
from inference.verify.tree import TreeVerification, steps_of, subtrees, used, walk


def lossy_typical(
    p: Tensor,
    x: Tensor,
    parents: tuple[int, ...],
    k: Tensor | None = None,
    *,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> TreeVerification:
    """Verify a tree by the typical acceptance of Medusa (Cai et al. 2024, 2401.10774). It is NOT exact: its texts do
    not have the target's distribution.

    A node passes if p(x) > min(epsilon, delta exp(-H(p))) at its parent, with H the entropy in nats. The accepted path
    ends at the deepest node that passes with all its ancestors; of equally deep nodes, at the first. The next token has
    the distribution p after this node. No draft distribution and no random number is used.

    p (B, N+1, V): the target's distributions, after the anchor in column 0 and after node i in column i + 1. x (B, N):
    drafted ids. parents: node i has parent parents[i] < i, or -1 if its parent is the text's last token (the anchor). k
    (B,): number of nodes in use, None for all.
    """
    steps, there = steps_of(parents, x, by_level=True), used(x, k)
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(-1)
    probs = wide(p)[rows, torch.where(there, steps.parents + 1, 0)]  # (B, N, V)
    entropy = -torch.special.xlogy(probs, probs).sum(-1)
    likely = at_ids(probs, torch.where(there, x, 0))
    passed = there & (likely > (delta * (-entropy).exp()).clamp(max=epsilon))
    under = subtrees(steps)  # (1, N, N)
    whole = ~(under & ~passed.unsqueeze(-1)).any(1)  # (B, N) passed with all ancestors
    if not x.shape[1]:
        return walk(whole, wide(p), steps)
    end = (whole * under.sum(1)).argmax(-1)  # the first of the deepest
    return walk(whole & under.expand(x.shape[0], -1, -1)[rows.squeeze(-1), :, end], wide(p), steps)
