"""No engine loads a head of low rank, or a causal LM of a pruned vocabulary: exports say so and write nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cotrain.cli import main
from cotrain.export.hf import folder_problems
from inference import load
from inference.drafts.draft_folder import REPORT, read
from inference.drafts.weight_files import read_json
from tests.cotrain.students.test_initial_settings import target as target  # a fixture
from tests.draft_folders import draft_folder

PRUNED, LOW = {"vocabulary": 20}, {"head_rank": 4}


@pytest.mark.parametrize(
    ("kind", "settings", "engine", "more", "said"),
    [
        (
            "independent",
            PRUNED,
            "vllm",
            (),
            "draft_vocab_size is 20, and engines load a causal LM only with a row "
            "for each of its 300 tokens: train with draft.vocabulary=null, or draft=eagle",
        ),
        (
            "independent",
            LOW,
            "transformers",
            (),
            "head_rank is 4, and engines load no head of low rank: train with "
            "draft.head_rank=null; or serve this draft with cotrain's engine",
        ),
        ("parallel", PRUNED, "vllm", (), "draft_vocab_size is 20"),
        ("conditioned", PRUNED, "vllm", ("temperature=0.7",), "draft_vocab_size is 20"),
        ("eagle", LOW, "vllm", ("layout=eagle3",), "head_rank is 4"),
        ("p_eagle", LOW, "vllm", ("layout=eagle3",), "head_rank is 4"),
    ],
)
def test_what_no_engine_loads_is_refused(
    kind: str,
    settings: dict[str, Any],
    engine: str,
    more: tuple[str, ...],
    said: str,
    target: Path,
    tmp_path: Path,
    capsys: Any,
) -> None:
    draft, output = draft_folder(tmp_path / "draft", target, kind, **settings), tmp_path / "out"
    assert main(["export", f"draft.path={draft}", f"output={output}", f"engine={engine}", *more]) == 1
    assert said in " ".join(capsys.readouterr().err.split()) and not output.exists()


def test_a_folder_is_checked_for_its_head(target: Path, tmp_path: Path) -> None:
    (problem,) = folder_problems(draft_folder(tmp_path / "draft", target, "independent", **PRUNED))
    assert "draft_vocab_size is 20, and engines load" in problem


def test_a_parallel_draft_loses_its_markov_head_and_says_so(target: Path, tmp_path: Path, capsys: Any) -> None:
    """With both taus if training measured them; what is written is the plain model, which engines load."""
    draft, output = draft_folder(tmp_path / "draft", target, "parallel", markov=3), tmp_path / "out"
    assert any("markov_head" in problem for problem in folder_problems(draft))
    held = {"tau_T1/all/2": 1.75, "tau_without_markov_T1/all/2": 1.5}
    lost = "The Markov head of the draft is left out, since the engine has none."
    for report, said in (
        (None, lost),
        (held, f"{lost} Predicted on held-out texts, tau at 2 drafts is 1.75 with it, 1.50 without it."),
    ):
        if report:
            (draft / REPORT).write_text(json.dumps({"extra": {"held_out": report}}))
        assert main(["export", f"draft.path={draft}", f"output={output}", "engine=vllm", "overwrite=true"]) == 0
        assert said in capsys.readouterr().out.splitlines()
        assert f"- {said}\n" in (output / "README.md").read_text()
        metadata = read(output).metadata
        assert metadata.kind == "parallel"
        assert metadata.origin["export"]["remarks"] == [said]
    stored, written = (load_file(folder / "model.safetensors") for folder in (draft, output))
    assert {name for name in stored if name not in written} == {
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
    }
    assert "markov_rank" not in read_json(output / "config.json") and not folder_problems(output)
    assert load(output, target).generate([[1, 2, 3]], max_new_tokens=5).stats.tokens == 5
    plain = draft_folder(tmp_path / "plain", target, "parallel")
    assert main(["export", f"draft.path={plain}", f"output={output}", "engine=vllm", "overwrite=true"]) == 0
    assert "Markov" not in capsys.readouterr().out + (output / "README.md").read_text()
