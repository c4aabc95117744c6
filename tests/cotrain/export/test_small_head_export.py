"""No engine loads a head of low rank, or a causal LM of a pruned vocabulary: exports say so and write nothing."""

from pathlib import Path
from typing import Any

import pytest

from cotrain.cli import main
from cotrain.export.hf import check
from tests.draft_folders import draft_folder
from tests.folders import target_folder

PRUNED, LOW = {"vocabulary": 20}, {"head_rank": 4}


@pytest.mark.parametrize(
    ("kind", "settings", "engine", "more", "said"),
    [
        ("independent", PRUNED, "vllm", (), "draft_vocab_size is 20, and engines load a causal LM only with a row "
         "for each of its 300 tokens: train with draft.vocabulary=null, or draft=eagle"),
        ("independent", LOW, "transformers", (), "head_rank is 4, and engines load no head of low rank: train with "
         "draft.head_rank=null; or serve it with this engine"),
        ("independent", PRUNED | LOW, "sglang", (), "head_rank is 4"),
        ("parallel", PRUNED, "vllm", (), "draft_vocab_size is 20"),
        ("conditioned", PRUNED, "vllm", ("temperature=0.7",), "draft_vocab_size is 20"),
        ("eagle", LOW, "vllm", ("layout=eagle3",), "head_rank is 4"),
        ("eagle", LOW, "vllm", ("layout=speculators",), "head_rank is 4"),
        ("p_eagle", LOW, "vllm", ("layout=eagle3",), "head_rank is 4"),
    ],
)  # fmt: skip
def test_what_no_engine_loads_is_refused(
    kind: str, settings: dict[str, Any], engine: str, more: tuple[str, ...], said: str, tmp_path: Path, capsys: Any
) -> None:
    target = target_folder(tmp_path / "target")
    draft, output = draft_folder(tmp_path / "draft", target, kind, **settings), tmp_path / "out"
    assert main(["export", f"draft.path={draft}", f"output={output}", f"engine={engine}", *more]) == 1
    assert said in " ".join(capsys.readouterr().err.split()) and not output.exists()


def test_a_folder_is_checked_for_its_head(tmp_path: Path) -> None:
    target = target_folder(tmp_path / "target")
    (problem,) = check(draft_folder(tmp_path / "draft", target, "independent", **PRUNED))
    assert "draft_vocab_size is 20, and engines load" in problem


def test_a_pruned_feature_draft_is_still_exported(tmp_path: Path, capsys: Any) -> None:
    target = target_folder(tmp_path / "target")
    draft, output = draft_folder(tmp_path / "draft", target, "eagle", **PRUNED), tmp_path / "out"
    assert main(["export", f"draft.path={draft}", f"output={output}", "layout=eagle3"]) == 0
    assert "d2t" in (output / "model.safetensors").read_bytes()[:2000].decode("latin1")
