"""Draft folders: plain Hugging Face files, `report.json` (the measurement) and `cotrain.json` (`Metadata`). Some also
have `prompts.jsonl`: prompts to measure the draft with; it was not trained on them.

`save` writes a folder atomically; `write` writes its files into an empty folder. Reading a folder runs no code from it,
and accepts only weights in safetensors, except for the folders of `inference.drafts.published`. It also rejects weights
that lack tensors; transformers would fill these with random numbers.
"""

import copy
import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from inference.drafts.atomic import new_folder
from inference.drafts.bundled_target import BUNDLED
from inference.drafts.causal_lm import CausalLM
from inference.drafts.compatibility import ADAPTER, hash_tokenizer, hash_weights
from inference.drafts.gguf_target import PACKAGED
from inference.drafts.published import Published, imported, kind_in, published
from inference.drafts.weight_files import (
    CONFIG,
    building,
    class_named,
    json_if_any,
    load_weights,
    read_json,
    require_finite,
    weight_files,
    wrong_keys,
)
from inference.models.quantisation import QUANTISATIONS
from inference.sampling.parameters import Sampling, is_whole
from inference.verify.rules import rule_of
from inference.verify.tree import Tree, depths_of

FORMAT = 1
METADATA, REPORT, GENERATION = "cotrain.json", "report.json", "generation_config.json"
PROMPTS = "prompts.jsonl"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
# the ids that begin, end and pad texts; the last three are of encoder-decoders
IDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_decoder_ids",
)
OBJECTIVES = ("sampled", "greedy")
LATER = {"tree", "served"}  # keys that older folders of this format lack


@dataclass(frozen=True)
class PlannedTree:
    """The tree that every round drafts, instead of a chain.

    parents: node i has parent parents[i] < i, or -1 if it follows the text; as in a proposer's `shape=`. rule: the
    verification rule, "tree" or "traversal". likeliest: whether the children are the likeliest tokens; otherwise they
    are sampled. Raises ValueError naming the key that is wrong.
    """

    parents: Sequence[int]
    rule: str
    likeliest: bool = False

    def __post_init__(self) -> None:
        listed = isinstance(self.parents, Sequence) and not isinstance(self.parents, str)
        if not listed or not all(map(is_whole, self.parents)):
            raise ValueError(f"tree.parents must be a list of whole numbers, not {self.parents!r}")
        object.__setattr__(self, "parents", tuple(self.parents))
        try:
            Tree(self.parents)
            rule = rule_of(self.rule)
        except (ValueError, TypeError) as error:
            raise ValueError(f"tree.{error}") from error
        if rule.branches is None:
            raise ValueError(f"tree.rule must be 'tree' or 'traversal', not {self.rule!r}")
        if not isinstance(self.likeliest, bool):
            raise ValueError(f"tree.likeliest must be true or false, not {self.likeliest!r}")

    @classmethod
    def read(cls, values: Any) -> "PlannedTree | None":
        """Return the planned tree that the JSON value of the key `tree` describes; None for null. Raises ValueError
        naming the key that is wrong."""
        if values is None:
            return None
        if not isinstance(values, Mapping) or set(values) != {"parents", "rule", "likeliest"}:
            raise ValueError(f"tree must be null, or have the keys parents, rule and likeliest, not {values!r}")
        return cls(**values)

    @property
    def depth(self) -> int:
        """Return the number of levels, which is the largest number of drafts that a round can accept."""
        return max(depths_of(tuple(self.parents)))

    @property
    def most_children(self) -> int:
        """Return the largest number of children of a node, or of the text."""
        return max(map(self.parents.count, self.parents))


