"""GGUF files for llama.cpp: read back by gguf and by transformers they are the draft, and what cannot be written is
refused. `tests/engines/test_llamacpp.py` serves them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFValueType, TokenType
from gguf.quants import dequantize
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PhiConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cotrain.cli import main
from cotrain.errors import UserError
from cotrain.export.engines import GGUF_FILE
from cotrain.export.gguf import TOKENS, export, refuse_shape, split_name, write_file
from inference.drafts.draft_folder import Metadata, save
from studies.pretrain.tokenizer import train_tokenizer
from tests.folders import target_folder
from tests.gguf_files import LAYER, restored
from tests.tiny import TARGET

TEXTS = ["def add(a, b):\n    return a + b\n", "the cat sat on the mat and the dog sat on the cat"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
USED, ROWS = 292, 320  # tokens, and rows of the target's embedding
SHAPE: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2e-5,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 5e4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(TEXTS, USED, 128)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def model(config: Any = LlamaConfig, network: Any = LlamaForCausalLM, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    settings = SHAPE | {"rope_parameters": ROPE, "tie_word_embeddings": False} | changes
    return network(config(**settings)).eval()


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "qwen2": {"config": Qwen2Config, "network": Qwen2ForCausalLM},
    "qwen3": {"config": Qwen3Config, "network": Qwen3ForCausalLM, "head_dim": 128},  # transformers reads no other
}


def filled(network: PreTrainedModel) -> PreTrainedModel:
    """With norms and biases that are not ones and zeros."""
    with torch.no_grad():
        for name, values in network.named_parameters():
            if values.ndim == 1:
                values.copy_(torch.rand_like(values) + (0.5 if "norm" in name else -0.5))
    return network


@torch.no_grad()
def logits(network: PreTrainedModel) -> torch.Tensor:
    ids = torch.randint(USED, (2, 24), generator=torch.Generator().manual_seed(3))
    return network(ids).logits.float()


def reloaded(file: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()


def contents(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits(name: str, words: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    network = filled(model(**MODELS[name]))
    assert write_file(network, words, tmp_path / GGUF_FILE) == []
    torch.testing.assert_close(logits(reloaded(tmp_path / GGUF_FILE)), logits(network), rtol=1e-4, atol=1e-4)


def arrays(file: Path) -> dict[str, np.ndarray]:
    return {one.name: one.data for one in GGUFReader(file).tensors}


def same(read: dict[str, np.ndarray], name: str, wanted: torch.Tensor) -> None:
    assert np.array_equal(read.pop(name), wanted.detach().float().numpy()), name


def test_every_tensor_is_the_drafts(words: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """The rows of queries and keys are in llama.cpp's order."""
    network = filled(model()).to(torch.bfloat16)
    write_file(network, words, tmp_path / GGUF_FILE)
    read = {one.name: dequantize(one.data, one.tensor_type) for one in GGUFReader(tmp_path / GGUF_FILE).tensors}
    assert len(read) == len(network.state_dict())
    for i, layer in enumerate(network.model.layers):
        for name, heads in (("attn_q", 4), ("attn_k", 2)):
            read[f"blk.{i}.{name}.weight"] = restored(read[f"blk.{i}.{name}.weight"], heads)
        for part, name in LAYER.items():
            same(read, f"blk.{i}.{name}.weight", layer.get_submodule(part).weight)
    for name, part in (
        ("token_embd", network.model.embed_tokens),
        ("output_norm", network.model.norm),
        ("output", network.lm_head),
    ):
        same(read, f"{name}.weight", part.weight)
    assert not read


