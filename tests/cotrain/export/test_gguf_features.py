"""Feature drafts as GGUF files, read back by gguf: keys and tensors are what llama.cpp's loader asks for
(`src/models/eagle3.cpp`, `src/models/dflash.cpp`). `tests/engines/test_exported.py` serves them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cotrain.cli import main
from cotrain.errors import UserError
from cotrain.export.engines import GGUF_FILE, drafting, launch
from cotrain.export.gguf_features import write_features
from inference.drafts.draft_folder import REPORT, Metadata, save
from inference.proposers.p_eagle import PEagleNetwork
from tests import kinds
from tests.cotrain.export.test_block_export import HELD_OUT
from tests.cotrain.export.test_gguf_export import LLAMA3, ROWS, arrays, contents, filled, model, same, words
from tests.gguf_files import LAYER, restored

__all__ = ["words"]  # a fixture
LAYERS, NARROW = [0, 1, 1], 48
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return model()


def test_a_draft_of_eagle_3_is_what_llamacpp_asks_for(
    target: LlamaForCausalLM, words: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """It rotates neighbouring rows of queries and keys, and takes d2t as the target's ids."""
    settings = {IDS: LAYERS, "draft_vocab_size": NARROW, "norm_before_residual": True, "num_key_value_heads": 2}
    network = filled(kinds.eagle(target, **settings, rope_parameters=LLAMA3, rope_theta=5e4))
    write_features(network, target, words, tmp_path / GGUF_FILE)
    said, read = contents(tmp_path / GGUF_FILE), arrays(tmp_path / GGUF_FILE)
    wanted = {"block_count": 1, "embedding_length": 64, "target_hidden_size": 64, "target_layers": LAYERS}
    wanted |= {"norm_before_residual": True, "vocab_size": ROWS, "attention.key_length": 32}
    assert said["general.architecture"] == "eagle3"
    assert {key: said[f"eagle3.{key}"] for key in wanted} == wanted
    assert len(said["tokenizer.ggml.tokens"]) == ROWS
    for name, heads in (("attn_q", network.config.num_attention_heads), ("attn_k", 2)):
        read[f"blk.0.{name}.weight"] = restored(read[f"blk.0.{name}.weight"], heads)
    for part, name in {**LAYER, "hidden_norm": "attn_norm_2"}.items():
        same(read, f"blk.0.{name}.weight", network.midlayer.get_submodule(part).weight)
    for name, part in (("fc", network.fc), ("output_norm", network.norm), ("output", network.lm_head)):
        same(read, f"{name}.weight", part.weight)
    known = network.t2d.nonzero()[:, 0]
    assert read["d2t"].dtype == np.int64 and np.array_equal(read.pop("d2t"), known.numpy())
    factors = read.pop("rope_freqs.weight")
    assert factors.shape == (16,) and np.allclose(factors[[0, -1]], [1, 8]) and not read