@dataclass(frozen=True)
class ServedAs:
    """How a draft was measured, and is served unless the caller says otherwise.

    verify: the verification rule of chains; a planned tree has its own. dtype: the target's dtype; "auto" for the
    checkpoint's, or float32 on a CPU that would emulate it. quantisation: of the target's weights. prompt_tokens: the
    largest number of tokens of a measured prompt. messages: whether the prompts are lists of messages. template:
    arguments of the chat template that renders messages. chat: the setting `data.chat`: whether rows without messages
    are rendered too, each as one message; None for its default. Raises ValueError naming a wrong key and its value.
    """

    verify: str = "token"
    dtype: str = "auto"
    quantisation: str = "none"
    prompt_tokens: int = 48
    messages: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    chat: bool | None = None

    def __post_init__(self) -> None:
        rule_of(self.verify)
        if self.dtype != "auto" and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, not {self.dtype!r}")
        if self.quantisation not in QUANTISATIONS:
            raise ValueError(f"quantisation must be one of {', '.join(QUANTISATIONS)}, not {self.quantisation!r}")

    @classmethod
    def read(cls, values: Any) -> "ServedAs":
        """Return what the JSON value of the key `served` describes. Keys that older folders lack, or have as null, get
        the defaults. Raises ValueError naming the key that is wrong."""
        names = {item.name for item in fields(cls)}
        if not isinstance(values, Mapping) or set(values) - names:
            raise ValueError(f"served may only have the keys {', '.join(sorted(names))}, not {values!r}")
        try:
            return cls(**{key: value for key, value in values.items() if value is not None})
        except ValueError as error:
            raise ValueError(f"served.{error}") from error


@dataclass(frozen=True)
class Metadata:
    """The contents of `cotrain.json`. Every command that decodes with the draft, and `inference.load`, reads it here.

    target: {"name": hub id, path or "bundled", "config": hash, "tokenizer": hash, "weights": hash}, see `hash_target`
    and `hash_weights`; older folders lack "weights". k: planned draft length of chains, in tokens. objective: the
    acceptance that the draft was trained for, "sampled" for sum_v min(p, q) or "greedy" for p(argmax q). regime:
    sampling settings in training. origin: command, commit, versions, date, loss. kind: kind of draft. report: SHA-256
    of report.json, set by `write`; None without a report. int8: whether the draft was measured with weights rounded to
    8 bits; if so, `inference.load` rounds them too, on a CPU. tree: the tree to draft instead of a chain, None if
    chains were faster. served: the other settings of the measurement.

    Raises ValueError naming a wrong key and its value.
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
    served: ServedAs = ServedAs()
    format: int = FORMAT

    @property
    def rule(self) -> str:
        """Return the name of the verification rule: the planned tree's if there is one, else `served.verify`, the rule
        for chains."""
        return self.tree.rule if self.tree else self.served.verify

    @property
    def learnt_from(self) -> str:
        """Return the name of the target that the draft was trained for. After an export for another target, this is
        still the first one."""
        return str(self.origin.get("learnt_from") or self.target["name"])

    def __post_init__(self) -> None:
        for name, value in (("target", self.target), ("regime", self.regime), ("origin", self.origin)):
            if not isinstance(value, Mapping):
                raise ValueError(f"{name} must be an object, not {value!r}")
        if {*self.target} - {"weights"} != {"name", "config", "tokenizer"} or not isinstance(self.target["name"], str):
            raise ValueError(
                "target must have the keys name (text), config and tokenizer, and may have weights; it has "
                f"{dict(self.target)!r}"
            )
        if not is_whole(self.k, 1):
            raise ValueError(f"k must be a whole number of at least 1, not {self.k!r}")
        if not isinstance(self.int8, bool):
            raise ValueError(f"int8 must be true or false, not {self.int8!r}")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, not {self.objective!r}")
        try:
            Sampling(**self.regime)
        except (ValueError, TypeError) as error:
            raise ValueError(f"regime: {error}") from error

    def exported(self, target: str | None, k: int | None, objective: str | None) -> "Metadata":
        """Return a copy for an exported draft. The given values replace the present ones; None keeps the present value.

        target: name of the target to serve. If the draft was trained for an adapter, this target includes it, so the
        adapter is removed. If the target's weights are not those that the draft was trained for, `origin` gets two
        keys: `learnt_from`, the old target's name, and `warning`, a sentence that says so. k: draft length of chains,
        in tokens; the tree is then removed. objective: "sampled" or "greedy", the acceptance that the draft was trained
        for.
        """
        merged = target and self.origin.get("adapter")
        origin = {**self.origin, "adapter": None} if merged else self.origin
        if target:
            names = {"learnt_from": self.learnt_from, "warning": other_weights(self, target)}
            origin = {key: value for key, value in origin.items() if key not in names}
            origin |= names if names["warning"] else {}
        return changed(
            self,
            target={**self.target, "name": target or self.target["name"]} | ({"weights": None} if merged else {}),
            k=k or self.k,
            tree=None if k else self.tree,
            objective=objective or self.objective,
            origin=origin,
        )


def other_weights(metadata: Metadata | None, path: str, adapter: str | None = None) -> str | None:
    """Return a sentence if a target's weights or their dtype differ from those that a draft was trained for, else None.
    metadata: the draft's. path: the target's folder, hub id, file or name. adapter: the folder or hub id of the
    target's PEFT adapter, None for none.

    Also return None if the metadata have no hash of weights, if the target cannot be read, and if only one of draft and
    target has an adapter that may have been merged into the weights of the other.
    """
    own = metadata.target.get("weights") if metadata else None
    if metadata is None or not own:
        return None
    learnt = metadata.origin.get("adapter")
    if adapter and not learnt:
        if hash_weights(path) != own:  # else the draft was trained for the target without its adapter
            return None
    elif learnt and not adapter or hash_weights(path, adapter) in (own, None):
        return None
    return (
        f"the weights of the target {path} are not those that the draft was trained for, or are the same in "
        "another dtype: text stays exact, but acceptance may be lower; to train the draft further, set "
        "init=pretrained"
    )


def other_report(folder: Path, metadata: Metadata | None) -> str | None:
    """Return a sentence if a folder's report.json is missing or was changed since it was written, else None. metadata:
    the folder's, which has the report's hash; None or a missing hash gives None."""
    file = folder / REPORT
    if metadata is None or metadata.report is None or (file.is_file() and digest(file) == metadata.report):
        return None
    return f"{file} is missing, or is not the file that {METADATA} was written with"


@dataclass(frozen=True)
class Folder:
    """A draft folder. kind: kind of draft. metadata: the contents of `cotrain.json`, None if the folder has no such
    file. path: the folder's path. layout: its published layout, None for our own and for a causal LM."""

    kind: str
    metadata: Metadata | None
    path: Path
    layout: Published | None = None


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path,
    metadata: Metadata,
    report: Mapping[str, Any] | None,
    replace: bool = False,
    prompts: str = "",
) -> Path:
    """Write a draft folder atomically, and return its path. If the process stops at any moment, the old folder remains
    complete.

    model: the draft, saved in its own dtype. tokenizer: None to write no tokenizer. metadata: the contents of
    `cotrain.json`; the report's hash is added. report: the contents of report.json, None to write no report. replace:
    whether a folder with files may be replaced. prompts: the contents of `prompts.jsonl`; "" to write no such file.

    Raises FileExistsError if the folder contains files and `replace` is off, and ValueError if weights are not finite
    or if the tokenizer is not the target's.
    """
    with new_folder(Path(folder), replace=replace) as new:
        write(model, tokenizer, new, metadata, report)
        if prompts:
            (new / PROMPTS).write_text(prompts, encoding="utf-8")
    return Path(folder)


