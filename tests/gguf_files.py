"""GGUF files of tiny targets, written as llama.cpp's converter writes them."""

import json
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.folders import network, tokenizer

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'cotrain[gguf]'")
add_sizes = pytest.importorskip("cotrain.export.gguf").add_sizes
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
PERMUTED = ("attn_q", "attn_k")  # llama.cpp rotates pairs of neighbours, transformers both halves


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a projection to queries or keys, in llama.cpp's order."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def restored(weight: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `permuted`."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def name_of(parameter: str) -> str:
    """The name of a Llama's parameter in a GGUF file."""
    module = parameter.removesuffix(".weight")
    if module in WHOLE:
        return f"{WHOLE[module]}.weight"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{LAYER[rest]}.weight"


def rounded(parameter: str, weight: Tensor, model: LlamaForCausalLM, kind: str = "Q4_1") -> np.ndarray:
    """What a file of that quantisation says of a weight, in float32 and in transformers' order."""
    values, name = weight.detach().float().numpy(), name_of(parameter)
    if values.ndim < 2:
        return values
    heads = model.config.num_attention_heads if "attn_q" in name else model.config.num_key_value_heads
    inside = permuted(values, heads) if any(one in name for one in PERMUTED) else values
    quantised = gguf.GGMLQuantizationType[kind]
    whole = gguf.quants.dequantize(gguf.quants.quantize(inside, quantised), quantised)
    return restored(whole, heads) if any(one in name for one in PERMUTED) else whole


def write_gguf(
    path: Path,
    model: LlamaForCausalLM | None = None,
    words: PreTrainedTokenizerFast | None = None,
    kind: str = "Q4_1",
    template: str | None = None,
    cuts: str = "gpt-2",
    **ids: int,
) -> Path:
    """A GGUF file of a tiny Llama with tied embeddings, quantised as `kind`. cuts: `tokenizer.ggml.pre`. ids: further
    special tokens, by the name in `tokenizer.ggml.<name>_token_id`."""
    model, words = model or network(layers=1), words or tokenizer()
    config, parts = model.config, json.loads(words.backend_tokenizer.to_str())["model"]
    vocabulary = words.get_vocab()
    special = set(words.all_special_ids)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config.vocab_size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in parts["merges"]]
    out = gguf.GGUFWriter(path, "llama")
    out.add_name("Tiny Llama")
    out.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    add_sizes(out, config)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(cuts)
    out.add_token_list(tokens)
    out.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    out.add_token_merges(merges)
    out.add_bos_token_id(config.bos_token_id)
    out.add_eos_token_id(config.eos_token_id)
    for name, one in ids.items():
        out.add_uint32(f"tokenizer.ggml.{name}_token_id", one)
    if template:
        out.add_chat_template(template)
    quantised = gguf.GGMLQuantizationType[kind]
    for parameter, weight in model.named_parameters():
        values, name = weight.detach().float().numpy(), name_of(parameter)
        if any(one in name for one in PERMUTED):
            heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
            values = permuted(values, heads)
        if values.ndim < 2:
            out.add_tensor(name, values)
        else:
            out.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), quantised), raw_dtype=quantised)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
