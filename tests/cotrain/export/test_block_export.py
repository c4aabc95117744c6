"""Folders of block drafts as vLLM reads them with the method dflash."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cotrain.errors import UserError
from cotrain.export import medusa_layout
from cotrain.export.eagle3 import export
from cotrain.export.engines import launch, refuse_layout
from inference import load
from inference.drafts.atomic import write_json
from inference.drafts.draft_folder import REPORT, Metadata, load_draft, read, save
from inference.drafts.weight_files import WEIGHTS, read_json
from inference.proposers.block import BlockNetwork
from tests import kinds
from tests.cotrain.export.test_eagle_export import run_export
from tests.folders import target_folder
from tests.tiny import TARGET, tiny

HELD_OUT = {
    "tau_T0.7/all/3": 2.25,
    "tau_without_markov_T0.7/all/3": 2.0,
    "tau_greedy_draft_T0.7/all/3": 1.75,
    "tau_greedy_draft_without_markov_T0.7/all/3": 1.5,
}


def built(folder: Path, k: int = 3, **settings: Any) -> BlockNetwork:
    """Save a draft that was trained for three drafts of a round, with a report; return its network."""
    network = kinds.block(tiny(dtype=torch.float32), **settings)
    metadata = Metadata(TARGET, k, kind="block", regime={"temperature": 0.7})
    save(network, None, folder, metadata, None)
    write_json(folder / REPORT, {"extra": {"held_out": HELD_OUT}})
    return network


def said_of(metadata: Metadata) -> list[str]:
    """The remarks of an export, without that on a target of few layers."""
    return [said for said in metadata.origin["export"]["remarks"] if not said.startswith("No engine will serve it")]


def read_back(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json, and the parameters that vLLM 0.32 fills (`models/qwen3_dflash.py`), by its names. Fails for a tensor
    that the model does not have, and for one that it does not get."""
    config, H = read_json(folder / "config.json"), 16
    size, heads, groups = (config[key] for key in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    inner, own = config["intermediate_size"], config["dflash_config"]
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert [layer + 1 for layer in own["target_layer_ids"]] == config["eagle_aux_hidden_state_layer_ids"]
    assert 0 <= own["mask_token_id"] < config["vocab_size"] and not config["attention_bias"]
    wanted = {
        f"model.{name}.weight": shape
        for name, shape in {"fc": (H, H * len(own["target_layer_ids"])), "norm": (H,), "hidden_norm": (H,)}.items()
    }
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "input_layernorm": (H,),
            "post_attention_layernorm": (H,),
            "self_attn.q_proj": (heads * size, H),
            "self_attn.k_proj": (groups * size, H),
            "self_attn.v_proj": (groups * size, H),
            "self_attn.o_proj": (H, heads * size),
            "self_attn.q_norm": (size,),
            "self_attn.k_norm": (size,),
            "mlp.gate_proj": (inner, H),
            "mlp.up_proj": (inner, H),
            "mlp.down_proj": (H, inner),
        }
        wanted |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    if not config["target_head"]:
        wanted |= {"lm_head.weight": (config["draft_vocab_size"], H), "model.mask_embedding": (H,)}
    if config["draft_vocab_size"] != config["vocab_size"]:
        wanted["draft_id_to_target_id"] = (config["draft_vocab_size"],)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert "mask_hidden" not in name
        if name == "d2t":
            tensors["draft_id_to_target_id"] = tensor
        elif name != "t2d":
            tensors[name if "lm_head" in name else f"model.{name}"] = tensor
    assert (folder / "mask_embedding.pt").exists() != config["target_head"]  # else the target's of the id
    if not config["target_head"]:
        mask = torch.load(folder / "mask_embedding.pt", weights_only=True)
        assert mask["mask_token_id"] == own["mask_token_id"]
        tensors["model.mask_embedding"] = mask["embedding"].reshape(-1)  # read last
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == wanted
    return config, tensors


@pytest.mark.parametrize(
    "settings", [{}, {"causal": True, "markov_rank": 3, "draft_vocab_size": 16}, {"target_head": True}]
)
def test_vllm_reads_what_was_trained(settings: dict[str, Any], tmp_path: Path) -> None:
    network, target = built(tmp_path / "draft", **settings), tiny(dtype=torch.float32)
    folder = export(tmp_path / "draft", tmp_path / "out", "dflash", target=target)
    config, tensors = read_back(folder)
    assert config["dflash_config"]["causal"] == settings.get("causal", False) and config["markov_rank"] == 0
    assert network.mask_embedding is None or torch.equal(tensors["model.mask_embedding"], network.mask_embedding)
    ours = network.state_dict()
    for name, tensor in tensors.items():
        own = name.removeprefix("model.").replace("draft_id_to_target_id", "d2t")
        assert torch.equal(tensor, ours[own])
    written, _, metadata = load_draft(folder, network=BlockNetwork)  # with which serve_check predicts
    assert metadata.k == 3 and written.term(32) is None
    assert load(folder, target).generate([[1, 2, 3]], max_new_tokens=5).stats.tokens == 5


