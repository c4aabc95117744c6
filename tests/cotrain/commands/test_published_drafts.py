"""Commands take drafts in published layouts, with the target that the user names."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from cotrain.cli import main
from cotrain.evaluation.comparison import FIGURES
from cotrain.export.eagle3 import export
from inference.drafts.weight_files import read_json
from inference.models.pretrained import load_model
from tests.cotrain.commands.test_train import quickly as quickly  # a fixture
from tests.draft_folders import draft_folder
from tests.folders import target_and_texts, target_folder

BENCH = """bench.prompts=2 bench.quick_prompts=1 bench.prompt_tokens=8 bench.new_tokens=8 bench.parity_tokens=8
bench.minutes=0 bench.depths=[2]""".split()
TRAIN = """data.block=64 rollout.texts=4 rollout.held_out_texts=2 rollout.prompt_tokens=8 rollout.new_tokens=24
rollout.temperatures=[1.0] trainer.steps=2 trainer.corpus_steps=0 trainer.batch=2 trainer.validations=1 policy.k=2
draft=eagle draft.depths=3 init=pretrained measure=false optimizer.lr=1e-9""".split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and texts; an eagle draft of it as cotrain writes one, and the same draft as others publish it."""
    place = target_and_texts(tmp_path_factory.mktemp("published"), 60)
    made = draft_folder(place / "eagle", place / "target", "eagle", vocabulary=80)
    out = export(made, place / "speculators", "speculators", target=load_model(str(place / "target")))
    for name in ("cotrain.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (out / name).unlink(missing_ok=True)
    config = read_json(made / "config.json")
    for key in ("depths", "eagle_config", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "head_rank"):
        config.pop(key)
    (place / "eagle3").mkdir()
    (place / "eagle3" / "config.json").write_text(json.dumps(config))
    torch.save(load_file(made / "model.safetensors"), place / "eagle3" / "pytorch_model.bin")
    return place


def commanded(place: Path, name: str, draft: str, output: Path, *settings: str) -> int:
    return main([name, f"draft.path={place / draft}", f"target.path={place / 'target'}", f"output={output}", *settings])


def test_bench_measures_it_and_says_what_it_is(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commanded(place, "bench", "speculators", tmp_path / "out", *BENCH) == 0
    line = "is an EAGLE-3 draft in the layout of speculators, read as a draft of kind eagle\n"
    assert capsys.readouterr().err.count(f"draft.path: {place / 'speculators'} {line}") == 1
    report = read_json(tmp_path / "out" / "report.json")
    assert report["exactness"]["passed"] and report["extra"]["kind"] == "eagle"


def test_bench_asks_for_the_target(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"draft.path={place / 'eagle3'}", f"output={tmp_path / 'out'}"]) == 1
    assert "eagle3 does not name its target: set target.path= to this model" in capsys.readouterr().err


def test_a_hub_id_is_a_draft_too(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read from the hub's cache, without a connection."""
    repository = tmp_path / "cache" / "models--me--draft"
    shutil.copytree(place / "eagle3", repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    options = [f"target.path={place / 'target'}", "prompt=0001 one", "max_new_tokens=4"]
    assert main(["generate", "draft.path=me/draft", *options]) == 0
    assert f"draft.path: {repository / 'snapshots'}" in capsys.readouterr().err
    assert main(["generate", "draft.path=me/other", *options]) == 1


def test_an_export_of_what_engines_load_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commanded(place, "export", "eagle3", tmp_path / "out") == 1
    assert "in a layout that engines load: serve the folder as it is" in capsys.readouterr().err


def test_a_training_starts_with_its_acceptance(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same figures as from the folder that cotrain wrote, in steps that hardly change a weight."""
    figures: list[dict[str, Any]] = []
    for draft in ("eagle", "speculators", "eagle3"):
        assert commanded(place, "train", draft, tmp_path / draft, f"data.path={place / 'own.jsonl'}", *TRAIN) == 0
        figures.append(read_json(tmp_path / draft / FIGURES))
    assert figures[0]["tau"] > 1
    for one in figures[1:]:
        assert one["tau"] == pytest.approx(figures[0]["tau"], abs=1e-4)
    assert "the target gives the layers to read, 0, 1, 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["draft=block"], "a draft of kind eagle, but draft=block can only begin with one of kind block"),
        (["draft.vocabulary=16"], "draft.vocabulary=16: draft.path="),
    ],
)
def test_a_training_of_another_draft_is_refused(
    settings: list[str], message: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"data.path={place / 'own.jsonl'}", *TRAIN, *settings]
    assert commanded(place, "train", "eagle3", tmp_path / "run", *options) == 1
    assert message in capsys.readouterr().err


def test_a_draft_of_another_target_is_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target_folder(tmp_path / "other", seed=1)
    options = [f"draft.path={place / 'speculators'}", f"target.path={tmp_path / 'other'}", f"output={tmp_path / 'out'}"]
    assert main(["bench", *options, *BENCH]) == 1
    assert "tensor embed_tokens.weight is not the target's embedding" in capsys.readouterr().err
    stored = load_file(place / "speculators" / "model.safetensors")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((place / "speculators" / "config.json").read_bytes())
    del stored["fc.weight"]
    save_file(stored, broken / "model.safetensors")
    assert main(["bench", f"draft.path={broken}", f"target.path={place / 'target'}", *options[2:], *BENCH]) == 1
    assert f"draft.path: {broken}: an EAGLE-3 draft" in (said := capsys.readouterr().err)
    assert "tensor fc.weight is missing" in said
