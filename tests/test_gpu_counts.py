"""A round on a GPU, counted on the stand-in: bounds that may only be lowered."""

import pytest

from tests import gpu_counts

# launches outside graphs: the laws, the verdict and single steps of drafts run by themselves here
MOST = {
    "plain": 60,
    "draft, token": 160,
    "draft, penalties, bias, bans, minimum length": 365,
    "n-gram look-up": 66,
}


@pytest.mark.parametrize("name", MOST)
def test_a_round_copies_once_and_reads_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pinned copy to the device, which nothing waits for, and one read, whatever the settings."""
    monkeypatch.setattr(gpu_counts, "ROUNDS", 2)
    found = gpu_counts.counted(name, "sm80")["worst"]
    assert (found["copies"], found["blocking"], found["reads"]) == (1, 0, 1)
    assert found["launches"] <= MOST[name]
