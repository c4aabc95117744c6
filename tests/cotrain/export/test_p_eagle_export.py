"""Folders of P-EAGLE drafts as vLLM reads them, in either of its formats."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cotrain.errors import UserError
from cotrain.export.eagle3 import export
from cotrain.export.engines import launch
from inference import load
from inference.drafts.draft_folder import Metadata, save
from inference.drafts.weight_files import read_json
from tests import kinds
from tests.cotrain.export.test_eagle_export import run_export
from tests.tiny import TARGET, tiny


@pytest.fixture
def built(tmp_path: Path) -> Path:
    network = kinds.p_eagle(tiny(dtype=torch.float32), draft_vocab_size=16)
    return save(network, None, tmp_path / "draft", Metadata(TARGET, 3, kind="p_eagle"), None)


class Loader:
    """The rules by which vLLM 0.32 reads a feature draft (`models/llama_eagle3.py`), with `parallel_drafting`."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.config, self.used, self.mask = config, set[str](), None
        H, size, heads, groups = (
            config[key] for key in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")
        )
        inner, aux = config["intermediate_size"], len(config["eagle_aux_hidden_state_layer_ids"])
        layer = {
            "input_layernorm": (H,),
            "hidden_norm": (H,),
            "post_attention_layernorm": (H,),
            "self_attn.q_proj": (heads * size, 2 * H),
            "self_attn.k_proj": (groups * size, 2 * H),
            "self_attn.v_proj": (groups * size, 2 * H),
            "self_attn.o_proj": (H, heads * size),
            "mlp.gate_proj": (inner, H),
            "mlp.up_proj": (inner, H),
            "mlp.down_proj": (H, inner),
        }
        wanted = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
        wanted |= {"model.fc.weight": (H, H * aux), "model.norm.weight": (H,)}
        wanted |= {"lm_head.weight": (config["draft_vocab_size"], H)}
        if config["draft_vocab_size"] != config["vocab_size"]:
            wanted["draft_id_to_target_id"] = (config["draft_vocab_size"],)
        result = dict(self.named(tensors))
        self.embedded = result.pop("model.embed_tokens.weight", None)
        assert {name: tuple(tensor.shape) for name, tensor in result.items()} == wanted
        assert self.mask is not None, "mask_hidden not found in weights"
        assert self.mask.view(1, -1).shape == (1, H * aux)
        assert 0 <= config["pard_token"] < config["vocab_size"]
        assert not config.get("norm_before_residual") and not config.get("norm_before_fc")

    def named(self, tensors: dict[str, Tensor]) -> Any:
        for name, tensor in tensors.items():
            if "t2d" in name:
                continue
            if "mask_hidden" in name:
                self.mask = tensor
            elif "d2t" in name:
                yield name.replace("d2t", "draft_id_to_target_id"), tensor
            else:
                own = name if "lm_head" in name else f"model.{name}"
                yield own.replace("midlayer.", "layers.0."), tensor


def read_back(folder: Path) -> Loader:
    return Loader(vllm_config(read_json(folder / "config.json")), load_file(folder / "model.safetensors"))


def vllm_config(config: dict[str, Any]) -> dict[str, Any]:
    """What vLLM makes of either config.json (`configs/eagle.py`, `configs/speculators/`)."""
    if "speculators_model_type" not in config:
        assert config["architectures"][0].endswith("Eagle3") and config["model_type"] == "llama"
        assert config["eagle_config"]["use_aux_hidden_state"]
        return config["eagle_config"] | config  # the top level is read first
    assert config["speculators_model_type"] == "peagle" and config["transformer_layer_config"]["model_type"] == "llama"
    about = config["speculators_config"]
    assert about["algorithm"] == "peagle" and about["proposal_methods"][0]["speculative_tokens"] == 3
    assert about["verifier"]["name_or_path"] == "the-target"
    assert "pard_token" not in config["transformer_layer_config"]
    same = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual")
    return config["transformer_layer_config"] | {
        "pard_token": config["mask_token_id"],
        **{key: config[key] for key in same},
    }


@pytest.mark.parametrize(("layout", "size"), [("eagle3", 16), ("speculators", None)])
def test_vllm_reads_what_was_trained(layout: str, size: int | None, tmp_path: Path) -> None:
    target = tiny(dtype=torch.float32)
    network = kinds.p_eagle(target, draft_vocab_size=size)
    built = save(network, None, tmp_path / "draft", Metadata(TARGET, 3, kind="p_eagle"), None)
    result = read_back(export(built, tmp_path / "out", layout, target=target))
    assert torch.equal(result.mask, network.mask_hidden.detach())
    assert result.config["pard_token"] == 31
    assert (result.embedded is None) == (layout == "eagle3")
    if result.embedded is not None:
        assert torch.equal(result.embedded, target.model.embed_tokens.weight)
    if layout == "eagle3":
        assert load(tmp_path / "out", target).generate([[1, 2, 3]], max_new_tokens=5).stats.tokens == 5


def test_other_kinds_sizes_and_layouts_are_errors(built: Path, tmp_path: Path) -> None:
    target = tiny(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"k=4: .* was trained for 3 drafts a round"):
        export(built, tmp_path / "out", k=4, target=target)
    lacking = copy.deepcopy(load_file(built / "model.safetensors"))
    del lacking["mask_hidden"]
    save_file(lacking, built / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="tensor mask_hidden is missing"):
        export(built, tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def test_the_command_tells_vllm_to_draft_in_parallel_and_no_other_engine_gets_one(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(engine: str, layout: str) -> str:
        run_export(built, tiny(dtype=torch.float32), monkeypatch, engine=engine, layout=layout, k=2)
        return capsys.readouterr().out

    for engine in ("sglang", "tensorrt_llm"):
        with pytest.raises(UserError, match=f"engine={engine}: it does not load drafts of kind .*: set engine=vllm"):
            run(engine, "eagle3")
        assert not (tmp_path / "out").exists()
    config = (
        '"method": "eagle3", "model": "FOLDER", "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"'
    )
    for layout in ("eagle3", "speculators"):
        said = run("vllm", layout).replace(str((tmp_path / "out").absolute()), "FOLDER")
        assert f'{config}, "parallel_drafting": true' in said and "vllm serve merged/one" in said
        assert '"parallel_drafting": true' in (tmp_path / "out" / "README.md").read_text()
    assert "parallel" not in launch("vllm", "d", "t", 2, "sampled", "eagle3", "eagle")
