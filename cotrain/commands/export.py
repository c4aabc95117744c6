"""Command `cotrain export`. It writes the folder that a serving engine loads, or checks such a folder."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from cotrain.commands.served_pair import read_folder
from cotrain.config.settings import ExportConfig, flat
from cotrain.console import answering
from cotrain.errors import UserError, warn
from cotrain.export import eagle3, hf, publishing
from cotrain.export.engines import (
    FEATURES,
    FILES,
    MARK,
    TREES,
    captured,
    launch,
    layout_of,
    place,
    refuse_kind,
    refuse_layout,
    usual_layout,
)
from cotrain.export.fitting import measured_elsewhere, refuse_temperature
from cotrain.export.publishing import card, fetched, tau_table
from cotrain.run_folder import refuse_replaced, writable
from cotrain.teacher.target_model import load_config, load_pair
from cotrain.training.job import objective
from cotrain.training.preconditions import say_other_weights
from inference.drafts.draft_folder import Metadata, read
from inference.drafts.gguf_target import gguf_file
from inference.drafts.weight_files import CONFIG, read_json
from inference.models.pretrained import longest_text


def _metadata(path: str) -> Metadata | None:
    """Return the metadata of a draft folder, None for a causal LM without cotrain.json. Raises UserError for an invalid
    folder, and for a draft of another kind without cotrain.json, which has no draft length, regime or target."""
    draft_folder = read_folder(path)
    if draft_folder.metadata is None and draft_folder.kind != "independent":
        raise UserError(
            f"draft.path={path} is a draft of kind {draft_folder.kind} without cotrain.json, in a layout that engines "
            "load: serve the folder as it is (llama.cpp's convert_hf_to_gguf.py makes its file of it), or train it "
            "further with init=pretrained and export that"
        )
    return draft_folder.metadata


def run(cfg: ExportConfig) -> None:
    """Write the exported folder to `output`. Print its path, and the launch command or the README that contains it.
    With check=<folder>, only check that folder and print its problems. Raises UserError for settings that do not fit
    together."""
    if cfg.check:
        if cfg.check is True:  # as other commands have it
            raise UserError(f"check=true: name the exported folder instead, for example check={cfg.output}")
        usual = dict(flat(ExportConfig().model_dump()))
        for key, value in flat(cfg.model_dump()):
            if key not in ("check", "as_json") and value != usual[key] and not isinstance(value, dict):
                raise UserError(f"{key}= has no effect with check=, which only reads a folder: leave {key}= out")
        _check(cfg.check, cfg.as_json)
        return
    if cfg.as_json:
        raise UserError("json=true: only check= prints JSON: leave json= out, or set check= to an exported folder")
    if cfg.draft.path is None:
        raise UserError("draft.path=null: set draft.path= to a draft folder, as in draft.path=outputs/train/draft")
    _refuse(cfg)
    metadata = _metadata(cfg.draft.path)
    kind = metadata.kind if metadata else "independent"
    if cfg.layout == "auto":
        markov = bool(metadata and read_json(Path(cfg.draft.path) / CONFIG).get("markov_rank"))
        cfg.layout = usual_layout(kind, cfg.engine, markov)
    refuse_layout(cfg.engine, cfg.layout)
    if cfg.push_to_hub:
        publishing.require_hub(cfg.push_to_hub)
    refuse_kind(cfg.engine, kind)
    refuse_temperature(cfg.draft.path, cfg.temperature)
    served = _served(cfg, metadata)
    if (
        cfg.k
        and Path(served).is_dir()
        and gguf_file(served) is None
        and cfg.k >= (room := longest_text(load_config(served)[0]))
    ):
        raise UserError(
            f"k={cfg.k}: text and drafts share the {room} tokens of the context of {served}: set k={room - 1} or less"
        )
    layout = None if cfg.layout in FEATURES else layout_of(kind, cfg.engine)
    own = cfg.layout in FEATURES or layout is not None
    if cfg.dtype != "auto" and own and cfg.engine != "llamacpp":
        raise UserError(f"dtype={cfg.dtype}: {kind} drafts are written in their own dtype: leave dtype= out")
    if layout:
        path = layout.export(
            cfg.draft.path, cfg.output, cfg.k, target=served, replace=cfg.overwrite, name=cfg.push_to_hub
        )
    else:
        path = _features(cfg, served, metadata) if own else _plain(cfg, served)
    if layout or cfg.engine == "llamacpp":
        print(f"wrote {path}, with a card, README.md:\n{_serving((path / 'README.md').read_text(encoding='utf-8'))}")
    else:
        _print_launch(path, cfg, metadata)
        if not own:
            _print_remarks(path)
    if cfg.temperature is not None and (apart := measured_elsewhere(metadata, cfg.temperature)):
        warn(apart)
    if cfg.push_to_hub:
        _push(path, cfg.push_to_hub, served)


def _serving(card_text: str) -> str:
    """Return the beginning of a card: what the draft is of, and how it is served."""
    return "\n## ".join((card_text.partition("\n# ")[2] or card_text).split("\n## ")[:2])


def _served(cfg: ExportConfig, metadata: Metadata | None) -> str:
    """Return the name of the target that the draft is exported for: target.path, or else the target in `metadata`.
    Print a line if the draft was trained for other weights of this target.

    metadata: None for a folder without cotrain.json. Raises UserError if no target is named, or if the draft was
    trained for a target with an adapter and target.path is not set.
    """
    served = cfg.target.path or (metadata.target["name"] if metadata else None)
    if metadata and metadata.origin.get("adapter") and cfg.target.path is None:
        both = f"{served} with the adapter {metadata.origin['adapter']}"
        raise UserError(
            f"draft.path={cfg.draft.path} was made for {both}: merge the two, and name the folder of the merged model "
            "with target.path="
        )
    if served is None:
        raise UserError(f"draft.path={cfg.draft.path} does not name its target: set target.path= to this model")
    say_other_weights(str(cfg.draft.path), metadata, served, None)
    return served


def _print_launch(path: Path, cfg: ExportConfig, metadata: Metadata | None) -> None:
    """Print the path of the exported folder, the advice and the held-out tau in the draft's report, and the launch
    command. metadata: the draft's."""
    written = read(path).metadata
    assert written is not None
    print(f"wrote {path}")
    if written.origin.get("advice"):
        print(f"on the machine that measured it, {written.origin['advice']}")
    report = hf.report_of(Path(str(cfg.draft.path)), metadata)
    lengths = tau_table(report, written) if report else ""
    if lengths:
        print(f"tau by draft length, predicted on held-out texts:\n{lengths}")
    place_of = str(path.absolute()), publishing.served_from(str(written.target["name"]), cfg.engine)
    if written.tree and (cfg.engine, cfg.layout) in TREES:
        print(TREES[cfg.engine, cfg.layout])
    layers = captured(written.origin)
    print(launch(cfg.engine, *place_of, written.k, written.objective, cfg.layout, written.kind, written.tree, layers))


