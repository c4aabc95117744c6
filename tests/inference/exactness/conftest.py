"""Models that tests of the verdict share."""

import pytest

from inference import verification
from tests.tiny import near, tiny


@pytest.fixture(autouse=True)
def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are verified by the rules that tests replace by wrong ones, not by the operator of a CPU."""
    monkeypatch.setattr(verification, "_by_operator", lambda round, logits, proposal, asked: proposal.x[:0])


@pytest.fixture(scope="module")
def pair():
    """Target and a draft near it, of eight tokens."""
    target = tiny(vocab=8, layers=1, hidden=8, seed=3)
    return target, near(target, 0.15, seed=0)
