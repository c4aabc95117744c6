"""The plain Hugging Face layout, for drafts that are causal LMs: every engine in the table loads independent ones, and
some load parallel ones. `folder_problems` lists what is wrong with a folder in this layout."""

from collections.abc import Mapping
from dataclasses import replace as changed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cotrain.export.engines import ASSISTANT_TYPE, drafting, engine_named, refuse_kind
from cotrain.export.fitting import (
    fold_conditioning,
    measured_elsewhere,
    refuse_small_head,
    refuse_temperature,
    resize,
    small_head_problem,
)
from cotrain.export.publishing import card, planned_anew, without_markov
from inference.drafts.atomic import new_folder
from inference.drafts.causal_lm import CausalLM, tensors_of
from inference.drafts.compatibility import check_pair, hash_target
from inference.drafts.draft_folder import (
    GENERATION,
    METADATA,
    REPORT,
    Folder,
    Metadata,
    load_draft,
    load_tokenizer,
    other_report,
    read,
    write,
)
from inference.drafts.weight_files import CONFIG, building, load_weights, read_json, weight_files
from inference.models.markov import remove_markov_head
from inference.models.pretrained import auto_class
from inference.proposers import kind_of
from inference.proposers.base import SettingsNetwork
from inference.proposers.conditioned import ConditionedNetwork
from inference.report.build import validate


