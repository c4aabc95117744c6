"""Acceptance that a small head costs, of heads whose cost is known."""

import json
from pathlib import Path

import pytest
import torch

from studies import head_acceptance
from studies.head_acceptance import accepted_low_rank, accepted_pruned, low_rank, over_texts
from tests.folders import own_texts, target_folder

W = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
STATES = torch.randn(700, 6, generator=torch.Generator().manual_seed(2))


def test_a_pruned_head_is_accepted_with_the_mass_of_its_tokens() -> None:
    known = torch.arange(20) % 3 == 0
    p = (STATES @ W.T / 0.7).softmax(-1)
    q = (p * known) / (p * known).sum(-1, keepdim=True)
    torch.testing.assert_close(accepted_pruned(known, STATES, W, 0.7), torch.minimum(p, q).sum(-1))


def test_a_head_of_low_rank_learns() -> None:
    """A matrix of rank 3 is its own decomposition; of rank 6, learning raises acceptance."""
    start, _ = low_rank(3, STATES, W[:, :3] @ torch.randn(3, 6), 1.0, 0)
    flat = start.up.weight @ start.down.weight
    torch.testing.assert_close(accepted_low_rank(start, STATES, flat, 1.0), torch.ones(700), atol=1e-4, rtol=0)
    start, learnt = low_rank(2, STATES, W, 1.0, 60)
    before, after = (float(accepted_low_rank(head, STATES, W, 1.0).mean()) for head in (start, learnt))
    assert before < after < 1


def test_intervals_are_over_texts() -> None:
    """Positions of a text are alike: repeating them all does not narrow the interval."""
    values, lengths = torch.rand(40), [4] * 10
    one, repeated = over_texts(values, lengths), over_texts(values.repeat_interleave(9), [36] * 10)
    assert one == pytest.approx(repeated) and one["low"] < one["value"] < one["high"]
    assert one["value"] == pytest.approx(float(values.mean()))


def test_the_report(tmp_path: Path) -> None:
    folder = target_folder(tmp_path / "target")
    words = f"--tokens 8,16 --ranks 4 --prompts 4 --new-tokens 12 --steps 3 --set target.path={folder}".split()
    head_acceptance.main([str(tmp_path / "out.json"), *words, f"data.path={own_texts(tmp_path / 'own.jsonl')}",
                          "bench.prompt_tokens=100"])  # fmt: skip
    report = json.loads((tmp_path / "out.json").read_text())
    few, more = (report["heads"][f"{size} tokens"]["accepted"]["value"] for size in (8, 16))
    assert 0 < few < more < 1 and report["positions"]["judged"] > 0
    assert set(report["heads"]) == {"8 tokens", "16 tokens", "rank 4"}
