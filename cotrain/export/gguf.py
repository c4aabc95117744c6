"""Export of causal LMs of Llama's shape to one GGUF file, for llama.cpp.

The file has the weights under llama.cpp's names, the sizes, and the tokenizer. llama.cpp compares the vocabularies of
draft and target, token by token. If the target is a GGUF file, its tokenizer is copied. Otherwise the draft folder's
tokenizer is written, which must be a byte-level BPE.

For Llama the rows of the query and key projections have another order than in transformers. llama.cpp rotates
neighbouring pairs of rows; transformers rotates a row of the first half with one of the second half.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_VERSION,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import quantize
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cotrain.errors import UserError
from cotrain.export.engines import GGUF_FILE
from cotrain.export.fitting import resize
from cotrain.export.hf import prepare_draft
from cotrain.export.publishing import card, fetched
from inference.drafts.atomic import new_folder
from inference.drafts.draft_folder import REPORT
from inference.drafts.gguf_target import SPLITS, WHOLE_WORDS, gguf_file

ENGINE = "llamacpp"
ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
}
ROUNDED = {"q8_0": ["The matrices are rounded to 8 bits (Q8_0), after the draft was measured."]}
TYPES = {  # dtype= -> how matrices are stored, and the name of such a file
    "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "float16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
BLOCK = 32  # weights of a row that share a scale in q8_0
TOKENS = "tokenizer.ggml.tokens"
UNKNOWN_SPLIT = "default"


def export(
    source: str | Path,
    output: str | Path,
    k: int | None = None,
    *,
    target: str,
    dtype: str | None = None,
    replace: bool = False,
    name: str | None = None,
    **settings: Any,
) -> Path:
    """Write the draft in the folder `source` to a GGUF file in the folder `output`, with a README that has the launch
    command. Return `output`.

    Args:
        k: drafts per round; None for the value in cotrain.json.
        target: hub id, folder or GGUF file.
        dtype: how matrices are stored, a key of `TYPES`; None for the model's dtype.
        replace: whether a folder at `output` is replaced.
        name: the folder's name on the hub, if it will be pushed; None for its path.
        settings: other arguments of `hf.prepare_draft`, such as objective and temperature.

    Raises ValueError, which names the key or file to change, and FileExistsError if `output` is not empty and `replace`
    is False.
    """
    draft = prepare_draft(source, ENGINE, k, target=target, **settings)
    remarks, reader = list(draft.remarks), None
    if (file := gguf_file(target, "export.target")) is not None:
        reader = GGUFReader(file)
        remarks += fit_vocabulary(draft.model, draft.tokenizer, reader, target)
    else:
        remarks.append(f"TARGET.gguf is {target} in this format: llama.cpp's convert_hf_to_gguf.py writes it.")
    remarks += ROUNDED.get(dtype or "", [])
    path, fetch = fetched(name) if name else (str(Path(output).absolute()), list[str]())
    remarks += fetch
    with new_folder(Path(output), replace=replace) as new:
        remarks += write_file(draft.model, draft.tokenizer if reader is None else reader, new / GGUF_FILE, dtype)
        if draft.report is not None:
            shutil.copy(Path(source) / REPORT, new / REPORT)
        text = card(draft.metadata, ENGINE, path, draft.report, remarks, layout="gguf")
        (new / "README.md").write_text(text, encoding="utf-8")
    return Path(output)


def write_file(
    model: PreTrainedModel, words: PreTrainedTokenizerBase | GGUFReader, file: Path, dtype: str | None = None
) -> list[str]:
    """Write a causal LM and a tokenizer to a GGUF file, and return remarks for the README.

    words: the tokenizer, or another GGUF file whose tokenizer is copied. file: the path to write, in an existing
    folder. dtype: how matrices are stored, a key of `TYPES`; None for the model's dtype. Raises UserError for a model
    or a tokenizer that cannot be written.
    """
    refuse_shape(model.config)
    architecture = ARCHITECTURES[model.config.model_type]
    writer, stored = new_writer(file, MODEL_ARCH_NAMES[architecture], model, dtype)
    remarks = add_words(writer, words, model)
    write_all(writer, tensors(model, architecture), stored)
    return remarks


def new_writer(
    file: Path, architecture: str, model: PreTrainedModel, dtype: str | None
) -> tuple[GGUFWriter, GGMLQuantizationType]:
    """Return a writer that has the sizes of the model, and how matrices are stored. dtype: a key of `TYPES`, or None
    for the model's dtype; UserError for another one."""
    dtype = dtype or str(model.dtype).removeprefix("torch.")
    if dtype not in TYPES:
        raise UserError(f"dtype={dtype}: a GGUF file has one of {', '.join(TYPES)}: set dtype= to one of them")
    stored, file_type = TYPES[dtype]
    writer = GGUFWriter(file, architecture)
    writer.add_file_type(file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    add_sizes(writer, model.config)
    return writer, stored


def write_all(writer: GGUFWriter, named: Iterable[tuple[str, np.ndarray]], stored: GGMLQuantizationType) -> None:
    """Write what was added to the writer, and the tensors by their names, and close the file. stored: of matrices."""
    for name, values in named:
        packed, kind = pack_tensor(name, values, stored)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def refuse_shape(config: PretrainedConfig) -> None:
    """Raise UserError, which names the key in config.json, for a model that does not have Llama's shape."""
    at = f"engine={ENGINE} cannot load this draft (set another engine=): config.json:"
    if config.model_type not in ARCHITECTURES:
        raise UserError(f"{at} model_type is {config.model_type}, but only {', '.join(ARCHITECTURES)} can be written")
    if config.hidden_act != "silu":
        raise UserError(f"{at} hidden_act is {config.hidden_act}, but only silu can be written")
    window = config.model_type == "mistral" and config.sliding_window is not None
    if window or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise UserError(f"{at} sliding_window is {config.sliding_window}, but only full attention can be written")
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key, False):
            raise UserError(f"{at} {key} is true, but only projections without such a bias can be written")
    rope, scaled = config.rope_parameters["rope_type"], ("default", "linear", "llama3")
    if rope not in scaled[: 3 if ARCHITECTURES[config.model_type] is MODEL_ARCH.LLAMA else 2]:
        raise UserError(
            f"{at} rope_type is {rope}, but only {', '.join(scaled)} can be written (llama3 for Llama alone)"
        )


