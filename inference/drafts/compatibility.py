"""Checks whether a draft and a target fit together. This module hashes what a draft depends on, and lists the problems
of a draft and a target."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any
from zlib import crc32

from huggingface_hub import try_to_load_from_cache
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from inference.drafts.bundled_target import resolve
from inference.drafts.weight_files import CONFIG, WEIGHTS, weight_files
from inference.models.pretrained import TIED, weights_quantisation

ADAPTER = "adapter_config.json", "adapter_model.safetensors"  # PEFT's files
BLOCK, BLOCKS = 256, 4096  # bytes of a tensor, and tensors, that `hash_weights` reads
LAYER, NUMBER = re.compile(r"\D*\d*"), re.compile(r"\d+")  # a tensor's name up to its layer's number, and others

# The keys that a draft depends on. The hash does not include names, paths, versions, dtype, or keys of later versions
# of transformers.
CONFIG_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rope_parameters",
    "sliding_window",
    "tie_word_embeddings",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "num_decoder_layers",
)


def hash_target(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str | None]:
    """Return two SHA-256 hashes of what a draft depends on. "config" covers the target's shape, "tokenizer" the
    tokenizer's vocabulary and special ids.

    Both are hexadecimal. They are equal on every machine, with or without a loaded model, and for every quantisation of
    the target. "tokenizer" is None if there is no tokenizer. Weights are not hashed, so two fine-tunes of one model
    have the same hashes.
    """
    text = config.get_text_config(decoder=True)
    # a family has only some of these keys, a few under another name (attribute_map)
    shape = {key: getattr(text, key, None) for key in CONFIG_KEYS}
    shape["tie_word_embeddings"] = (weights_quantisation(config) or {}).get(TIED, shape["tie_word_embeddings"])
    return {
        "config": _sha256({key: value for key, value in shape.items() if value is not None}),
        "tokenizer": None if tokenizer is None else hash_tokenizer(tokenizer),
    }


def hash_weights(path: str, adapter: str | None = None) -> str | None:
    """Return a hash of a target's weights, in hexadecimal, read from its files, or None if they cannot be read. It
    raises no error; loading the target reports what is wrong with the files.

    path: a folder, a hub id, a GGUF file, or the name of a bundled or packaged target; for a hub id, the files in the
    hub's cache are read. adapter: the folder or hub id of a PEFT adapter, whose weights are hashed too.

    The hash covers the names, dtypes and shapes of all tensors and the middle `BLOCK` bytes of at most `BLOCKS` of
    them, so it takes less than a second for any size. It depends on the dtype of the files, but not on how many files
    there are. Use it in commands that have not loaded the target. For a loaded target,
    `cotrain.data.fingerprints.fingerprint` covers every value, quantised or adapted.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        for files in [_weights(resolve(path))] + ([_weights(adapter)] if adapter else []):
            stored = {file: _stored(file) for file in files}
            chosen = _chosen(name for tensors in stored.values() for name in tensors)
            read = {}
            for file, tensors in stored.items():
                with file.open("rb", buffering=0) as opened:
                    for name, (about, begin, size) in tensors.items():
                        read[name] = about + (_read(opened, begin, size) if name in chosen else b"")
            digest.update(b"".join(read[name] for name in sorted(read)))
    except Exception:  # beside OSError and ValueError: RuntimeError of a failing mmap, KeyError of a broken header, ...
        return None
    return digest.hexdigest()


def _weights(path: str) -> list[Path]:
    """Return the safetensors files of a model or an adapter. Raises OSError if there are none."""
    cached = (try_to_load_from_cache(path, name) for name in (CONFIG, ADAPTER[0]) if not Path(path).is_dir())
    folder = next((Path(file).parent for file in cached if isinstance(file, str)), Path(path))
    return weight_files(folder, ADAPTER[1] if (folder / ADAPTER[1]).is_file() else WEIGHTS)


