"""Models that tests of the verdict share."""

import pytest
import torch

from inference import verification
from tests.tiny import tiny


@pytest.fixture(autouse=True)
def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are verified by the rules that tests replace by wrong ones, not by the operator of a CPU."""
    monkeypatch.setattr(verification, "_by_operator", lambda round, logits, proposal, asked: proposal.x[:0])


@pytest.fixture(scope="module")
def pair():
    """Target and a draft near it, of eight tokens."""
    target, draft = (tiny(vocab=8, layers=1, hidden=8, seed=3) for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.15 * torch.randn_like(weight)
    return target, draft
