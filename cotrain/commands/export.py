"""`cotrain export`: the folder that a serving engine loads, or a check of any such folder."""

from pathlib import Path

from cotrain.config import ExportConfig
from cotrain.errors import UserError
from cotrain.export import check, hf
from cotrain.export.engines import launch, refuse_layout
from cotrain.job import objective
from cotrain.teacher import load_config
from inference.bundled import NAME, resolve
from inference.store import read


def run(cfg: ExportConfig) -> None:
    """Write `output` and print the launch command; with `check=<folder>`, only say what is wrong with that folder."""
    if cfg.check:
        problems = check.check(cfg.check)
        if problems:
            raise UserError("\n".join([f"{cfg.check} would not load:", *problems]))
        print(f"{cfg.check}: complete, every tensor as config.json says")
        return
    if cfg.draft.path is None:
        raise UserError("name the draft folder with draft.path=")
    refuse_layout(cfg.engine, cfg.layout)
    made = read(cfg.draft.path).metadata
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
    place = str(Path(resolve(NAME))) if served == NAME else str(served)
    print(f"wrote {path}")
    if written.made.get("advice"):
        print(f"where it was measured, {written.made['advice']}")
    print(launch(cfg.engine, str(path), place, written.k, written.objective))
