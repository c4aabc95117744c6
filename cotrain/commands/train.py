"""`cotrain train`: the main job."""

import json
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from cotrain.config import TrainConfig
from cotrain.folders import claim
from cotrain.ranks import rank
from cotrain.train import distil
from inference.report import table


def run(cfg: TrainConfig) -> None:
    """Check, or distil into `output` and print the table; a finished run only prints its table again."""
    if cfg.check:
        from cotrain.check import check

        print("\n".join(check(cfg)))
        return
    settings = dict(cast(dict[str, Any], OmegaConf.to_container(cast(Any, cfg), resolve=True)))
    for key in ("overwrite", "check", "output"):
        del settings[key]
    if rank():  # of a run that the first process holds
        distil(cfg, Path(cfg.output))
        return
    with claim(cfg.output, cfg.overwrite, settings) as folder:
        if folder.state != "finished":
            distil(cfg, folder.path)
            folder.finish()
    print(f"curves: tensorboard --logdir {folder.path}")
    if cfg.measure:
        print(table(json.loads((folder.path / "draft" / "report.json").read_text())))
        print(f"draft: {folder.path / 'draft'}")