class Prepared(NamedTuple):
    """A draft as an engine loads it: with the target's vocabulary, and for one temperature. report: the content of
    report.json, or None if the draft was not measured. remarks: lines for the README."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    metadata: Metadata
    report: Mapping[str, Any] | None
    remarks: list[str]


def export(
    source: str | Path,
    output: str | Path,
    engine: str,
    k: int | None = None,
    *,
    replace: bool = False,
    name: str | None = None,
    **settings: Any,
) -> Path:
    """Write the draft in the folder `source` to the folder `output`, as `engine` loads it, with a README that has the
    launch command. Return `output`.

    Args:
        k: drafts per round; None for the value in cotrain.json.
        replace: whether a folder at `output` is replaced.
        name: the folder's name in the README; None for its path.
        settings: other arguments of `prepare_draft`, such as target and objective.

    The folder is written only if `folder_problems` finds none. Raises ValueError, which names the key or file to
    change, and FileExistsError if `output` is not empty and `replace` is False.
    """
    draft = prepare_draft(source, engine, k, **settings)
    with new_folder(Path(output), replace=replace) as new:
        write(draft.model, draft.tokenizer, new, draft.metadata, draft.report)
        path = name or str(Path(output).absolute())
        text = card(draft.metadata, engine, path, draft.report, draft.remarks)
        (new / "README.md").write_text(text, encoding="utf-8")
        if problems := folder_problems(new):
            raise ValueError(f"{source}: the exported folder would not load: " + "; ".join(problems))
    return Path(output)


def prepare_draft(
    source: str | Path,
    engine: str,
    k: int | None = None,
    *,
    target: str | None = None,
    target_config: PretrainedConfig | None = None,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    objective: str | None = None,
    dtype: torch.dtype | None = None,
    temperature: float | None = None,
) -> Prepared:
    """Return the draft in the folder `source`, fitted to the target. A Markov head is left out with a remark, since no
    engine reads it in this layout.

    Args:
        engine: the serving engine.
        k: drafts per round. None: the value in cotrain.json, or a newly planned one if the engine draws drafts in
            another way (sampled or greedy) than in the measurement of the draft.
        target: hub id or path of the target to serve; None for the value in cotrain.json.
        target_config: the target's config; the draft's vocabulary gets as many rows. None: it keeps its rows.
        target_tokenizer: the target's tokenizer, whose vocabulary is compared with the draft's.
        objective: "sampled" or "greedy"; None for the value in cotrain.json.
        dtype: the dtype of the weights; None leaves them unchanged.
        temperature: for a conditioned draft, the temperature to serve at; the draft becomes an independent one.

    A folder without cotrain.json needs k and target, and its objective is "sampled". Raises ValueError, which names the
    key or file to change.
    """
    engine_named(engine)
    refuse_temperature(source, temperature)
    refuse_small_head(source)
    network = CausalLM if temperature is None else ConditionedNetwork
    model, tokenizer, original = load_draft(source, dtype, network=network)
    if model.config.is_encoder_decoder and engine != "transformers":
        raise ValueError(f"engine={engine}: it loads no drafts for encoder-decoders: set engine=transformers")
    if tokenizer is None:
        raise ValueError(
            f"{source}: it has no tokenizer, and engines need one: copy the target's tokenizer files into it"
        )
    metadata = _metadata(original, k, target, objective)
    if temperature is not None:
        model = fold_conditioning(model, temperature)
        metadata = changed(metadata, kind="independent", regime={**metadata.regime, "temperature": temperature})
    refuse_kind(engine, metadata.kind)
    report = report_of(Path(source), original)
    left_out, remarks = remove_markov_head(model), list[str]()
    if original is not None and k is None:
        way = drafting(engine, metadata.objective)
        metadata, remarks = planned_anew(source, original, metadata, way, not left_out)
    lost = [without_markov(Path(source), metadata)] if left_out else []
    remarks += lost + _fit(model, tokenizer, target_config, target_tokenizer)
    if target_config is not None:
        hashes = hash_target(target_config, target_tokenizer if target_tokenizer is not None else tokenizer)
        metadata = changed(metadata, target={**metadata.target, **hashes})
    exported: dict[str, Any] = {"engine": engine, "dtype": str(model.dtype), "vocab_size": model.config.vocab_size}
    exported |= {"remarks": lost, "markov": False} if lost else {}
    metadata = changed(metadata, origin={**metadata.origin, "export": exported})
    if original is not None and original.tree:
        remarks.append(
            f"It was measured with a tree of {len(original.tree.parents)} nodes a round, but the command above drafts "
            f"chains of {metadata.k} tokens."
        )
    if temperature is not None:
        remarks.append(f"Made for temperature {temperature:g}: at others, export it again.")
        if apart := measured_elsewhere(original, temperature):
            remarks.append(apart)
    return Prepared(model, tokenizer, metadata, report, remarks)


def _metadata(metadata: Metadata | None, k: int | None, target: str | None, objective: str | None) -> Metadata:
    """Return the metadata for the export: the folder's, with k, target and objective replaced by those that are not
    None. metadata: None if the folder has no cotrain.json. Raises ValueError if k or target is then None."""
    if metadata is None:
        if k is None or target is None:
            key = "k" if k is None else "target.path"
            raise ValueError(f"{key}=null: set {key}=, because the draft folder has no {METADATA} that names it")
        return Metadata({"name": target, "config": None, "tokenizer": None}, k, objective or "sampled")
    return metadata.exported(target, k, objective)


def report_of(source: Path, metadata: Metadata | None) -> Mapping[str, Any] | None:
    """Return the draft's report, or None if the metadata names none; a report.json in the folder is then from another
    program. Raises ValueError if the report is missing, changed or invalid."""
    if metadata is None or metadata.report is None:
        return None
    file = source / REPORT
    if problem := other_report(source, metadata):
        raise ValueError(f"{problem}: restore it, or measure again")
    report = read_json(file)
    try:
        validate(report)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return report


def _fit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target_config: PretrainedConfig | None,
    target_tokenizer: PreTrainedTokenizerBase | None,
) -> list[str]:
    """Resize the draft's vocabulary to the target's, in place, and compare the two vocabularies. Return remarks for the
    README; [] without `target_config`. Raises ValueError if the vocabularies do not match."""
    if target_config is None:
        return []
    old, size = model.config.vocab_size, target_config.get_text_config(decoder=True).vocab_size
    mass = resize(model, size, tokenizer)
    problems = check_pair(target_config, target_tokenizer, model.config, tokenizer)
    if wrong := [problem for problem in problems if not problem.startswith("warning:")]:
        raise ValueError("; ".join(wrong))
    remarks = [problem.removeprefix("warning:").strip() for problem in problems]
    if size > old:
        remarks.append(f"Vocabulary padded from {old} to {size} rows; mass on the new ones: {mass:.1e}.")
    return remarks


REQUIRED = (CONFIG, GENERATION, "tokenizer.json", "tokenizer_config.json")
KEYS = ("architectures", "model_type", "vocab_size", "dtype", "tie_word_embeddings")
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def folder_problems(folder: str | Path) -> list[str]:
    """Return the problems of a draft folder, each with its file and key; [] if there are none.

    A causal LM must be in the plain Hugging Face layout, which every engine loads. A draft of another kind must be as
    this package's engine loads it, so a folder that `train` wrote passes. Of a layout that is another program's alone
    (`is_foreign`), only the files of tensors are read.

    Checked are the required files, the keys of config.json and generation_config.json, the names, shapes, dtypes and
    values of the tensors, the tokenizer's size, and the hash of report.json. transformers loads the tensors, since some
    model families have other tensor names on disk than in memory.
    """
    try:
        draft = read(folder)
        network = kind_of(draft.kind).network_class
    except (OSError, ValueError) as error:
        return [str(error)]
    path, plain = draft.path, network is CausalLM
    if is_foreign(draft):
        return _stored(draft)
    required = [name for name in REQUIRED if plain or name != GENERATION]  # it is of models that generate
    problems = [f"{path}: {name} is missing" for name in required if not (path / name).is_file()]
    if plain and (problem := small_head_problem(path)):
        return [problem]  # its weights are no plain model's
    keys = [key for key in KEYS if key != "vocab_size" or not issubclass(network, SettingsNetwork)]
    problems += [f"{path / CONFIG}: key {key} is missing" for key in keys if read_json(path / CONFIG).get(key) is None]
    problems += _generation(path) + _weights(path, None if plain else network) + _tokenizer(path)
    if problem := other_report(path, draft.metadata):
        problems.append(problem)
    return list(dict.fromkeys(problems))


def is_foreign(draft: Folder) -> bool:
    """Return whether a folder has names of tensors and keys that this package's engine does not load as they are."""
    return draft.layout is not None or read_json(draft.path / CONFIG).get("model_type") == ASSISTANT_TYPE


