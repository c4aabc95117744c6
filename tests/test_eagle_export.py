"""Folders of feature drafts that engines load."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cotrain.errors import UserError
from cotrain.export.eagle3 import export
from inference import load
from inference.drafts.draft_folder import Metadata, read, save
from inference.drafts.weight_files import read_json
from tests import kinds
from tests.tiny import tiny

TARGET = {"name": "the-target", "config": None, "tokenizer": None}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    network = kinds.eagle(tiny(dtype=torch.float32), draft_vocab_size=16)
    return save(network, None, tmp_path / "draft", Metadata(TARGET, 3, kind="eagle"), None)


def test_the_eagle3_format(made: Path, tmp_path: Path) -> None:
    """Config as engines ask for it; the folder still serves here."""
    target = tiny(dtype=torch.float32)
    folder = export(made, tmp_path / "out", k=2, target=target)
    config, metadata = read_json(folder / "config.json"), read(folder).metadata
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert (config["vocab_size"], config["draft_vocab_size"], config["num_hidden_layers"]) == (32, 16, 1)
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 1], "use_aux_hidden_state": True}
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] and not config["tie_word_embeddings"]
    assert metadata is not None and metadata.k == 2
    found = metadata.made["export"]
    assert found["inputs_of_layers"] == [0, 1, 1] and found["outputs_of_layers"] == [-1, 0, 0]
    tensors, ours = load_file(folder / "model.safetensors"), load_file(made / "model.safetensors")
    assert "embed_tokens.weight" not in tensors and tensors.keys() == ours.keys()
    assert tensors["fc.weight"].shape == (16, 48) and tensors["midlayer.self_attn.q_proj.weight"].shape == (16, 32)
    known = torch.arange(16) + tensors["d2t"]
    assert known.tolist() == list(range(0, 32, 2)) and tensors["t2d"].nonzero().flatten().tolist() == known.tolist()
    assert load(folder, target).generate([[1, 2, 3]], max_new_tokens=5).stats.tokens == 5


def test_the_format_of_speculators(made: Path, tmp_path: Path) -> None:
    target = tiny(dtype=torch.float32)
    folder = export(made, tmp_path / "out", "speculators", target=target)
    config, tensors = read_json(folder / "config.json"), load_file(folder / "model.safetensors")
    assert config["speculators_model_type"] == "eagle3" and config["draft_vocab_size"] == 16
    assert config["transformer_layer_config"]["model_type"] == "llama" and not config["norm_before_residual"]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"]["name_or_path"] == "the-target"
    assert not [name for name in tensors if name.startswith("midlayer")]
    assert tensors["layers.0.hidden_norm.weight"].shape == (16,)
    assert torch.equal(tensors["embed_tokens.weight"], target.model.embed_tokens.weight)


def test_what_cannot_be_exported_is_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="layout=gguf: feature drafts have eagle3, speculators"):
        export(made, tmp_path / "out", "gguf", target=tiny())
    with pytest.raises(ValueError, match="hidden_size is 16, the target's 32"):
        export(made, tmp_path / "out", target=tiny(hidden=32))
