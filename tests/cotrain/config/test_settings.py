"""The sampling regime as training and the engine apply it."""

import math

import pytest
import torch

from cotrain.config.groups import Regime
from cotrain.config.settings import sampling, truncation
from inference.sampling import probs


@pytest.mark.parametrize(("k", "p"), [(5, 0.7), (5, 1.0), (0, 0.7)])
def test_training_cuts_distributions_as_the_engine_does(k: int, p: float) -> None:
    """Top-k first: top-p of what is left keeps fewer tokens than of the whole distribution."""
    logits = torch.randn(50, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    regime = Regime(temperature=1.0, top_k=k, top_p=p)
    cut = truncation(regime)
    torch.testing.assert_close(cut(logits).softmax(-1), probs(logits, sampling(regime)).double(), atol=1e-6, rtol=0)
    sizes = (cut(logits) > -math.inf).sum(-1)
    assert sizes.min() < sizes.max() or p == 1