def _stored(file: Path) -> dict[str, tuple[bytes, int, int]]:
    """Return, for each tensor of a safetensors file by name: its entry in the header (name, dtype, shape), the position
    in the file of the bytes to read, and the number of these bytes. The file is not mapped, since around each byte of a
    mapped file the system reads many pages."""
    with file.open("rb", buffering=0) as opened:
        data = 8 + int.from_bytes(_read(opened, 0, 8), "little")
        header = json.loads(_read(opened, 8, data - 8))
    header.pop("__metadata__", None)
    stored = {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        size = min(end - begin, BLOCK)
        stored[name] = f"{name} {about['dtype']} {about['shape']};".encode(), data + (begin + end - size) // 2, size
    return stored


def _read(opened: FileIO, begin: int, size: int) -> bytes:
    opened.seek(begin)
    if len(block := opened.read(size)) != size:
        raise ValueError(
            f"{opened.name}: {size} bytes expected at {begin}, but only {len(block)} are there: copy the file again"
        )
    return block


def _chosen(names: Iterable[str]) -> set[str]:
    """Return the names of at most `BLOCKS` tensors. One tensor of each kind of projection in each layer comes first, so
    that an adapter merged into any of them changes the hash. Further tensors of a kind (other experts) follow, in
    pseudorandom order."""
    ranks, seen = {}, Counter[str]()
    for name in sorted(names, key=lambda name: (crc32(name.encode()), name)):
        layer = LAYER.match(name)[0]  # type: ignore[index]  # it matches every name
        seen[kind := layer + NUMBER.sub("", name[len(layer) :])] += 1
        ranks[name] = seen[kind]
    return set(sorted(ranks, key=ranks.__getitem__)[:BLOCKS])


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 hash, in hexadecimal, of the tokenizer's vocabulary and special ids."""
    return _sha256([tokenizer.get_vocab(), special_ids(tokenizer)])


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Return the ids of the special tokens that occur in texts, by name (bos, eos, unk); None for a token that the
    tokenizer lacks. The pad token is omitted, because users often set it to the end token."""
    return {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "unk": tokenizer.unk_token_id}


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def check_pair(
    target_config: PretrainedConfig,
    target_tokenizer: PreTrainedTokenizerBase | None,
    draft_config: PretrainedConfig,
    draft_tokenizer: PreTrainedTokenizerBase | None,
) -> list[str]:
    """Return the reasons why target and draft cannot serve together, one sentence per reason.

    The vocabularies are compared token by token (if both tokenizers are given), then the special ids, the padded
    vocabulary sizes and the maximum positions. A reason that begins with "warning:" only costs speed or length. For
    every other reason, serving engines reject the pair.
    """
    target, draft = target_config.get_text_config(decoder=True), draft_config.get_text_config(decoder=True)
    problems = []
    if target_tokenizer is not None and draft_tokenizer is not None:
        problems += tokenizer_problems(target_tokenizer, draft_tokenizer)
    for side, config, tokenizer in (("target", target, target_tokenizer), ("draft", draft, draft_tokenizer)):
        if tokenizer is not None and (size := max(tokenizer.get_vocab().values()) + 1) > config.vocab_size:
            problems.append(
                f"vocab_size: the {side} has {config.vocab_size} ids, but its tokenizer has {size}: use the tokenizer "
                f"that belongs to the {side}"
            )
    if draft.vocab_size != target.vocab_size:
        problems.append(
            f"vocab_size: the draft has {draft.vocab_size} rows, but the target has {target.vocab_size} (padding "
            "included), and engines need equal numbers: `cotrain export` makes them equal"
        )
    # recurrent families have no such limit and no such key
    long, short = (getattr(config, "max_position_embeddings", None) for config in (target, draft))
    if long is not None and short is not None and short < long:
        problems.append(
            f"warning: max_position_embeddings: the draft's {short} is below the target's {long}: texts longer "
            f"than {short} tokens get no drafts, or are rejected"
        )
    return problems


def same_sizes(config: PretrainedConfig, target: PreTrainedModel, where: str) -> None:
    """Raise ValueError unless the target's hidden size and vocabulary size are those in `config`, the config of a
    network that reads the target's states. where: the start of the message. The target may be on the meta device."""
    theirs = target.config.get_text_config()
    for key in ("hidden_size", "vocab_size"):
        ours, other = getattr(config, key), getattr(theirs, key)
        if ours != other:
            raise ValueError(
                f"{where}: its {key} is {ours}, but the target's is {other}: give the target that it was made for"
            )


def tokenizer_problems(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> list[str]:
    """Return the differences between the target's and the draft's tokenizers, one sentence per difference. Both must
    give the same ids."""
    problems, (p, q) = [], (target.get_vocab(), draft.get_vocab())
    if p != q:
        token, _ = min(p.items() ^ q.items(), key=lambda item: (item[1], item[0]))
        problems.append(
            f"tokenizer: vocabularies differ, first at token {token!r}: id {p.get(token)} in the target's, "
            f"{q.get(token)} in the draft's: give the draft the target's tokenizer"
        )
    theirs = special_ids(draft)
    for name, index in special_ids(target).items():
        if index != theirs[name]:
            problems.append(
                f"tokenizer: {name}_token_id is {index} for the target, {theirs[name]} for the draft: give the draft "
                "the target's tokenizer"
            )
    return problems
