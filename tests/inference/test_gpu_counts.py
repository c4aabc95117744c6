"""A round on a GPU, counted on the stand-in: bounds that may only be lowered."""

import json
from pathlib import Path

import pytest

from tests import gpu_counts
from tests.often import often

# launches outside graphs, each replay one of them: copies to where recordings read, counts of ids that are new
MOST = {
    "plain": 10,
    "draft, token": 16,
    "draft, coupled": 17,
    "draft, mixed top-k, top-p, min-p": 17,
    "draft, penalties, bias, bans, minimum length": 25,
    "conditioned, token": 16,
    "eagle, token": 23,
    "p_eagle, markov, token": 23,
    "block, causal, token": 23,
    "medusa, token": 20,
    "medusa, markov, token": 20,
    "hydra, token": 24,
    "parallel, token": 24,  # of a round that catches up
    "early_exit, token": 16,
    "hybrid, token": 24,  # of a round that catches up with what look-up drafted
    "n-gram look-up": 20,  # rows of different draft lengths read their anchor behind their own
}

# a read and a copy an inner round, which is not recorded: how far a row has come decides what the next one reads
INNER = {"two_levels, token": 615}


# penalties write most; heads over states are drafts that read the target
EACH = {"draft, penalties, bias, bans, minimum length", "eagle, token"}


@pytest.mark.parametrize("name", often(MOST, EACH.__contains__))
def test_a_round_copies_once_and_reads_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pinned copy to the device, which nothing waits for, and one read, whatever the settings."""
    monkeypatch.setattr(gpu_counts, "ROUNDS", 1)
    monkeypatch.setattr(gpu_counts, "FIRST", 2)
    monkeypatch.setattr("inference.models.replay.WARMUP", 0)
    counts = gpu_counts.counted(name, "sm80")["worst"]
    assert (counts["copies"], counts["blocking"], counts["reads"]) == (1, 0, 1)
    assert counts["launches"] <= MOST[name]


def test_the_report_holds_every_setting_within_its_goal() -> None:
    report = json.loads((Path(__file__).parents[2] / "outputs/results/gpu_counts.json").read_text())
    assert report["before"]["source"] and set(report["after"]) >= set(gpu_counts.SETTINGS)  # also of a retired kind
    for name, by_arch in report["after"].items():
        if name in INNER:
            continue
        assert set(by_arch) == {"sm80", "sm90"}
        for one in by_arch.values():
            worst = one["worst"]
            assert worst["launches"] <= min(40, MOST.get(name, 40)), name
            assert (worst["copies"], worst["blocking"], worst["reads"]) == (1, 0, 1)
            assert one["estimated_ms"] == gpu_counts.milliseconds(one) <= 0.25


def test_a_round_of_two_levels_reads_once_an_inner_round() -> None:
    """And once more for itself; nothing blocks."""
    report = json.loads((Path(__file__).parents[2] / "outputs/results/gpu_counts.json").read_text())
    for name, most in INNER.items():
        for one in report["after"][name].values():
            worst = one["worst"]
            assert (worst["blocking"], worst["reads"]) == (0, worst["copies"] + 1)
            assert worst["reads"] <= gpu_counts.K + 1
            assert worst["launches"] <= most and one["estimated_ms"] == gpu_counts.milliseconds(one)
