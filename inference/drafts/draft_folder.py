"""Draft folders: plain Hugging Face files, `report.json` (measured) and `cotrain.json` (what it is).

A folder is written whole or not at all, by `save` (the main job) and `write` (exports). Reading runs no code of the
folder, takes weights from safetensors only, and refuses what transformers would fill with random numbers.
"""

import copy
import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from inference.drafts.atomic import new_folder
from inference.drafts.compatibility import check_pair, hash_target, hash_tokenizer
from inference.drafts.planned_tree import PlannedTree
from inference.drafts.weight_files import CONFIG, load_weights, named, read_json, require_finite

__all__ = ["Folder", "Metadata", "check_pair", "hash_target", "load_draft", "read", "save", "write"]

FORMAT = 1
METADATA, REPORT, GENERATION = "cotrain.json", "report.json", "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
OBJECTIVES = ("sampled", "greedy")
LATER = {"tree"}  # keys that folders of this format may lack: made before there were any


@dataclass(frozen=True)
class Metadata:
    """What `cotrain.json` says of a draft.

    target: {"name": hub id, path or "bundled", "config": hash, "tokenizer": hash}, see `hash_target`.
    k: planned draft length in tokens, of chains. objective: "sampled", trained for acceptance sum_v min(p, q), or
    "greedy", for p(argmax q). regime: the sampling settings it was trained for. origin (`made` in the file): command,
    commit, versions, date, loss. kind: of proposer. report: SHA-256 of report.json, filled in by `save`. int8: whether
    it was measured with its weights rounded to 8 bits, as `inference.load` then runs it on a CPU. tree: what is drafted
    in place of a chain, None where chains were faster.

    Raises ValueError naming the key and what was found.
    """

    target: Mapping[str, str | None]
    k: int
    objective: str = "sampled"
    regime: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "independent"
    report: str | None = None
    int8: bool = False
    tree: PlannedTree | None = None
    format: int = FORMAT

    def __post_init__(self) -> None:
        for name, value in (("target", self.target), ("regime", self.regime), ("made", self.origin)):
            if not isinstance(value, Mapping):
                raise ValueError(f"{name} must be an object, not {value!r}")
        if set(self.target) != {"name", "config", "tokenizer"} or not isinstance(self.target["name"], str):
            raise ValueError(f"target must hold name, config and tokenizer, not {dict(self.target)!r}")
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k must be a whole number of at least 1, not {self.k!r}")
        if not isinstance(self.int8, bool):
            raise ValueError(f"int8 must be true or false, not {self.int8!r}")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, not {self.objective!r}")

    def exported(self, target: str | None, k: int | None, objective: str | None) -> "Metadata":
        """As an export says it, with what was asked for in place of its own. A target that is named has the adapter, if
        there was one, merged into its weights; a length that is asked for is one of chains."""
        made = {**self.origin, "adapter": None} if target and self.origin.get("adapter") else self.origin
        return changed(
            self,
            target={**self.target, "name": target or self.target["name"]},
            k=k or self.k,
            tree=None if k else self.tree,
            objective=objective or self.objective,
            origin=made,
        )


@dataclass(frozen=True)
class Folder:
    """A folder that was found to be a draft: kind of proposer, metadata (None if made elsewhere), path."""

    kind: str
    metadata: Metadata | None
    path: Path


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path,
    metadata: Metadata,
    report: Mapping[str, Any] | None,
    replace: bool = False,
) -> Path:
    """Write a draft folder atomically; a crash at any moment leaves what was there before.

    Raises FileExistsError when the folder has files and `replace` is off, and as `write` does.
    """
    with new_folder(Path(folder), replace=replace) as new:
        write(model, tokenizer, new, metadata, report)
    return Path(folder)


def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    metadata: Metadata,
    report: Mapping[str, Any] | None,
) -> None:
    """Fill an existing empty folder with the files of a draft, weights in the model's dtype.

    Raises ValueError for weights that are not finite and for a tokenizer that is not the target's.
    """
    require_finite(model, "the draft to save")
    _same_tokenizer("the draft to save", tokenizer, metadata.target)
    model.save_pretrained(folder)
    _config(model).save_pretrained(folder)
    if model.can_generate():
        _generation(model, metadata.k).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if report is not None:
        (folder / REPORT).write_text(_json(report), encoding="utf-8")
    metadata = changed(metadata, report=digest(folder / REPORT) if report is not None else None)
    describe(folder, metadata)


def describe(folder: Path, metadata: Metadata) -> None:
    """Write what a folder of weights is."""
    values = {"made" if key == "origin" else key: value for key, value in asdict(metadata).items()}
    (folder / METADATA).write_text(_json(values), encoding="utf-8")


def _config(model: PreTrainedModel) -> PretrainedConfig:
    """The model's config that tells the truth about tied embeddings.

    A safetensors writer stores a shared tensor once. Were the config to say "not tied", a reader would fill
    the other name with random numbers; were it to say "tied" of two tensors, some engines drop one.
    """
    config = copy.deepcopy(model.config)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    config.tie_word_embeddings = None not in (head, embedding) and head.weight is embedding.weight
    return config


