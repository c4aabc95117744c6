"""Models that tests of the verdict share."""

import pytest
import torch

from tests.tiny import tiny


@pytest.fixture(scope="module")
def pair():
    """Target and a draft near it, of eight tokens."""
    target, draft = (tiny(vocab=8, layers=1, hidden=8, seed=3) for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.15 * torch.randn_like(weight)
    return target, draft