def test_the_loss_of_the_markov_head_is_said(tmp_path: Path) -> None:
    """With both taus, as the draft is drafted from, if training measured them."""
    target = tiny(dtype=torch.float32)

    def remarks(k: int | None = None, objective: str | None = None, draft: str = "draft") -> list[str]:
        folder = export(
            tmp_path / draft, tmp_path / "out", "dflash", k, target=target, objective=objective, replace=True
        )
        return said_of(read(folder).metadata)

    built(tmp_path / "draft", markov_rank=3, causal=True)
    lost = "The Markov head of the draft is left out, since the engine has none."
    assert remarks() == [f"{lost} Predicted on held-out texts, tau at 3 drafts is 2.25 with it, 2.00 without it."]
    assert "is 1.75 with it, 1.50 without" in remarks(objective="greedy")[0]
    assert remarks(k=2) == [lost]
    built(tmp_path / "plain", causal=True)
    assert remarks(draft="plain") == []


def test_other_layouts_leave_it_out_too(tmp_path: Path) -> None:
    target = tiny(dtype=torch.float32)
    network = kinds.p_eagle(target, markov_rank=3)
    save(network, None, tmp_path / "draft", Metadata(TARGET, 3, kind="p_eagle"), None)
    folder = export(tmp_path / "draft", tmp_path / "out", target=target)
    assert not [name for name in load_file(folder / "model.safetensors") if "markov" in name]
    assert read_json(folder / "config.json")["markov_rank"] == 0
    theirs = target_folder(tmp_path / "target")
    heads = kinds.medusa(load_draft(theirs)[0], markov_rank=3)
    save(heads, None, tmp_path / "heads", Metadata({**TARGET, "name": str(theirs)}, 2, kind="medusa"), None)
    card = (medusa_layout.export(tmp_path / "heads", tmp_path / "medusa") / "README.md").read_text()
    assert "The Markov head of the draft is left out" in card


def test_masks_that_see_each_other_are_as_many_as_in_training(tmp_path: Path) -> None:
    target = tiny(dtype=torch.float32)
    built(tmp_path / "draft", k=2)
    built(tmp_path / "causal", k=2, causal=True)

    def length(draft: str, k: int | None = None) -> Any:
        metadata = read(export(tmp_path / draft, tmp_path / "out", "dflash", k, target=target, replace=True)).metadata
        return metadata.k, " ".join(said_of(metadata))

    k, said = length("draft")
    assert k == 3 and "planned with 2 drafts a round" in said
    assert length("draft", 3) == (3, "") and length("causal") == (2, "") and length("causal", 1) == (1, "")
    with pytest.raises(ValueError, match="k=2: .* were trained 3 at a time"):
        length("draft", 2)
    for draft in ("draft", "causal"):
        with pytest.raises(ValueError, match="k=4: .* was trained for 3 drafts a round"):
            length(draft, 4)


def test_the_command_is_that_of_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built(tmp_path / "draft", markov_rank=3)

    def run(engine: str, layout: str) -> str:
        run_export(tmp_path / "draft", tiny(dtype=torch.float32), monkeypatch, engine=engine, layout=layout)
        return capsys.readouterr().out

    assert run("vllm", "auto") == run("vllm", "dflash")
    said = run("vllm", "dflash").replace(str((tmp_path / "out").absolute()), "FOLDER")
    asked = {"method": "dflash", "model": "FOLDER", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    assert f"vllm serve merged/one --speculative-config '{json.dumps(asked)}'" in said
    card = (tmp_path / "out" / "README.md").read_text()
    for text in (said, card):
        assert "tau at 3 drafts is 2.25 with it, 2.00 without it" in text
    with pytest.raises(UserError, match="layout=eagle3: block drafts are written with layout=dflash"):
        run("vllm", "eagle3")
    with pytest.raises(UserError, match=r"layout=dflash: engine=sglang: .* has a head and a mask of its own"):
        run("sglang", "auto")
    with pytest.raises(UserError, match="layout=dspark: it is written for llamacpp alone, since vLLM runs DSpark only"):
        refuse_layout("vllm", "dspark")
    assert '"greedy"' in launch("vllm", "d", "t", 3, "greedy", "dflash", "block")


def test_confidence_heads_of_earlier_folders_are_not_read(tmp_path: Path) -> None:
    """Such a folder drafts as one without."""
    network, folder = built(tmp_path / "old"), tmp_path / "old"
    head = {f"confidence_head.{part}.weight": torch.ones(1, 16) for part in ("proj", "with_q")}
    save_file(load_file(folder / WEIGHTS) | head, folder / WEIGHTS, metadata={"format": "pt"})
    flags = {"enable_confidence_head": True, "confidence_head_with_markov": False}
    write_json(folder / "config.json", read_json(folder / "config.json") | flags)
    old = load_draft(folder, network=BlockNetwork)[0]
    assert old.state_dict().keys() == network.state_dict().keys() and not old.config.enable_confidence_head
