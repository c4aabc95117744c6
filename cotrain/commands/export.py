"""`cotrain export`: the folder that a serving engine loads, or a check of any such folder."""

from pathlib import Path

from cotrain.bench.served_pair import folder
from cotrain.config.settings import ExportConfig
from cotrain.errors import UserError
from cotrain.export import hf, layout_check
from cotrain.export.card import tau_by_length
from cotrain.export.engines import launch, place, refuse_layout
from cotrain.run_folder import writable
from cotrain.teacher.target_model import load_config
from cotrain.training.job import objective
from inference.drafts.draft_folder import REPORT, read
from inference.drafts.weight_files import read_json


def run(cfg: ExportConfig) -> None:
    """Write `output` and print the launch command; with `check=<folder>`, only say what is wrong with that folder."""
    if cfg.check:
        problems = layout_check.check(cfg.check)
        if problems:
            raise UserError("\n".join([f"{cfg.check} would not load:", *problems]))
        print(f"{cfg.check}: complete, every tensor as config.json says")
        return
    if cfg.draft.path is None:
        raise UserError("name the draft folder with draft.path=")
    refuse_layout(cfg.engine, cfg.layout)
    made = folder(cfg.draft.path).metadata
    _refuse(cfg)
    served = cfg.target.path or (made.target["name"] if made else None)
    if made and made.made.get("adapter") and cfg.target.path is None:
        both = f"{served} with the adapter {made.made['adapter']}"
        raise UserError(f"{cfg.draft.path} was made for {both}: give target.path= a folder that it was merged into")
    if served is None:
        raise UserError(f"{cfg.draft.path} does not name its target: give target.path=")
    config, tokenizer = load_config(str(served))
    path = hf.export(
        cfg.draft.path,
        cfg.output,
        cfg.engine,
        cfg.k,
        target=str(served),
        target_config=config,
        target_tokenizer=tokenizer,
        objective=None if cfg.objective is None else objective(cfg.objective),
        replace=cfg.overwrite,
    )
    written = read(path).metadata
    assert written is not None
    print(f"wrote {path}")
    if written.made.get("advice"):
        print(f"where it was measured, {written.made['advice']}")
    report = path / REPORT
    lengths = tau_by_length(read_json(report), written) if report.is_file() else ""
    if lengths:
        print(f"tau by draft length, predicted on held-out texts:\n{lengths}")
    print(launch(cfg.engine, str(path.absolute()), place(str(served)), written.k, written.objective, written.kind))


def _refuse(cfg: ExportConfig) -> None:
    """Raise UserError for an output that holds files or cannot be written, before weights are read."""
    path = Path(cfg.output)
    if path.exists() and not path.is_dir():
        raise UserError(f"output={path} is a file: name a folder")
    if path.is_dir() and any(path.iterdir()) and not cfg.overwrite:
        raise UserError(f"output={path} exists and is not empty: name another folder, or overwrite=true")
    writable("output", path)