def add_sizes(writer: GGUFWriter, config: PretrainedConfig) -> None:
    """Add a model's sizes, norm epsilon and rope settings to the file that is being written."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


# --- weights


def tensors(model: PreTrainedModel, architecture: MODEL_ARCH) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name in the file, values in float32) for each tensor of the model. Raises UserError for a tensor without a
    name in llama.cpp."""
    config, names = model.config, get_tensor_name_map(architecture, model.config.num_hidden_layers)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for key, values in model.state_dict().items():
        if tied and key == "lm_head.weight":
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UserError(f"engine={ENGINE}: llama.cpp has no name for the tensor {key}: set another engine=")
        if architecture is MODEL_ARCH.LLAMA and (".attn_q." in name or ".attn_k." in name):
            values = permuted(values, config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads)
        yield name, values.detach().float().cpu().numpy()
    if config.rope_parameters["rope_type"] == "llama3":
        yield "rope_freqs.weight", rope_factors(model.model.rotary_emb.inv_freq, config.rope_parameters["rope_theta"])


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of `weight` (heads * 2 * n, ...) in llama.cpp's order, in the same shape: rows i and i + n of
    each head become neighbours. heads: how many the weight has."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def rope_factors(frequencies: Tensor, theta: float) -> np.ndarray:
    """Return the factors (head_dim / 2,) float32 for the file: llama.cpp divides the rotary frequencies of an unscaled
    rope by them to get the model's `frequencies` (head_dim / 2,)."""
    scaled = frequencies.float().cpu().numpy()
    powers = np.arange(len(scaled), dtype=np.float32) / len(scaled)
    return np.asarray(theta**-powers / scaled, dtype=np.float32)


def pack_tensor(name: str, values: np.ndarray, stored: GGMLQuantizationType) -> tuple[np.ndarray, GGMLQuantizationType]:
    """Return a tensor's bytes as they are stored, and their type. Vectors stay in float32, and ids in int64. A matrix
    whose rows are not divisible into blocks is not quantised.

    name: the tensor's name, for the error. stored: the wanted type. Raises UserError for values that float16 cannot
    represent.
    """
    if values.ndim == 1:
        return values, GGMLQuantizationType.I64 if values.dtype == np.int64 else GGMLQuantizationType.F32
    if stored is GGMLQuantizationType.Q8_0 and values.shape[-1] % BLOCK:
        stored = GGMLQuantizationType.BF16
    packed = quantize(values, stored)
    if stored is GGMLQuantizationType.F16 and not np.isfinite(packed).all():
        raise UserError(
            f"dtype=float16: the tensor {name} has values above {np.finfo(np.float16).max:g}: set dtype=bfloat16"
        )
    return packed, stored


# --- tokenizer


