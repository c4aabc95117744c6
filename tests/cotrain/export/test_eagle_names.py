"""What each engine's loader of EAGLE-3 drafts asks for, beside the folders that are exported for it.

Facts read from their sources: vLLM 0.32 (`models/llama_eagle3.py`, `v1/worker/gpu_model_runner.py`), SGLang
(`models/llama_eagle3.py`, `model_executor` and `set_eagle3_layers_to_capture` of its Llama), TensorRT-LLM
(`_torch/models/modeling_speculative.py`, `_torch/speculative/eagle3.py`, `llmapi/llm_args.py`). Each engine counts the
target's states in a way of its own; here each is brought to the number of decoder layers before the state.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from cotrain.errors import UserError
from cotrain.export.eagle3 import export
from cotrain.export.engines import FEATURES, captured, launch
from inference.drafts.draft_folder import Metadata, read, save
from inference.drafts.weight_files import read_json
from inference.proposers.eagle import EagleConfig, EagleNetwork, output_layers
from tests import kinds
from tests.cotrain.export.test_eagle_export import run_export
from tests.tiny import TARGET, tiny

LAYERS, NARROW = [2, 4, 5], 16  # states of the target of 8 layers; tokens of a pruned draft
IDS = "eagle_aux_hidden_state_layer_ids"
LAYER = (
    "hidden_norm",
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NAMES = {"fc.weight", "norm.weight", "lm_head.weight", *(f"midlayer.{part}.weight" for part in LAYER)}
PRUNED = {"d2t", "t2d"}  # all add the index of a row to d2t; t2d is passed over
# config keys that a loader reads; TensorRT-LLM's `torch_dtype` is transformers' older name of dtype
KEYS = {
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
    "hidden_act",
    "num_hidden_layers",
    "tie_word_embeddings",
    "attention_bias",
    "eagle_config",
    "dtype",
}


def vllm_captures(config: Mapping[str, Any], command: str) -> list[int]:
    """The top level's numbers, else those of eagle_config, are inputs of layers; each once, in ascending order."""
    return sorted(set(config.get(IDS) or config["eagle_config"][IDS]))


def sglang_captures(config: Mapping[str, Any], command: str) -> list[int]:
    """eagle_config alone is read; each number is of a layer whose output is captured, before the layer after it."""
    return [layer + 1 for layer in config["eagle_config"][IDS]]


