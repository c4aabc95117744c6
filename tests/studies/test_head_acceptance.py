"""Acceptance that a small head costs, of heads whose cost is known."""

import json
from pathlib import Path

import pytest
import torch

from cotrain.cli import main
from cotrain.data.texts import Texts
from studies import head_acceptance
from studies.head_acceptance import accepted_low_rank, accepted_pruned, low_rank, over_texts, states_of
from tests.folders import network, own_texts, target_folder

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
    folder, own = target_folder(tmp_path / "target"), own_texts(tmp_path / "own.jsonl")
    for kind in ("train", "held_out"):
        main(["rollout", f"target.path={folder}", f"data.path={own}", f"kind={kind}", "regime=t1",
              f"output={tmp_path / 'texts'}", "rollout.texts=12", "rollout.held_out_texts=3",
              "rollout.new_tokens=20"])  # fmt: skip
    files = [str(tmp_path / "texts" / f"{kind}_T1.parquet") for kind in ("train", "held_out")]
    words = "--tokens 8,16 --ranks 4 --steps 3 --positions 100".split()
    head_acceptance.main([str(tmp_path / "out.json"), str(folder), *files, *words])
    report = json.loads((tmp_path / "out.json").read_text())
    few, more = (report["heads"][f"{size} tokens"]["accepted"]["value"] for size in (8, 16))
    assert 0 < few < more < 1 and report["positions"]["judged"] > 0 and report["counted"] == 12 * 20
    assert set(report["heads"]) == {"8 tokens", "16 tokens", "rank 4"}


def test_states_are_those_before_sampled_tokens(tmp_path: Path) -> None:
    model = network()
    ids, prompt, length = torch.randint(50, (3, 9)), torch.tensor([2, 4, 1]), torch.tensor([9, 7, 5])
    found = states_of(model, Texts(ids, prompt, length, ["a"] * 3), 1000)
    for row, states in enumerate(found):
        with torch.no_grad():
            every = model.base_model(ids[row : row + 1]).last_hidden_state[0]
        torch.testing.assert_close(states, every[prompt[row] - 1 : length[row] - 1], atol=1e-5, rtol=1e-4)
