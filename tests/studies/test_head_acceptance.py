"""Acceptance that a small head costs, of heads whose cost is known."""

import json
from pathlib import Path

import torch

from cotrain.cli import main
from studies import head_acceptance
from studies.head_acceptance import accepted_pruned
from tests.folders import own_texts, target_folder

W = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
STATES = torch.randn(700, 6, generator=torch.Generator().manual_seed(2))


def test_a_pruned_head_is_accepted_with_the_mass_of_its_tokens() -> None:
    known = torch.arange(20) % 3 == 0
    p = (STATES @ W.T / 0.7).softmax(-1)
    q = (p * known) / (p * known).sum(-1, keepdim=True)
    torch.testing.assert_close(accepted_pruned(known, STATES, W, 0.7), torch.minimum(p, q).sum(-1))


def test_the_report(tmp_path: Path) -> None:
    folder, own = target_folder(tmp_path / "target"), own_texts(tmp_path / "own.jsonl")
    for kind in ("train", "held_out"):
        main(
            [
                "rollout",
                f"target.path={folder}",
                f"data.path={own}",
                f"kind={kind}",
                "regime=t1",
                "rollout.texts=12",
                f"output={tmp_path / 'texts'}",
                "rollout.held_out_texts=3",
                "rollout.new_tokens=20",
            ]
        )
    files = [str(tmp_path / "texts" / f"{kind}_T1.parquet") for kind in ("train", "held_out")]
    words = "--tokens 8,16 --ranks 4 --steps 3 --positions 100".split()
    head_acceptance.main([str(tmp_path / "out.json"), str(folder), *files, *words])
    report = json.loads((tmp_path / "out.json").read_text())
    few, more = (report["heads"][f"{size} tokens"]["accepted"]["value"] for size in (8, 16))
    assert 0 < few < more < 1 and report["positions"]["judged"] > 0 and report["counted"] == 12 * 20
    assert set(report["heads"]) == {"8 tokens", "16 tokens", "rank 4"}
