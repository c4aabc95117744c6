"""`cotrain train`: the main job."""

import json

from omegaconf import OmegaConf

from cotrain.config import TrainConfig
from cotrain.folders import claim
from cotrain.train import distil
from inference.report import table


def run(cfg: TrainConfig) -> None:
    """Check, or distil into `output` and print the table; a finished run only prints its table again."""
    if cfg.check:
        from cotrain.check import check

        print("\n".join(check(cfg)))
        return
    settings = OmegaConf.to_container(cfg, resolve=True)
    settings = {key: value for key, value in settings.items() if key not in ("overwrite", "check", "output")}
    with claim(cfg.output, cfg.overwrite, settings) as folder:
        file = folder.path / "draft" / "report.json"
        report = json.loads(file.read_text()) if folder.state == "finished" else distil(cfg, folder.path)
        folder.finish()
    print(table(report))
    print(f"draft: {folder.path / 'draft'}   curves: tensorboard --logdir {folder.path}")
