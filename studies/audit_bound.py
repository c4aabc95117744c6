"""The most that any test of the texts can see of block's tests with token's residual, the fault that the audit misses.

    python -m studies.audit_bound outputs/results/audit_bound.json outputs/audited/draft

A round that starts at token s and ends after n < k accepted drafts draws the next token from the residual (w p - q)+,
with w = min(1, w p / q) over the drafts; the fault draws it from (p - q)+. Given the text, a round starts at s with the
probability of `predict_chain.round_starts` and ends there with probability prod(q / p) sum (w p - q)+. So the fault
moves the distribution of token t by D_t, a sum over n, and no test of N texts' tokens has a larger expected standard
score than sqrt(sum_t sum_v D_t^2 / p_t) (Neyman and Pearson): the test that knows the fault and all distributions.
"""

import json
import math
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from inference.drafts.atomic import write_atomic
from inference.exactness.audit import LEVEL, SPREAD, SURE
from inference.measure.environment import environment
from inference.verify import predict_chain
from inference.verify.rules import RULES
from studies.audit import NEW, REGIME, Runs
from studies.audit import K as DRAFTS

TEXTS, TOKENS = 24, 20_000


def moved(p: Tensor, q: Tensor, x: Tensor, k: int) -> Tensor:
    """Return D (T, V) of a text. p, q (T, V), float64: of target and draft. x (T,): its tokens. k: drafts a round."""
    px, qx = (probs.gather(-1, x.unsqueeze(-1)).squeeze(-1) for probs in (p, q))
    reach = predict_chain.reach_block((qx / px).log()[None], k)
    starts = predict_chain.round_starts(reach)[0]
    total, residual = torch.zeros_like(p), (p - q).clamp(min=0)
    residual = residual / residual.sum(-1, keepdim=True).clamp(min=1e-300)
    w, ratio = torch.ones_like(px), torch.ones_like(px)  # of the round that starts at each token, after n drafts
    for n in range(1, k):
        at = torch.arange(n, len(x))  # the token after n drafts; its round starts at `at - n`
        w = (w[: len(at)] * px[at - 1] / qx[at - 1]).clamp(max=1)
        ratio = ratio[: len(at)] * qx[at - 1] / px[at - 1]
        right = (w[:, None] * p[at] - q[at]).clamp(min=0)
        ends = (starts[at - n] * ratio)[:, None]
        total[at] += ends * (right.sum(-1, keepdim=True) * residual[at] - right)
    return total


def main() -> None:
    runs = Runs(TEXTS * NEW, Path(sys.argv[2]), 1)
    run = runs.sampled(RULES["token"], 1, draft=False)
    size, variation, tokens = 0.0, 0.0, 0
    for _, one in runs.served(run, REGIME):
        assert one.q is not None
        p = one.p.double()
        shift = moved(p, one.q.double(), one.x, DRAFTS)
        size += float((shift.square() / p.clamp(min=1e-300)).where(p > 0, 0.0).sum())
        variation += float(shift.abs().sum()) / 2
        tokens += len(p)
    normal = NormalDist()
    wanted = SPREAD * (normal.inv_cdf(1 - LEVEL / 2) + normal.inv_cdf(SURE))
    report: dict[str, Any] = {
        "environment": environment(),
        "command": "python -m studies.audit_bound " + " ".join(sys.argv[1:]),
    }
    report |= {"tokens": tokens, "total_variation": variation / tokens, "size": size / tokens}
    report |= {f"best_z_in_{TOKENS}": math.sqrt(TOKENS * size / tokens), "tokens_to_be_sure": wanted**2 * tokens / size}
    write_atomic(Path(sys.argv[1]), json.dumps(report, indent=1) + "\n")
    print(report)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