def _stored(draft: Folder) -> list[str]:
    """Return problems with the files of tensors: missing and damaged ones, and numbers that are not finite."""
    try:
        tensors = draft.layout.tensors(torch.device("cpu")) if draft.layout else tensors_of(draft.path)
    except (OSError, ValueError) as error:
        return [str(error)]
    broken = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    return [f"{draft.path}: tensor {name} has numbers that are not finite" for name in broken]


def _generation(path: Path) -> list[str]:
    """Return problems with the keys in generation_config.json that set the draft length of transformers' assisted
    generation."""
    file = path / GENERATION
    if not file.is_file():
        return []
    values = read_json(file)
    k = values.get("num_assistant_tokens")
    problems = []
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        problems.append(f"{file}: num_assistant_tokens must be a whole number of at least 1, not {k!r}")
    for key, wanted in (("num_assistant_tokens_schedule", "constant"), ("assistant_confidence_threshold", 0)):
        if values.get(key) != wanted:
            problems.append(f"{file}: {key} must be {wanted!r} (fixed draft length), not {values.get(key)!r}")
    return problems


def _weights(path: Path, network: Any) -> list[str]:
    """Return problems with the tensors. network: the model's class; None for a model of transformers."""
    try:
        with building(path):
            network = network or auto_class(AutoConfig.from_pretrained(path))
        _, problems, unexpected = load_weights(path, network=network)
    except (OSError, ValueError) as error:
        return [str(error).splitlines()[0]]
    problems += [f"{path}: tensor {name} is not in the model of {CONFIG}" for name in unexpected]
    return problems + _dtypes(path)


def _dtypes(path: Path) -> list[str]:
    """Return problems with tensors whose dtype on disk differs from the dtype in config.json. Quantised models have
    several dtypes and are not checked."""
    config = read_json(path / CONFIG)
    wanted = DTYPES.get(str(config.get("dtype")))
    if wanted is None or "quantization_config" in config:
        return []
    problems = []
    for file in weight_files(path):
        with safe_open(file, "pt") as tensors:
            dtypes = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}
        odd = sorted(name for name, dtype in dtypes.items() if dtype in DTYPES.values() and dtype != wanted)
        if odd:
            problems.append(f"{file}: tensor {odd[0]} is {dtypes[odd[0]]}, {CONFIG} says {config['dtype']}")
    return problems


def _tokenizer(path: Path) -> list[str]:
    if not (path / "tokenizer.json").is_file():
        return []
    try:
        tokenizer = load_tokenizer(path)
    except ValueError as error:
        return [str(error)]
    size = read_json(path / CONFIG).get("vocab_size")
    if tokenizer is None or not isinstance(size, int):
        return []
    used = max(tokenizer.get_vocab().values()) + 1
    return [f"{path / CONFIG}: vocab_size {size} is below the tokenizer's {used} ids"] if used > size else []
