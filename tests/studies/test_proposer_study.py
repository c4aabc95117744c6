"""The comparison of kinds, at a size that the suite can afford."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.exactness.figures import Figures
from studies import kinds_in_turn, proposers
from tests.draft_folders import draft_folder
from tests.folders import target_folder

TINY = "prompts=2 quick_prompts=1 prompt_tokens=12 new_tokens=8 depths=[2]".split()
KEYS = {
    "kind",
    "rule",
    "temperature",
    "rows",
    "k",
    "parameters",
    "train_seconds",
    "alpha",
    "tau",
    "speedup",
    "over_independent",
    "exact",
    "wrong",
}


def test_kinds_take_turns_and_cells_that_are_done_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, out = target_folder(tmp_path / "target"), tmp_path / "out.json"
    for kind in ("independent", "medusa"):
        draft_folder(tmp_path / kind, target, kind)
    monkeypatch.setattr("inference.measure.costs.MOST", 1)
    monkeypatch.setattr("cotrain.planning.planner.SHAPE", 1)
    monkeypatch.setattr(kinds_in_turn, "BATCHES", 4)
    cell, calls = kinds_in_turn.Study.cell, []

    def interrupted(*given: Any) -> Any:
        if calls:
            raise KeyboardInterrupt
        calls.append(given)
        return cell(*given)

    monkeypatch.setattr(kinds_in_turn.Study, "cell", interrupted)
    sizes = [part for one in TINY for part in ("--set", f"bench.{one}")]
    folders = [f"medusa, small={tmp_path / 'medusa'}", f"independent={tmp_path / 'independent'}"]
    with pytest.raises(KeyboardInterrupt):
        proposers.main([str(out), *folders, "--temperatures", "1", "--batches", "1", "--rules", "block,token", *sizes])
    report = json.loads(out.read_text())
    heads, small = report["rows"]
    assert set(report) == {"environment", "commit", "command", "target", "rows"} and report["target"] == str(target)
    assert set(heads) == set(small) == KEYS
    assert [(row["kind"], row["rule"], row["temperature"], row["rows"], row["exact"]) for row in report["rows"]] == [
        ("medusa, small", "block", 1.0, 1, True),
        ("independent", "block", 1.0, 1, True),
    ]
    assert (heads["parameters"], small["over_independent"]["value"]) == (3 * (64 * 64 + 64), 1.0)
    assert heads["k"] in (1, 2) and 0 < heads["speedup"]["low"] <= heads["speedup"]["value"] <= heads["speedup"]["high"]
    assert len(small["alpha"]) == 2 and abs(small["tau"]["z"]) < 4 and small["train_seconds"] is None
    with pytest.raises(ValueError, match="eagle=.*: the folder is of kind medusa"):
        proposers.main([str(out), f"eagle={tmp_path / 'medusa'}"])


def test_acceptance_of_a_depth_is_over_the_rounds_that_draft_so_far() -> None:
    k, alpha = torch.tensor([[2, 1, 0]]), torch.tensor([[[0.5, 0.0], [0.7, 0.9], [0.1, 0.8]]])
    nothing = torch.zeros(0)
    figures = Figures(nothing, nothing, alpha, nothing, nothing, k, torch.tensor([3]))
    assert kinds_in_turn.alphas(figures) == pytest.approx([0.6, 0.9])
