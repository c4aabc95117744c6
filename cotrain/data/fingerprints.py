"""Fingerprints of models, tokenizers and files. Stored texts and hidden states are reused only if the fingerprints of
the weights, settings and data behind them are unchanged.

A fingerprint is a JSON value. Two fingerprints are compared key by key, so a message can name the keys that differ.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cotrain.config.settings import flat
from inference.drafts.compatibility import hash_tokenizer
from inference.models.pretrained import weights_quantisation, whole_tensor
from inference.request import ends_of

SAMPLE = 1024  # values of each tensor that are hashed; the others enter only through a sum
CHUNK = 2**24  # values that are summed at once
# keys of a config that do not change the model's distribution
NAMES = {"transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path", "use_cache"}
# a text with special tokens, digits, white space and several alphabets, which tokenizers treat differently
PROBE = " The  café's 1234 tests,\n\tdef f(x): return x**2  # 漢字 🙂\r\n<|endoftext|></s>"
HEXADECIMAL = 24  # a string of at least so many hexadecimal digits is a hash, and not shown in messages


def identity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the fingerprint of a target as a JSON object: its config, tokenizer, weights, end ids and adapter."""
    return {
        "config": settings(model.config),
        "tokenizer": spoken(tokenizer),
        "weights": fingerprint(model),
        "ends": sorted(ends_of(model)),
        "adapter": _adapter(model),
    }


def settings(config: PretrainedConfig) -> dict[str, Any]:
    """Return the config as a dictionary, without names and versions. Values that equal the defaults of transformers are
    left out, so a key that a later release adds does not change the fingerprint."""
    return dict(_plain(config.to_diff_dict()))


def spoken(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return three hashes that identify a tokenizer: of the vocabulary with its special ids, of the chat template (None
    without one), and of the token ids of `PROBE`."""
    return {
        "vocabulary": hash_tokenizer(tokenizer),
        "chat_template": _hash(tokenizer.chat_template) if tokenizer.chat_template else None,
        "ids": _hash(list(tokenizer(PROBE, verbose=False)["input_ids"])),
    }


def fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of the weights. It changes if the model is trained further or quantised.

    The hash covers `SAMPLE` values of each tensor, the sum of the bits of all its values, and the method of
    quantisation. The same numbers in bfloat16 and in float32 give the same hash.
    `inference.drafts.compatibility.hash_weights` is another hash: it covers some bytes of weight files, which need not
    be loaded. This one covers a loaded target, quantised and with its adapter, because caches store the outputs of that
    target.
    """
    digest = hashlib.blake2b(digest_size=16)
    for place, (name, tensor) in enumerate(model.state_dict().items()):
        flat = whole_tensor(model, name, tensor.detach()).flatten()
        digest.update(_some_bits(flat, place))
        total = sum(int(_bits(part).sum(dtype=torch.int64)) for part in flat.split(CHUNK))
        digest.update(f"{tuple(tensor.shape)} {total};".encode())
    how = weights_quantisation(model.config)
    digest.update(str(how and how.get("quant_method")).encode())
    return digest.hexdigest()


def _some_bits(flat: Tensor, place: int) -> bytes:
    """Return the bits, as bytes, of `SAMPLE` values of a tensor at pseudorandom indices. A fixed stride could hit the
    same column in each row. flat (n,). place: the tensor's number in its model, which seeds the choice."""
    size = flat.numel()
    drawn = hashlib.shake_128(f"{place} {size}".encode()).digest(8 * min(SAMPLE, size))
    chosen = torch.from_numpy((numpy.frombuffer(drawn, "<u8") % max(size, 1)).astype("int64"))
    return _bits(flat[chosen.to(flat.device)]).cpu().numpy().tobytes()


def _bits(values: Tensor) -> Tensor:
    """Return the bits of floating-point numbers as integers of the same shape, equal for bfloat16 and float32. Integers
    are returned unchanged."""
    if values.dtype == torch.float64:
        return values.view(torch.int64)
    return values.float().contiguous().view(torch.int32) if values.is_floating_point() else values.long()


def contents(files: Mapping[str, Path]) -> str:
    """Return a hash of the contents of files. files: path by name. The names are hashed too, the paths are not."""
    digest = hashlib.blake2b(digest_size=16)
    for name, path in sorted(files.items()):
        stat = path.stat()
        digest.update(f"{name}\0{_held(path, stat.st_size, stat.st_mtime_ns)}\0".encode())
    return digest.hexdigest()


@cache
def _held(path: Path, size: int, changed: int) -> str:
    """Return a hash of a file's content. It is cached until the file's size or modification time (nanoseconds)
    changes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()


def stamps(files: Mapping[str, Path]) -> str:
    """Return a hash of the names, sizes and modification times of files that are too large to be read. files: path by
    name."""
    stats = {name: path.stat() for name, path in files.items()}
    return _hash([[name, stat.st_size, stat.st_mtime_ns] for name, stat in sorted(stats.items())])


def differences(actual: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys whose values differ between two fingerprints. actual: the stored fingerprint. wanted: the
    fingerprint that is needed now."""
    old, new = _flat(actual), _flat(wanted)
    return [key for key in {**old, **new} if old.get(key) != new.get(key)]


def said_differences(actual: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return text that lists the values that differ between two fingerprints. If a value is a hash, only its key is
    listed. actual: the stored fingerprint. wanted: the fingerprint that is needed now."""
    old, new = _flat(actual), _flat(wanted)
    parts = []
    for key in differences(actual, wanted):
        values = (old.get(key), new.get(key))
        hidden = any(
            isinstance(value, str) and len(value) >= HEXADECIMAL and not set(value) - set("0123456789abcdef")
            for value in values
        )
        parts.append(f"{key} differs" if hidden else f"{key} was {values[0]!r}, now {values[1]!r}")
    return "; ".join(parts)


def _flat(values: Mapping[str, Any]) -> dict[str, object]:
    """Return the values by dotted key, those of nested dictionaries unless these are empty."""
    return {key: value for key, value in flat(values) if not isinstance(value, dict) or not value}


def _adapter(model: PreTrainedModel) -> str | None:
    """Return a hash of the settings of unmerged adapters, such as their scale, or None without adapters. The adapters'
    tensors are not covered, since they are in the state dict."""
    adapters = getattr(model, "peft_config", None)  # set by peft alone
    if not adapters:
        return None
    paths = {"base_model_name_or_path", "revision", "inference_mode"}
    return _hash({name: {k: v for k, v in one.to_dict().items() if k not in paths} for name, one in adapters.items()})


def _plain(value: Any) -> Any:
    """Return the value with JSON types only, without the keys in `NAMES`."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items() if key not in NAMES}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _hash(value: Any) -> str:
    def listed(other: Any) -> Any:
        return sorted(map(str, other)) if isinstance(other, set | frozenset) else str(other)

    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=listed).encode(), digest_size=16).hexdigest()