def _push(path: Path, repo: str, target: str) -> None:
    if publishing.local(target):
        warn(
            f"warning: the README names a target on this machine, {place(target)}, which other people cannot load: "
            "set target.path= to its hub id"
        )
    print(f"pushed: {publishing.push(path, repo)}")


def _check(path: str, as_json: bool) -> None:
    """Print that the exported folder `path` is complete. If an engine could not load it, raise UserError with all
    problems. as_json: the result is printed as JSON in both cases."""
    folder = Path(path)
    if any(folder.glob("*.gguf")) and not (folder / CONFIG).is_file():
        raise UserError(f"check={path}: GGUF files are not checked: start llama.cpp as {folder / 'README.md'} says")
    with answering(as_json) as answer:
        problems = hf.folder_problems(path)
        if as_json or not problems:
            report = {"folder": path, "passed": not problems, "problems": problems}
            whole = "the folder is complete, and every tensor is as config.json says; export engine= says who loads it"
            if not problems and hf.is_foreign(read(path)):
                whole = "the files of tensors are whole; their names and shapes are for the engine to check"
            answer(report, f"{path}: {whole}")
    if problems:
        raise UserError("\n".join([f"{path} would not load:", *problems]))


def _features(cfg: ExportConfig, target: str, metadata: Metadata | None) -> Path:
    """Export a feature draft with its model card, and return the folder's path. target: hub id or path. metadata: the
    draft's. Raises UserError if the layout cannot hold this draft."""
    asked = None if cfg.objective is None else objective(cfg.objective)
    model, _ = load_pair(target, device_map="cpu")  # its ends are copied; the whole may not fit on a GPU
    assert cfg.draft.path
    called, fetch = cfg.push_to_hub or str(Path(cfg.output).absolute()), list[str]()
    if cfg.push_to_hub and cfg.engine == "llamacpp":
        called, fetch = fetched(cfg.push_to_hub)

    def readme(written: Metadata) -> str:
        return card(written, cfg.engine, called, report, _remarks(written) + fetch, cfg.layout)

    try:
        report = hf.report_of(Path(cfg.draft.path), metadata)
        path = eagle3.export(
            cfg.draft.path,
            cfg.output,
            cfg.layout,
            cfg.k,
            engine=cfg.engine,
            target=model,
            objective=asked,
            name=target,
            dtype=None if cfg.dtype == "auto" else cfg.dtype,
            replace=cfg.overwrite,
            card=readme,
        )
    except ValueError as error:
        raise UserError(f"layout={cfg.layout}: {error}") from error
    if cfg.engine != "llamacpp":  # which gives any states in any order
        _print_remarks(path)
    return path


