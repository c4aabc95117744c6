"""Folders of feature drafts that engines load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cotrain.commands import export as commands
from cotrain.config.groups import Model
from cotrain.config.settings import ExportConfig
from cotrain.errors import UserError
from cotrain.export.eagle3 import export
from cotrain.export.engines import launch
from inference import load
from inference.drafts.draft_folder import Metadata, PlannedTree, read, save
from inference.drafts.weight_files import read_json
from inference.verify.tree import full
from tests import kinds
from tests.tiny import TARGET, tiny


@pytest.fixture
def built(tmp_path: Path) -> Path:
    network = kinds.eagle(tiny(dtype=torch.float32), draft_vocab_size=16)
    return save(network, None, tmp_path / "draft", Metadata(TARGET, 3, kind="eagle"), None)


def run_export(draft: Path, target: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Run the command into `out` beside the draft, for a target that is called merged/one."""
    monkeypatch.setattr(commands, "load_pair", lambda path, device_map: (target, None))
    config = ExportConfig(
        draft=Model(path=str(draft)),
        target=Model(path="merged/one"),
        output=str(draft.with_name("out")),
        overwrite=True,
        **settings,
    )
    commands.run(config)


def test_the_eagle3_format(built: Path, tmp_path: Path) -> None:
    """Config as engines ask for it; the folder still serves here."""
    target = tiny(dtype=torch.float32)
    folder = export(built, tmp_path / "out", k=2, target=target)
    config, metadata = read_json(folder / "config.json"), read(folder).metadata
    assert (config["vocab_size"], config["draft_vocab_size"], config["num_hidden_layers"]) == (32, 16, 1)
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"]
    assert metadata.k == 2
    result = metadata.origin["export"]
    assert result["inputs_of_layers"] == [0, 1, 1] and result["outputs_of_layers"] == [-1, 0, 0]
    tensors = load_file(folder / "model.safetensors")
    known = torch.arange(16) + tensors["d2t"]
    assert known.tolist() == list(range(0, 32, 2)) and tensors["t2d"].nonzero().flatten().tolist() == known.tolist()
    assert load(folder, target).generate([[1, 2, 3]], max_new_tokens=5).stats.tokens == 5


def test_an_export_is_for_the_target_that_was_named(built: Path, tmp_path: Path) -> None:
    """Into which the adapter of the old one was merged: nobody may load it twice."""
    target = tiny(dtype=torch.float32)
    network = kinds.eagle(target, draft_vocab_size=16)
    save(network, None, tmp_path / "adapted", Metadata(TARGET, 3, origin={"adapter": "ours"}, kind="eagle"), None)
    for layout in ("eagle3", "speculators"):
        folder = export(tmp_path / "adapted", tmp_path / layout, layout, target=target, name="merged")
        written = read(folder).metadata
        assert (written.target["name"], written.origin["adapter"]) == ("merged", None)
    result = read_json(folder / "config.json")["speculators_config"]
    assert result["verifier"]["name_or_path"] == "merged"
    own = read(export(tmp_path / "adapted", tmp_path / "own", target=target)).metadata
    assert (own.target["name"], own.origin["adapter"]) == ("the-target", "ours")


def test_other_kinds_sizes_and_layouts_are_errors(built: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="layout=gguf: eagle drafts are written with layout=eagle3 or speculators"):
        export(built, tmp_path / "out", "gguf", target=tiny())
    with pytest.raises(ValueError, match="hidden_size is 16, but the target's is 32"):
        export(built, tmp_path / "out", target=tiny(hidden=32))


def test_an_engine_that_drafts_trees_gets_the_planned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Levels, most children of a node, and nodes with the anchor; the others get the planned length of chains, and so
    does everyone who is asked for one."""
    target, tree = tiny(dtype=torch.float32), PlannedTree((-1, -1, -1, 0, 0, 3), "tree")
    metadata = Metadata(TARGET, 4, kind="eagle", tree=tree)
    built = save(kinds.eagle(target, draft_vocab_size=16), None, tmp_path / "draft", metadata, None)

    def said(engine: str, k: int | None = None) -> str:
        run_export(built, target, monkeypatch, engine=engine, k=k)
        return capsys.readouterr().out

    flags = "--speculative-num-steps {} --speculative-eagle-topk {} --speculative-num-draft-tokens {}"
    assert flags.format(3, 3, 7) in said("sglang") and "not its shape" in said("sglang")
    assert flags.format(2, 1, 3) in said("sglang", k=2)
    assert '"num_speculative_tokens": 4' in said("vllm") and '"max_draft_len": 4' in said("tensorrt_llm")
    assert "vllm serve merged/one" in said("vllm") and "merged/one" in (tmp_path / "out" / "README.md").read_text()
    assert read(tmp_path / "out").metadata.tree == tree


def test_no_more_nodes_are_asked_for_than_the_engine_grows() -> None:
    """Two children of two nodes a step, where the planned tree has eight nodes in its third level."""
    tree = PlannedTree(full((2, 2, 2)), "tree")
    assert "--speculative-num-draft-tokens 11" in launch("sglang", "d", "t", 4, "greedy", "eagle3", "eagle", tree)
