"""What a draft gains by being taught by the quantised target that is served, and not by the whole one.

    python -m studies.quantised outputs/losses/nf4 outputs/losses/layers/kl_then_tv_0 outputs/results/nf4.json

Two runs of cotrain train with equal settings but quantisation=; both last checkpoints are judged on the held-out texts
of the first run's target, at its temperature; gain in tau(8) paired by text.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from cotrain.evaluation.comparison import compare, per_text
from cotrain.training.assembly import held_out_texts, new_student, trained_by
from cotrain.training.job import Job, models
from inference.measure.environment import environment

NAMES = ("by the quantised", "by the whole")


def main(quantised: str, whole: str, report: str) -> None:
    settings = json.loads((Path(quantised) / "run.json").read_text(encoding="utf-8"))["settings"]
    cfg: Any = OmegaConf.create(settings)
    target, tokenizer = models(cfg)
    job = Job(cfg, Path(quantised), target, tokenizer)
    student = new_student(cfg, target, job.vocabulary)
    module = trained_by(job, student, held_out_texts(job))
    runs: dict[str, Any] = {}
    for name, run in zip(NAMES, (quantised, whole), strict=True):
        kept = torch.load(Path(run) / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")
        module.load_state_dict(kept["state_dict"])
        module.judge()
        runs[name] = [{"seed": settings["trainer"]["seed"], "texts": per_text(module.scores(), module.held_out)}]
    gains = [asdict(gain) for gain in compare(runs, NAMES[1]) if gain.k == 8]
    for gain in gains:
        print({key: gain[key] for key in ("label", "temperature", "alpha", "tau", "gain", "low", "high")})
    made = {"environment": environment(), "target": settings["quantisation"]["kind"], "gains": gains}
    Path(report).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