def _remarks(written: Metadata) -> list[str]:
    """Return the remarks in an exported draft's metadata: what the layout cannot hold, and what an engine serves
    differently from the plan."""
    return (written.origin.get("export") or {}).get("remarks", [])


def _print_remarks(path: Path) -> None:
    written = read(path).metadata
    assert written is not None
    for remark in _remarks(written):
        print(remark)


def _plain(cfg: ExportConfig, target: str) -> Path:
    """Export a causal LM as a folder or as a GGUF file, and return the path. target: hub id or path. Raises UserError
    for a dtype that the layout does not have, and if the package gguf is missing."""
    assert cfg.draft.path
    settings: dict[str, Any] = {
        "target": target,
        "objective": None if cfg.objective is None else objective(cfg.objective),
        "replace": cfg.overwrite,
        "name": cfg.push_to_hub,
        "temperature": cfg.temperature,
    }
    if cfg.layout != "gguf" or gguf_file(target) is None:  # else the vocabulary is read from the file
        settings["target_config"], settings["target_tokenizer"] = load_config(target)
    dtype = None if cfg.dtype == "auto" else cfg.dtype
    if cfg.layout == "gguf":
        from cotrain.export import gguf

        return gguf.export(cfg.draft.path, cfg.output, cfg.k, dtype=dtype, **settings)
    if dtype == "q8_0":
        raise UserError("dtype=q8_0: only GGUF files have this dtype: set engine=llamacpp, or another dtype=")
    weights = getattr(torch, dtype) if dtype else None
    return hf.export(cfg.draft.path, cfg.output, cfg.engine, cfg.k, dtype=weights, **settings)


def _refuse(cfg: ExportConfig) -> None:
    """Raise UserError if `output` may not be replaced or cannot be written, or if the engine needs a package that is
    missing. Call this before weights are read."""
    if cfg.engine == "llamacpp" and find_spec("gguf") is None:
        raise UserError("engine=llamacpp: it needs the package gguf: pip install 'cotrain[gguf]'")
    path = Path(cfg.output)
    if path.exists() and not path.is_dir():
        raise UserError(f"output={path} is a file: name a folder")
    refuse_replaced(path, "README.md", FILES, MARK)
    if path.is_dir() and any(path.iterdir()) and not cfg.overwrite:
        raise UserError(f"output={path} exists and is not empty: name another folder, or set overwrite=true")
    writable("output", path)
