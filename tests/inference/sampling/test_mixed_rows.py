"""Rows of one batch with different settings."""

import torch

from inference import Sampling
from inference.sampling import probs


def test_rows_that_differ_in_min_p_alone_keep_their_own():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 3)
    regimes = [Sampling(min_p=0.5), Sampling(), Sampling(min_p=0.1)]
    result = probs(logits, regimes)
    assert (result > 0).sum(-1).tolist() == [1, 4, 3]
    for row, regime in zip(result, regimes, strict=True):
        assert torch.equal(row, probs(logits[:1], regime)[0])