def fit_vocabulary(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: GGUFReader, path: str
) -> list[str]:
    """Resize the vocabulary of the draft `model` to a GGUF target's, in place, and return remarks for the README.
    tokenizer: the draft's. path: the target's file, for messages. Raises UserError if the draft's tokens differ from
    the file's."""
    field = target.get_field(TOKENS)
    if field is None:
        raise UserError(f"target.path={path} has no key {TOKENS}, which lists the tokens: name another GGUF file")
    theirs, size = field.contents(), model.config.vocab_size
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if index >= len(theirs) or theirs[index] != token:
            other = repr(theirs[index]) if index < len(theirs) else "no token"
            raise UserError(
                f"target.path={path}: its vocabulary differs from the draft's, first at id {index}: {other} in the "
                f"file, {token!r} in the draft: name the GGUF file of the target that the draft was trained for"
            )
    mass = resize(model, len(theirs), tokenizer)
    if len(theirs) <= size:
        return []
    return [f"Vocabulary padded from {size} to {len(theirs)} rows; mass on the new ones: {mass:.1e}."]


def add_words(writer: GGUFWriter, words: PreTrainedTokenizerBase | GGUFReader, model: PreTrainedModel) -> list[str]:
    """Add a tokenizer, or that of another GGUF file, to the file that is being written, with a token for every row of
    the model's embedding. Return remarks for the README."""
    if not isinstance(words, GGUFReader):
        return _add_tokenizer(writer, words, model)
    for name, field in words.fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    return []


def _add_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> list[str]:
    """Add a byte-level BPE to the file that is being written, with a token for every row of the embedding. Return a
    list with a remark for the user if llama.cpp has no name for the tokenizer's way to cut texts into words, otherwise
    []. Raises UserError for another kind of tokenizer."""
    core = json.loads(tokenizer.backend_tokenizer.to_str()) if isinstance(tokenizer, PreTrainedTokenizerFast) else {}
    if core.get("model", {}).get("type") != "BPE" or "ByteLevel" not in {
        one["type"] for one in _steps(core, "decoder")
    }:
        raise UserError(
            f"engine={ENGINE}: the draft's tokenizer is no byte-level BPE, so it cannot be written: set target.path= "
            "to the target's GGUF file, and its tokenizer is copied"
        )
    tokens, types = _tokens(tokenizer, model.config.vocab_size)
    cut = split_name(core)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in core["model"]["merges"]])
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id)
    for add, index in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_eot_token_id, _other_end(tokenizer, model)),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if index is not None:
            add(index)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
    if cut != UNKNOWN_SPLIT:
        return []
    return [
        "llama.cpp has no name for how this tokenizer cuts texts into words. As a draft the file needs none, since "
        "it reads the target's ids; do not serve it by itself."
    ]


def _tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[list[str], list[int]]:
    """Return two lists: the text and the type of every id below `size`. An id without a token has the type "unused"."""
    tokens, types = [f"[PAD{index}]" for index in range(size)], [int(TokenType.UNUSED)] * size
    for token, index in tokenizer.get_vocab().items():
        tokens[index], types[index] = token, int(TokenType.NORMAL)
    for index, added in tokenizer.added_tokens_decoder.items():
        types[index] = int(TokenType.CONTROL if added.special else TokenType.USER_DEFINED)
    return tokens, types


def _other_end(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> int | None:
    """Return the first id that ends a text and is not the tokenizer's end token, for example an end-of-turn token; None
    if there is none."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    return next((end for end in (ends if isinstance(ends, list) else [ends]) if end != tokenizer.eos_token_id), None)


def split_name(core: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a tokenizer cuts texts into words before it merges; `UNKNOWN_SPLIT`
    if llama.cpp has no name for it. core: the content of tokenizer.json."""
    normalizers = {one["type"] for one in _steps(core, "normalizer")}
    name = SPLITS.get(tuple(_cut(one) for one in _steps(core, "pre_tokenizer")), UNKNOWN_SPLIT)
    whole = bool(core["model"].get("ignore_merges"))
    return UNKNOWN_SPLIT if normalizers - {"NFC"} or whole != (name == WHOLE_WORDS) else name


def _steps(core: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    """Return the steps of one part of tokenizer.json, for example "pre_tokenizer": the part itself, or the steps in its
    sequence; [] if the part is missing."""
    step = core.get(part)
    if step is None:
        return []
    inner = {"pre_tokenizer": "pretokenizers", "normalizer": "normalizers", "decoder": "decoders"}[part]
    return list(step[inner]) if step["type"] == "Sequence" else [step]


def _cut(step: Mapping[str, Any]) -> tuple[str, Any]:
    """Return a step of the pre-tokenizer as a tuple (type, option), as in the keys of `SPLITS`."""
    if step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
        return "ByteLevel", step.get("use_regex", True)
    if step["type"] == "Digits":
        return "Digits", step["individual_digits"]
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return "Split", step["pattern"].get("Regex")
    return step["type"], None