def tensorrt_llm_captures(config: Mapping[str, Any], command: str) -> list[int]:
    """config.json is not read for them: options name layers whose outputs are captured, else 1, L / 2 - 1 and L - 4."""
    options = json.loads(shlex.split(command)[2])["speculative_config"]
    return [layer + 1 for layer in sorted(options.get("eagle3_layers_to_capture", (1, 8 // 2 - 1, 8 - 4)))]


CAPTURES: dict[str, Callable[[Mapping[str, Any], str], list[int]]] = {
    "vllm": vllm_captures,
    "sglang": sglang_captures,
    "tensorrt_llm": tensorrt_llm_captures,
}


@pytest.fixture
def target() -> LlamaForCausalLM:
    return tiny(layers=8, dtype=torch.float32)


def draft(target: LlamaForCausalLM, layers: list[int], **settings: Any) -> EagleNetwork:
    return kinds.eagle(target, eagle_aux_hidden_state_layer_ids=layers, **settings)


def exported(target: LlamaForCausalLM, place: Path, layers: list[int], layout: str = "eagle3", **settings: Any) -> Path:
    metadata = Metadata(TARGET, 3, kind="eagle")
    built = save(draft(target, layers, **settings), None, place / "draft", metadata, None)
    return export(built, place / layout, layout, target=target)


@pytest.mark.parametrize("layers", [LAYERS, [2, 4, 7], [1, 3, 6]], ids=str)
def test_each_engine_captures_the_states_that_were_learnt_from(
    layers: list[int], target: LlamaForCausalLM, tmp_path: Path
) -> None:
    """An engine that counts in another way captures the layers beside them, and accepts less without a word."""
    folder = exported(target, tmp_path, layers)
    metadata = read(folder).metadata
    for engine, captures in CAPTURES.items():
        command = launch(engine, str(folder), "t", 3, "greedy", "eagle3", "eagle", layers=captured(metadata.origin))
        assert captures(read_json(folder / "config.json"), command) == layers, engine


def test_the_command_that_is_printed_names_the_layers(
    target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the one engine that does not find them in the folder; on the card too."""
    exported(target, tmp_path, LAYERS)
    run_export(tmp_path / "draft", target, monkeypatch, engine="tensorrt_llm", layout="eagle3", k=2)
    said = '"eagle3_layers_to_capture": [1, 3, 4]'
    assert said in capsys.readouterr().out and said in (tmp_path / "out" / "README.md").read_text()


def test_states_that_no_engine_gives_twice_are_warned_of(
    target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As drafts of targets of few layers read them; here they are served all the same."""
    for layers, said in (([2, 4, 4], True), ([4, 2, 5], True), (LAYERS, False)):
        exported(target, tmp_path / str(layers), layers)
        run_export(tmp_path / str(layers) / "draft", target, monkeypatch, engine="tensorrt_llm", layout="eagle3", k=2)
        assert ("reads the target's states [" in capsys.readouterr().out) == said


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_tensors_have_the_names_that_loaders_ask_for(layout: str, target: LlamaForCausalLM, tmp_path: Path) -> None:
    """`midlayer.` is the EAGLE-3 format's; vLLM and TensorRT-LLM take `layers.0.` for it too, SGLang does not."""
    pruned = exported(target, tmp_path / "pruned", LAYERS, layout, draft_vocab_size=NARROW)
    whole = exported(target, tmp_path / "whole", LAYERS, layout)
    asked = (
        NAMES
        if layout == "eagle3"
        else {name.replace("midlayer.", "layers.0.") for name in NAMES} | {"embed_tokens.weight"}
    )
    assert set(load_file(whole / "model.safetensors")) == asked
    tensors = load_file(pruned / "model.safetensors")
    assert set(tensors) == asked | PRUNED
    assert tensors["fc.weight"].shape == (16, 3 * 16) and tensors["lm_head.weight"].shape == (NARROW, 16)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool


def test_the_config_has_the_keys_that_loaders_read(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """The architecture is SGLang's class, and one that vLLM lists; TensorRT-LLM goes by decoding_type."""
    config = read_json(exported(target, tmp_path, LAYERS) / "config.json")
    assert config.keys() >= KEYS and config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["use_aux_hidden_state"] and not config["tie_word_embeddings"]
    assert config["draft_vocab_size"] == config["vocab_size"] == 32
    assert '"decoding_type": "Eagle3"' in launch("tensorrt_llm", "d", "Draft_Target", 3, "greedy", "eagle3", "eagle")
    assert "--speculative-algorithm EAGLE3" in launch("sglang", "d", "t", 3, "greedy", "eagle3", "eagle")


def test_speculators_format_numbers_inputs_alone(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """Only vLLM is told to serve it, which reads the top level; nothing else names layers in another way."""
    folder = exported(target, tmp_path, LAYERS, "speculators")
    config, tensors = read_json(folder / "config.json"), load_file(folder / "model.safetensors")
    assert config[IDS] == LAYERS and set(FEATURES["speculators"]) == {"vllm"}
    assert config["speculators_model_type"] == "eagle3" and not config["norm_before_residual"]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert torch.equal(tensors["embed_tokens.weight"], target.model.embed_tokens.weight)
    assert not {IDS, "eagle_config"} & config["transformer_layer_config"].keys()


def test_a_folder_says_the_same_after_it_is_read(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """However often it is read and written; one with eagle_config alone counts inputs, as it did when it was made."""
    folder = exported(target, tmp_path, LAYERS)
    network: EagleNetwork = EagleNetwork.from_pretrained(folder)
    network.save_pretrained(tmp_path / "again")
    assert read_json(tmp_path / "again" / "config.json")["eagle_config"][IDS] == output_layers(LAYERS) == [1, 3, 4]
    assert network.config.layers == EagleNetwork.from_pretrained(tmp_path / "again").config.layers == tuple(LAYERS)
    old = EagleConfig(eagle_config={IDS: LAYERS, "use_aux_hidden_state": True})
    assert old.layers == tuple(LAYERS) and old.eagle_config[IDS] == [1, 3, 4]


def test_engines_that_add_the_features_refuse_normed_ones(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """SGLang and TensorRT-LLM read no norm_before_residual."""
    metadata = Metadata(TARGET, 3, kind="eagle")
    for normed in (True, False):
        made = save(draft(target, LAYERS, norm_before_residual=normed), None, tmp_path / f"{normed}", metadata, None)
        export(made, tmp_path / f"vllm {normed}", target=target)
        for engine in ("sglang", "tensorrt_llm"):
            if normed:
                with pytest.raises(UserError, match=f"^engine={engine}: .*norm_before_residual is true"):
                    export(made, tmp_path / engine, engine=engine, target=target)
            else:
                export(made, tmp_path / engine, engine=engine, target=target)
