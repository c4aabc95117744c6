"""What made kept texts and states, so that nothing is reused that other weights, settings or data made.

Each part is a plain JSON value: two are compared part by part, and a difference is said by its name.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from inference.drafts.compatibility import hash_tokenizer
from inference.models.pretrained import quantised
from inference.request import ends_of

SAMPLE = 1024  # values of a tensor that are hashed one by one
CHUNK = 2**24  # values that are summed at once
# of a config: names, versions and the dtype in memory, which change no distribution by themselves
NAMES = {"transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path", "use_cache"}
# special tokens, digits, white space, several alphabets: what a tokenizer may treat in its own way
PROBE = " The  café's 1234 tests,\n\tdef f(x): return x**2  # 漢字 🙂\r\n<|endoftext|></s>"
HEXADECIMAL = 24  # digits: a longer value of these alone is a hash, which says nothing to a reader


def identity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Whose texts and states something is: the whole config, tokenizer, weights, end ids and adapter of a target."""
    return {
        "config": settings(model.config),
        "tokenizer": spoken(tokenizer),
        "weights": fingerprint(model),
        "ends": sorted(ends_of(model)),
        "adapter": _adapter(model),
    }


def settings(config: PretrainedConfig) -> dict[str, Any]:
    """The config without names and versions; what is as transformers has it by default may be missing, so that keys
    which a later release adds change nothing."""
    return dict(_plain(config.to_diff_dict()))


def spoken(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Hashes of vocabulary and special ids, of the chat template, and of what a text becomes, its start included."""
    return {
        "vocabulary": hash_tokenizer(tokenizer),
        "chat_template": _hash(tokenizer.chat_template) if tokenizer.chat_template else None,
        "ids": _hash(list(tokenizer(PROBE, verbose=False)["input_ids"])),
    }


def fingerprint(model: PreTrainedModel) -> str:
    """A hash that changes when the target is trained further or quantised: of each tensor the values at indices that a
    hash chooses, and the sum of the bits of all, which is the same in any order; and its quantisation. bfloat16 counts
    as the same numbers in float32."""
    digest = hashlib.blake2b(digest_size=16)
    for place, tensor in enumerate(model.state_dict().values()):
        flat = tensor.detach().flatten()
        if len(flat):
            digest.update(_bits(flat[_chosen(place, len(flat)).to(flat.device)]).cpu().numpy().tobytes())
        total = sum(int(_bits(part).sum(dtype=torch.int64)) for part in flat.split(CHUNK))
        digest.update(f"{tuple(tensor.shape)} {total};".encode())
    how = quantised(model.config)
    digest.update(str(how and how.get("quant_method")).encode())
    return digest.hexdigest()


def contents(files: Mapping[str, Path]) -> str:
    """A hash of what files hold, by the names that they have among themselves."""
    digest = hashlib.blake2b(digest_size=16)
    for name, path in sorted(files.items()):
        stat = path.stat()
        digest.update(f"{name}\0{_held(path, stat.st_size, stat.st_mtime_ns)}\0".encode())
    return digest.hexdigest()


@cache
def _held(path: Path, size: int, changed: int) -> str:
    """A hash of a file that is read once while it stays as it is."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()


def stamps(files: Mapping[str, Path]) -> str:
    """A hash of names, sizes and times of change: of files too large to be read whole."""
    stats = {name: path.stat() for name, path in files.items()}
    return _hash([[name, stat.st_size, stat.st_mtime_ns] for name, stat in sorted(stats.items())])


def differences(actual: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The parts that differ, by dotted names."""
    old, new = dict(_flat(actual)), dict(_flat(wanted))
    return [key for key in {**old, **new} if old.get(key) != new.get(key)]


def said(actual: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The parts that differ, in words: hashes by their names alone."""
    old, new = dict(_flat(actual)), dict(_flat(wanted))
    parts = []
    for key in differences(actual, wanted):
        values = (old.get(key), new.get(key))
        hidden = any(isinstance(value, str) and _is_hash(value) for value in values)
        parts.append(f"{key} differs" if hidden else f"{key} was {values[0]!r}, now {values[1]!r}")
    return "; ".join(parts)


def _is_hash(value: str) -> bool:
    return len(value) >= HEXADECIMAL and not set(value) - set("0123456789abcdef")


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _bits(values: Tensor) -> Tensor:
    """Numbers as integers of the same bits."""
    if values.dtype == torch.float64:
        return values.view(torch.int64)
    return values.float().contiguous().view(torch.int32) if values.is_floating_point() else values.long()


def _chosen(place: int, size: int) -> Tensor:
    """Indices into the tensor at a place, of a size, spread by a hash: no stride that rows could share."""
    drawn = hashlib.shake_128(f"{place} {size}".encode()).digest(8 * min(SAMPLE, size))
    return torch.from_numpy((numpy.frombuffer(drawn, "<u8") % size).astype("int64"))


def _adapter(model: PreTrainedModel) -> str | None:
    """A hash of the settings of adapters that stand beside the weights, as their scale: tensors are weights."""
    adapters = getattr(model, "peft_config", None)  # only where peft put one
    if not adapters:
        return None
    paths = {"base_model_name_or_path", "revision", "inference_mode"}
    return _hash({name: {k: v for k, v in one.to_dict().items() if k not in paths} for name, one in adapters.items()})


def _plain(value: Any) -> Any:
    """JSON values, without `NAMES`."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items() if key not in NAMES}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _hash(value: Any) -> str:
    def listed(other: Any) -> Any:
        return sorted(map(str, other)) if isinstance(other, set | frozenset) else str(other)

    text = json.dumps(value, sort_keys=True, default=listed)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