def _generation(model: PreTrainedModel, k: int) -> GenerationConfig:
    """Assisted generation of transformers with exactly k drafts a round."""
    return GenerationConfig(
        bos_token_id=model.generation_config.bos_token_id,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.pad_token_id,
        num_assistant_tokens=k,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def digest(file: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read(folder: str | Path) -> Folder:
    """What a folder says it is, weights unread. A plain Hugging Face causal LM is an independent draft.

    Raises FileNotFoundError when there is no such folder or no config.json in it, ValueError for broken
    JSON, another format version, or a key that is missing, unknown or wrong; the message names file and key.
    """
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such folder")
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(f"{path} is no draft folder: it has no {CONFIG}")
    for name in (CONFIG, GENERATION, REPORT):
        if (path / name).is_file():
            read_json(path / name)
    metadata = _metadata(path / METADATA) if (path / METADATA).is_file() else None
    return Folder(metadata.kind if metadata else "independent", metadata, path)


def _metadata(file: Path) -> Metadata:
    values = read_json(file)
    names = {item.name for item in fields(Metadata)} ^ {"origin", "made"}
    try:
        # the version first: another one may well have other keys
        if values.get("format") != FORMAT:
            raise ValueError(f"format is {values.get('format')!r}, this version reads {FORMAT}")
        if odd := (set(values) ^ names) - (LATER - set(values)):
            raise ValueError(f"keys missing or unknown: {', '.join(sorted(odd))}")
        values = {"origin" if key == "made" else key: value for key, value in values.items()}
        return Metadata(**values | {"tree": PlannedTree.read(values.get("tree"))})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def load_draft(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    *,
    network: Any = AutoModelForCausalLM,
    target: Mapping[str, str | None] | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, PreTrainedTokenizerBase | None, Metadata | None]:
    """The network of a draft in eval mode on the CPU, its tokenizer and metadata where it has them.

    dtype: by default the folder's own. network: the class that it is of, the `Proposer.network_class` of the folder's
    kind. target: `hash_target` of the target it is to serve; another tokenizer is refused, another shape warned of.
    Code in the folder runs only with `trust_remote_code`.

    Raises as `read`, and ValueError naming the file for a kind of another class, for weights that are pickled,
    truncated, missing, of another shape than config.json says, or not finite, and for a tokenizer that is broken or
    another one.
    """
    found = read(folder)
    _of_class(found, network)
    model, problems, _ = load_weights(found.path, dtype, trust_remote_code, network)
    if problems:
        raise ValueError("; ".join(problems))
    tokenizer = load_tokenizer(found.path, trust_remote_code)
    made_for = found.metadata.target if found.metadata else None
    _same_tokenizer(str(found.path), tokenizer, made_for)
    _same_tokenizer(str(found.path), tokenizer, target)
    if target and made_for:
        _same_shape(found.path / METADATA, made_for, target)
    return model, tokenizer, found.metadata


def _of_class(found: Folder, network: Any) -> None:
    """Raise ValueError where a folder says that it holds something else; one that was made elsewhere says nothing."""
    from inference.proposers import kind_of  # which import this module

    if found.metadata is None:
        return
    try:
        held = kind_of(found.kind).network_class
    except ValueError as error:
        raise ValueError(f"{found.path / METADATA}: {error}") from error
    if held is not network:
        raise ValueError(
            f"{found.path / METADATA}: kind is {found.kind!r}, whose folder holds {named(held)}, not {named(network)}"
        )


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder, None when it has no files of one. Raises ValueError for broken ones."""
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    for name in TOKENIZER_FILES:
        if name.endswith(".json") and (path / name).is_file():
            read_json(path / name)
    about = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    # transformers warns of a kind of model that it does not know; a tokenizer does not ask for it
    ours = None if about.get("model_type", "") in CONFIG_MAPPING or "auto_map" in about else PretrainedConfig()
    try:
        return AutoTokenizer.from_pretrained(
            path, config=ours, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the Rust tokenizers raise the bare class
        raise ValueError(f"{path}: its tokenizer files cannot be read: {error}") from error


def _same_tokenizer(
    where: str, tokenizer: PreTrainedTokenizerBase | None, target: Mapping[str, str | None] | None
) -> None:
    if tokenizer is None or target is None or target["tokenizer"] is None:
        return
    found = hash_tokenizer(tokenizer)
    if found != target["tokenizer"]:
        raise ValueError(
            f"{where}: its tokenizer is not the target's (vocabulary and special ids hash to {found[:12]}, "
            f"the target's to {target['tokenizer'][:12]}): a draft must use the target's token ids"
        )


def _same_shape(file: Path, made_for: Mapping[str, str | None], target: Mapping[str, str | None]) -> None:
    if made_for["config"] not in (None, target["config"]):
        warnings.warn(
            f"{file}: the draft was made for a target of another shape, {made_for['name']}: text stays "
            "exact, acceptance may be low",
            stacklevel=3,
        )