def test_sizes_rope_and_norms_are_the_drafts(words: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    write_file(model(), words, tmp_path / GGUF_FILE)
    said = contents(tmp_path / GGUF_FILE)
    wanted = {
        "vocab_size": ROWS,
        "context_length": 128,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "rope.dimension_count": 16,
        "rope.freq_base": 5e4,
    }
    assert {key: said[f"llama.{key}"] for key in wanted} == wanted
    assert said["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(2e-5)
    assert "llama.rope.scaling.type" not in said
    write_file(model(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}), words, tmp_path / "l")
    said = contents(tmp_path / "l")
    assert (said["llama.rope.scaling.type"], said["llama.rope.scaling.factor"]) == ("linear", 3.0)


def test_the_rope_of_llama_3_is_a_tensor_of_factors(words: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    network = model(rope_parameters=LLAMA3)
    write_file(network, words, tmp_path / GGUF_FILE)
    factors = arrays(tmp_path / GGUF_FILE)["rope_freqs.weight"]
    unscaled = 5e4 ** -(np.arange(0, 16, 2) / 16)
    assert np.allclose(unscaled / factors, network.model.rotary_emb.inv_freq.numpy(), rtol=1e-5)
    assert np.allclose(factors[0], 1) and np.allclose(factors[-1], 8)  # short waves as they are, long ones stretched


def test_the_vocabulary_is_the_targets_row_by_row(words: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    network = model()
    network.generation_config.eos_token_id = [0, 7]
    write_file(network, words, tmp_path / GGUF_FILE)
    said = contents(tmp_path / GGUF_FILE)
    tokens, types = said[TOKENS], said["tokenizer.ggml.token_type"]
    assert {token: i for i, token in enumerate(tokens[:USED])} == words.get_vocab()
    assert tokens[USED:] == [f"[PAD{i}]" for i in range(USED, ROWS)]
    assert types == [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (USED - 2) + [TokenType.UNUSED] * (ROWS - USED)
    ids = {name: said.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding", "unknown")}
    assert ids == {"bos": 0, "eos": 0, "eot": 7, "padding": 1, "unknown": None}
    assert (said["tokenizer.ggml.model"], said["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert not said["tokenizer.ggml.add_bos_token"] and not said["tokenizer.ggml.add_eos_token"]
    assert said["tokenizer.chat_template"] == TEMPLATE
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=GGUF_FILE)
    for text in TEXTS:
        assert theirs(text, add_special_tokens=False).input_ids == words(text).input_ids


def test_eight_bits_are_near_and_vectors_stay_whole(words: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    network = filled(model())
    write_file(network, words, tmp_path / GGUF_FILE, "q8_0")
    read = reloaded(tmp_path / GGUF_FILE).state_dict()
    for name, values in network.state_dict().items():
        limit = 0.0 if values.ndim == 1 else float(values.abs().max()) / 127 * 0.55
        assert (read[name] - values).abs().max() <= limit, name
        assert values.ndim == 1 or not torch.equal(read[name], values)
    odd = model(hidden_size=40)  # rows of 40 are not blocks of 32
    write_file(odd, words, tmp_path / "odd", "q8_0")
    types = {one.name: one.tensor_type.name for one in GGUFReader(tmp_path / "odd").tensors}
    assert (types["blk.0.attn_q.weight"], types["blk.0.ffn_down.weight"]) == ("BF16", "Q8_0")


@pytest.fixture
def draft(words: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A folder whose vocabulary is not padded, planned with 3 drafts a round."""
    metadata = Metadata(TARGET, 3, objective="greedy")
    return save(filled(model(vocab_size=USED)), words, tmp_path / "draft", metadata, None)


def test_a_gguf_target_gives_its_tokenizer(draft: Path, words: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    target = tmp_path / "its target.gguf"
    write_file(model(), words, target)
    settings = [f"draft.path={draft}", f"target.path={target}", f"output={tmp_path / 'out'}", "dtype=q8_0", "k=5"]
    assert main(["export", "engine=llamacpp", *settings]) == 0
    ours, theirs = contents(tmp_path / "out" / GGUF_FILE), contents(target)
    assert {name: ours[name] for name in theirs if name.startswith("tokenizer.")} == {
        name: value for name, value in theirs.items() if name.startswith("tokenizer.")
    }
    kinds = [GGUFReader(file).fields[TOKENS].types for file in (target, tmp_path / "out" / GGUF_FILE)]
    assert kinds[0] == kinds[1] == [GGUFValueType.ARRAY, GGUFValueType.STRING]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"llama-server -m '{target}' -md" in card and "--spec-draft-n-max 5" in card and "Q8_0" in card
    other = train_tokenizer(["zyx wvu zyx wvu tsr tsr"], USED, 128)
    write_file(model(), other, tmp_path / "other.gguf")
    with pytest.raises(UserError, match="its vocabulary differs from the draft's, first at id"):
        export(draft, tmp_path / "none", target=str(tmp_path / "other.gguf"))
    assert not (tmp_path / "none").exists()


SHAPES = {
    "model_type is phi": PhiConfig(),
    "hidden_act is gelu": LlamaConfig(**SHAPE, hidden_act="gelu"),
    "attention_bias is true": LlamaConfig(**SHAPE, attention_bias=True),
    "mlp_bias is true": LlamaConfig(**SHAPE, mlp_bias=True),
    "sliding_window is 4096": MistralConfig(),
    "sliding_window is 16": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "rope_type is dynamic": LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
    "rope_type is llama3": Qwen2Config(**SHAPE, rope_parameters=LLAMA3),
}


@pytest.mark.parametrize("problem", SHAPES)
def test_other_shapes_are_refused(problem: str) -> None:
    with pytest.raises(
        UserError, match=f"^engine=llamacpp cannot load this draft .*: config.json: {problem}, but only "
    ):
        refuse_shape(SHAPES[problem])


def test_eight_bits_are_refused_for_other_files(draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    paths = [f"draft.path={draft}", f"target.path={target_folder(tmp_path / 'target')}", f"output={tmp_path / 'out'}"]
    assert main(["export", "engine=vllm", "dtype=q8_0", *paths]) == 1
    assert "dtype=q8_0: only GGUF files have this dtype: set engine=llamacpp" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_is_no_byte_level_bpe_is_refused(tmp_path: Path) -> None:
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(
        UserError, match="no byte-level BPE, so it cannot be written: set target.path= to the target's GGUF file"
    ):
        write_file(model(), PreTrainedTokenizerFast(tokenizer_object=core), tmp_path / GGUF_FILE)


def test_how_texts_are_cut_has_llamacpps_name() -> None:
    def core(*steps: dict[str, Any], merges: bool = False, normalizer: str | None = None) -> dict[str, Any]:
        step = steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": list(steps)}
        normalized = {"type": normalizer} if normalizer else None
        return {"model": {"type": "BPE", "ignore_merges": merges}, "pre_tokenizer": step, "normalizer": normalized}

    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    start = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    alone = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    after = alone | {"use_regex": False}
    digits = {"type": "Digits", "individual_digits": True}

    def split(number: str) -> dict[str, Any]:
        return {"type": "Split", "pattern": {"Regex": start + number + rest}, "behavior": "Isolated", "invert": False}

    assert split_name(core(alone)) == "gpt-2"
    assert split_name(core(digits, alone)) == "smollm"
    assert split_name(core(split(r"\p{N}"), after, normalizer="NFC")) == "qwen2"
    assert split_name(core(split(r"\p{N}{1,3}"), after, merges=True)) == "llama-bpe"
    unknown = [
        core(split(r"\p{N}{1,3}"), after),
        core(alone, merges=True),
        core(alone, normalizer="Lowercase"),
        core(alone | {"add_prefix_space": True}),
        core(split("x"), after),
        core(digits | {"individual_digits": False}, alone),
    ]
    assert {split_name(one) for one in unknown} == {"default"}