def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    metadata: Metadata,
    report: Mapping[str, Any] | None,
) -> None:
    """Write the files of a draft into an existing empty folder, with weights in the model's dtype.

    tokenizer: None to write no tokenizer. metadata: written with the report's hash as `report`. report: the contents of
    report.json, None to write no report. Raises ValueError if weights are not finite, or if the tokenizer is not the
    target's.
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
    """Write `cotrain.json` with this metadata into a folder that already has the weights."""
    values = {"made" if key == "origin" else key: value for key, value in asdict(metadata).items()}
    (folder / METADATA).write_text(_json(values), encoding="utf-8")


def _config(model: PreTrainedModel) -> PretrainedConfig:
    """Return a copy of the model's config in which tie_word_embeddings is true if head and embedding are one tensor,
    else false.

    safetensors stores a shared tensor once. If the config said "not tied", a reader would fill the second tensor with
    random numbers. If it said "tied" for two different tensors, some engines would drop one.
    """
    config = copy.deepcopy(model.config)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    config.tie_word_embeddings = None not in (head, embedding) and head.weight is embedding.weight
    return config


def _generation(model: PreTrainedModel, k: int) -> GenerationConfig:
    """Return the generation config for transformers' assisted generation with exactly k drafts per round. Its first and
    end tokens are the model's own."""
    own = model.generation_config.to_dict()
    return GenerationConfig(
        **{key: own[key] for key in IDS if own.get(key) is not None},
        num_assistant_tokens=k,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def digest(file: Path) -> str:
    """Return the SHA-256 hash of a file, in hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read(folder: str | Path) -> Folder:
    """Return the kind and the metadata of a draft folder, without loading its weights. The kind of a folder without
    metadata follows from its config.json (`inference.drafts.published`). Warns if the report is missing or was
    changed.

    Raises FileNotFoundError if the folder or its config.json does not exist. Raises ValueError for broken JSON, another
    format version, or a key that is missing, unknown or wrong. The message names file and key.
    """
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}")
    if not (path / CONFIG).is_file():
        inner = f"; its draft is {path / 'draft'}" if (path / "draft" / CONFIG).is_file() else ""
        raise FileNotFoundError(
            f"{path} is no draft folder: it has no {CONFIG}{inner or '; give a folder that cotrain exported'}"
        )
    for name in (CONFIG, GENERATION, REPORT):
        json_if_any(path / name)  # raises for a broken file
    metadata = _metadata(path / METADATA) if (path / METADATA).is_file() else None
    if problem := other_report(path, metadata):
        warnings.warn(
            f"{problem}: the report may be about another draft; to measure again: cotrain bench draft.path={path}",
            stacklevel=1,
        )
    layout = published(path)
    return Folder(metadata.kind if metadata else kind_in(path, layout), metadata, path, layout)


def _metadata(file: Path) -> Metadata:
    from inference.proposers.kinds import kind_of  # its package imports this module

    values = read_json(file)
    names = {item.name for item in fields(Metadata)} ^ {"origin", "made"}
    try:
        # check the version first: another version may have other keys
        if values.get("format") != FORMAT:
            raise ValueError(
                f"format is {values.get('format')!r}, but this version of cotrain reads {FORMAT}: make the folder "
                "again with this version, or use the version that wrote it"
            )
        if wrong := wrong_keys(values, names, LATER):
            raise ValueError(f"{wrong}: use the file that cotrain wrote")
        values = {"origin" if key == "made" else key: value for key, value in values.items()}
        served = values["served"] if "served" in values else _served_before(values, file.with_name(REPORT))
        read = Metadata(**values | {"tree": PlannedTree.read(values.get("tree")), "served": ServedAs.read(served)})
        kind_of(read.kind)
        return _located(file, read)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error


def _located(file: Path, metadata: Metadata) -> Metadata:
    """Return the metadata of a file with the present paths of target and adapter. A relative path in a file is relative
    to the folder where the draft was made: probably the working directory, or a folder above the file. If several such
    paths exist, the first one is used whose weights have the hash in the metadata; else the first one."""
    name, adapter = str(metadata.target["name"]), metadata.origin.get("adapter")
    if adapter:
        adapter = next(iter(_places(file, adapter, ADAPTER[0])), adapter)
        metadata = changed(metadata, origin={**metadata.origin, "adapter": adapter})
    places = [] if name in BUNDLED or name in PACKAGED else _places(file, name, CONFIG)
    weights = metadata.target.get("weights")
    same = (place for place in places if len(places) == 1 or hash_weights(place, adapter) == weights)
    return changed(metadata, target={**metadata.target, "name": next(same, places[0] if places else name)})


def _places(file: Path, name: str, inside: str) -> list[str]:
    """Return the existing paths that a relative path `name` may mean (see `_located`): files, or folders that contain a
    file `inside`. If several paths lead to one place, only the first is returned."""
    places: dict[Path, str] = {}
    for place in (name, *(str(parent / name) for parent in file.absolute().parents)):
        if Path(place).is_file() or (Path(place) / inside).is_file():
            places.setdefault(Path(place).resolve(), place)
    return list(places.values())


def _served_before(values: Mapping[str, Any], report: Path) -> Mapping[str, Any]:
    """Return the value of the key `served` for an older folder. Such a folder has this value in the key `made`, and may
    have the verification rule only in its report."""
    served: Mapping[str, Any] = values["origin"].get("served") or {} if isinstance(values["origin"], Mapping) else {}
    if served.get("messages") and served.get("chat") is False:  # its default then
        served = {**served, "chat": None}
    if "verify" in served or values.get("tree") or not report.is_file():
        return served
    return {**served, "verify": (read_json(report).get("settings") or {}).get("verify")}


def folder_identity(folder: Path) -> str:
    """Return a hash, in hexadecimal, that differs between drafts and is equal for all exports of one draft. It covers
    the metadata on training, or the weights' files if there are no metadata."""
    draft = read(folder)
    metadata = draft.metadata
    if metadata is None:
        files = draft.layout.files() if draft.layout else weight_files(folder)
        return hashlib.sha256("".join(map(digest, files)).encode()).hexdigest()
    training = {key: value for key, value in metadata.origin.items() if key not in ("export", "adapter")}
    return hashlib.sha256(json.dumps([metadata.kind, training], sort_keys=True).encode()).hexdigest()


def load_draft(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    *,
    network: Any = CausalLM,
    target: Mapping[str, str | None] | None = None,
    model: PreTrainedModel | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, PreTrainedTokenizerBase | None, Metadata | None]:
    """Return a draft's network in eval mode on the CPU, its tokenizer and its metadata. The last two are None if the
    folder lacks them.

    dtype: the network's dtype; None for the dtype in the folder. network: the network class that the folder must have
    (`Proposer.network_class` of its kind). target: the hashes of the target to serve (the result of `hash_target`),
    None to skip its checks. A different tokenizer is an error; a different shape is a warning. model: the target, which
    a published layout needs (`inference.drafts.published`). Code in the folder runs only with `trust_remote_code`.

    Raises FileNotFoundError if the folder or its config.json does not exist. Raises ValueError naming the file if its
    JSON or a key is wrong, if the kind has another network class, and if the tokenizer is broken or not the target's.
    Raises it also if weights are pickled, truncated, missing or not finite, or have other shapes than config.json says.
    """
    draft = read(folder)
    require_class(draft, network)
    if draft.layout:
        loaded, _ = imported(draft.layout, model, dtype)
    else:
        loaded, problems, _ = load_weights(draft.path, dtype, trust_remote_code, network)
        if problems:
            raise ValueError(f"{'; '.join(problems)}: copy or export the draft again")
    tokenizer = load_tokenizer(draft.path, trust_remote_code)
    trained_for = draft.metadata.target if draft.metadata else None
    _same_tokenizer(str(draft.path), tokenizer, trained_for)
    _same_tokenizer(str(draft.path), tokenizer, target)
    if target and trained_for and trained_for["config"] not in (None, target["config"]):
        warnings.warn(
            f"{draft.path / METADATA}: the draft was trained for a target of another shape, {trained_for['name']}: "
            "text stays exact, but acceptance may be low; train a draft for this target to raise it",
            stacklevel=2,
        )
    return loaded, tokenizer, draft.metadata


def require_class(draft: Folder, network: Any) -> None:
    """Raise ValueError if the network class of the folder's kind is not `network`. A folder without metadata passes,
    unless it has a published layout. draft: the folder."""
    from inference.proposers.kinds import kind_of  # its package imports this module

    if draft.metadata is None and draft.layout is None:
        return
    if (own := kind_of(draft.kind).network_class) is not network:
        file = draft.path / (METADATA if draft.metadata else CONFIG)
        raise ValueError(
            f"{file}: the folder of a draft of kind {draft.kind!r} has {class_named(own)}, not "
            f"{class_named(network)}: give kind= its own kind, or another folder"
        )


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer in a folder, or None if the folder has no tokenizer files. trust_remote_code: whether code
    in the folder may run. Raises ValueError if the files are broken."""
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    for name in TOKENIZER_FILES:
        if name.endswith(".json"):
            json_if_any(path / name)  # raises for a broken file
    values = json_if_any(path / CONFIG)
    config = PretrainedConfig()  # of an unknown type of model, for which transformers warns
    if values.get("model_type", "") in CONFIG_MAPPING or "auto_map" in values:
        with building(path):
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    try:
        return AutoTokenizer.from_pretrained(
            path, config=config, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the Rust tokenizers raise plain `Exception`
        raise ValueError(
            f"{path}: its tokenizer files cannot be read ({error}): copy the target's into the folder"
        ) from error


def _same_tokenizer(
    where: str, tokenizer: PreTrainedTokenizerBase | None, target: Mapping[str, str | None] | None
) -> None:
    if tokenizer is None or target is None or target["tokenizer"] is None:
        return
    own = hash_tokenizer(tokenizer)
    if own != target["tokenizer"]:
        raise ValueError(
            f"{where}: its tokenizer is not the target's (vocabulary and special ids have the hash {own[:12]}, the "
            f"target's {target['tokenizer'][:12]}), but a draft must use the target's token ids: give the target that "
            "it was made for"
        )