def test_an_export_leaves_the_target_as_it_was(
    target: LlamaForCausalLM, words: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The mask of a block draft takes the place of a token's embedding in the file alone."""
    before = target.get_input_embeddings().weight.detach().clone()
    write_features(filled(kinds.block(target)), target, words, tmp_path / GGUF_FILE)
    assert torch.equal(target.get_input_embeddings().weight, before)


@pytest.mark.parametrize(
    "settings", [{}, {"causal": True, "markov_rank": 3, "draft_vocab_size": NARROW}, {"target_head": True}]
)
def test_a_block_is_what_llamacpp_asks_for(
    settings: dict[str, Any], target: LlamaForCausalLM, words: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Rows as in transformers; the mask's row is the draft's own if it has one, every other the target's."""
    network = filled(kinds.block(target, **{IDS: LAYERS} | settings))
    remarks = write_features(network, target, words, tmp_path / GGUF_FILE)
    said, read = contents(tmp_path / GGUF_FILE), arrays(tmp_path / GGUF_FILE)
    mask, markov = network.config.dflash_config["mask_token_id"], "markov_rank" in settings
    assert any("embeds token" in one for one in remarks) == (not network.config.target_head)
    wanted = {"block_size": 1 + network.config.depths, "target_layers": LAYERS, "attention.causal": markov}
    wanted |= {"block_count": len(network.layers)} | ({"sample_from_anchor": False} if markov else {})
    wanted |= {"has_confidence_head": False} if markov else {}
    assert said["general.architecture"] == "dflash" and said["tokenizer.ggml.mask_token_id"] == mask
    assert {key: said[f"dflash.{key}"] for key in wanted} == wanted
    of_layer = {**LAYER, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
    for i, layer in enumerate(network.layers):
        for part, name in of_layer.items():
            same(read, f"blk.{i}.{name}.weight", layer.get_submodule(part).weight)
    whole = {"fc": network.fc, "output_norm": network.norm, "output": network.lm_head or target.lm_head}
    whole["enc.output_norm"] = network.hidden_norm
    if markov:
        whole |= {"markov_w1": network.markov_head.markov_w1, "markov_w2": network.markov_head.markov_w2}
        assert np.array_equal(read.pop("d2t"), network.t2d.nonzero()[:, 0].numpy())
    for name, part in whole.items():
        same(read, f"{name}.weight", part.weight)
    rows = target.model.embed_tokens.weight.detach().clone()
    if network.mask_embedding is not None:
        rows[mask] = network.mask_embedding.detach()
    same(read, "token_embd.weight", rows)
    assert not read


def test_what_llamacpp_computes_otherwise_is_refused(
    target: LlamaForCausalLM, words: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    class Scaled(nn.Embedding):
        pass

    drafts: list[tuple[Any, str]] = [
        (kinds.eagle(target, **{IDS: [0, 1]}), r"it reads the target's states \[0, 1\], but llama.cpp gives 3"),
        (kinds.block(target, **{IDS: LAYERS}, rope_parameters=LLAMA3), "rope_type is llama3, but only default, linear"),
    ]
    for network, said in drafts:
        with pytest.raises(UserError, match=f"^engine=llamacpp cannot load .*: config.json: {said}"):
            write_features(network, target, words, tmp_path / GGUF_FILE)
    other: Any = model()
    other.set_input_embeddings(Scaled(ROWS, 64))
    with pytest.raises(UserError, match="^engine=llamacpp: the target's embedding is a Scaled, and"):
        write_features(kinds.eagle(other, **{IDS: LAYERS}), other, words, tmp_path / GGUF_FILE)


def test_the_card_names_the_method_and_what_is_lost(
    target: LlamaForCausalLM, words: PreTrainedTokenizerFast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Markov head is kept unless layout=dflash is asked for; without one there is no dspark."""
    network: Any = model()
    network.save_pretrained(tmp_path / "target")
    words.save_pretrained(tmp_path / "target")

    def draft(name: str, made: Any) -> str:
        metadata = Metadata(
            {"name": str(tmp_path / "target"), "config": None, "tokenizer": None},
            3,
            kind=name.split(",")[0],
            regime={"temperature": 0.7},
        )
        folder = save(made, words, tmp_path / name, metadata, None)
        (folder / REPORT).write_text(json.dumps({"extra": {"held_out": HELD_OUT}}))
        return str(folder)

    drafts = {
        "eagle": draft("eagle", kinds.eagle(target, **{IDS: LAYERS})),
        "block": draft("block", kinds.block(target, **{IDS: LAYERS})),
        "block, markov": draft("block, markov", kinds.block(target, **{IDS: LAYERS}, markov_rank=3)),
        "p_eagle": draft("p_eagle", kinds.eagle(target, made=PEagleNetwork, **{IDS: LAYERS})),
    }

    def run(name: str, *settings: str) -> str:
        asked = ["engine=llamacpp", f"draft.path={drafts[name]}", f"output={tmp_path / 'out'}", "overwrite=true"]
        status = main(["export", *asked, *settings])
        printed = capsys.readouterr()
        assert (status == 0) == ((tmp_path / "out" / GGUF_FILE).is_file() and not printed.err.startswith("cotrain"))
        return printed.out if status == 0 else printed.err

    lost = "tau at 3 drafts is 1.75 with it, 1.50 without it"
    for name, settings, method in (
        ("eagle", [], "eagle3"),
        ("block", ["dtype=q8_0"], "dflash"),
        ("block, markov", [], "dspark"),
        ("block, markov", ["layout=dflash"], "dflash"),
    ):
        said = run(name, *settings)
        assert f"--spec-type draft-{method} --spec-draft-n-max " in said and "probabilistic\n" not in said
        assert (lost in said) == (settings == ["layout=dflash"]), said
        assert "trained for sampled drafting, which llamacpp does not do" in said
    types = {one.name: one.tensor_type.name for one in GGUFReader(tmp_path / "out" / GGUF_FILE).tensors}
    assert types["blk.0.attn_q.weight"] == "F32" and "markov_w1.weight" not in types
    assert "has no Markov head: set layout=dflash" in run("block", "layout=dspark")
    assert "engine=llamacpp: it does not load drafts of kind p_eagle: set engine=vllm" in run("p_eagle")


def test_only_a_causal_lm_draws_its_drafts() -> None:
    """llama.cpp's other methods know greedy drafts alone."""
    drawn = "--spec-draft-sampling probabilistic"
    assert launch("llamacpp", "d", "t.gguf", 3, "sampled", "gguf").endswith(drawn)
    assert drawn not in launch("llamacpp", "d", "t.gguf", 3, "greedy", "gguf")
    assert drawn not in launch("llamacpp", "d", "t.gguf", 3, "sampled", "eagle3", "eagle")
    assert drafting("llamacpp", "sampled") == drafting("vllm", "sampled", "eagle3") == "sampled"
    assert drafting("llamacpp", "sampled", "eagle3") == drafting("llamacpp", "greedy") == "greedy"
