"""Whether the bound that certifies a moved target holds on texts that had no part in it.

    python -m studies.certificates outputs/results/certificates.json RUN [RUN ...] [--texts 240]

RUN is a folder of `cotrain train mode=joint` with a merged target, at temperature 1. Fresh texts, as the original
target and the moved one sample them with another seed, give the KL nearly exactly. Their prompts are of the same split
as those of the certificate, so some may be the same; no fresh text is one that chose the scale or certified. The KL is
compared with the certified bound. As one run has one certificate, many more are made: sets of as many texts as
certified the run are drawn from the fresh ones, and `coverage` is the share of sets whose bound, of one of the two
kinds of texts, is at least the KL of all fresh texts.
"""

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from cotrain.evaluation.comparison import FIGURES
from cotrain.evaluation.moved import CLAIMED, CONFIDENCE, Movement, movement, upper_bound
from cotrain.run_folder import read_marker
from cotrain.teacher.target_model import served
from cotrain.training.assembly import held_out_texts
from cotrain.training.job import Job, models
from cotrain.training.joint import TARGET, sampled_again
from cotrain.training.preconditions import fill_prompt_tokens, timed
from inference.drafts.atomic import write_atomic
from inference.drafts.moved_target import movement_of
from inference.measure.environment import environment

SEED, DRAWS = 100, 2000  # the seed differs from those of the runs


def fresh(run: Path, texts: int) -> dict[str, Movement]:
    """Return the movement of a run's target on fresh texts of both targets."""
    cfg: Any = OmegaConf.create((read_marker(run) or {})["settings"])
    again = copy.deepcopy(cfg)
    again.target.path, again.target.adapter = str(run / TARGET), None
    with tempfile.TemporaryDirectory() as folder:
        cfg.rollout.folder, cfg.rollout.seed, cfg.rollout.held_out_texts = folder, SEED, texts
        target, tokenizer = models(cfg)
        fill_prompt_tokens(cfg, target, timed(cfg.bench), {})
        job = Job(cfg, Path(folder), target, tokenizer)
        held = held_out_texts(job)[cfg.regime.temperature].texts
    moved = models(again)[0]
    first, second = (served(one, job.vocabulary) for one in (job.target, moved))
    sets = {"texts": held, "own_texts": sampled_again(again, moved, job, held)}
    return {name: movement(first, second, some) for name, some in sets.items()}


def coverage(one: Movement, size: int, confidence: float) -> float:
    """Return the share of sets of `size` texts whose bound is at least the KL of all texts."""
    generator = torch.Generator().manual_seed(SEED)
    values = [one.kl[one.text == text] for text in one.text.unique()]
    whole, held = float(one.kl.double().mean()), 0
    for _ in range(DRAWS):
        some = torch.randperm(len(values), generator=generator)[:size].tolist()
        text = torch.cat([torch.full((len(values[i]),), i) for i in some])
        held += upper_bound(torch.cat([values[i] for i in some]), text, confidence) >= whole
    return held / DRAWS


def entry(run: Path, texts: int) -> dict[str, Any]:
    said = movement_of(str(run / TARGET))
    assert said is not None
    size = len(json.loads((run / FIGURES).read_text(encoding="utf-8"))["texts"]["1"]["lengths"]) // 2
    confidence = 1 - (1 - CONFIDENCE) / 2  # of each of the two sets of texts
    figures: dict[str, Any] = {}
    for name, one in fresh(run, texts).items():
        kl = float(one.kl.double().mean())
        figures[name] = {
            "texts": len(one.text.unique()),
            "tokens": len(one.kl),
            "kl": kl,
            "bound": said[name]["bound"],
            "held": said[name]["bound"] >= kl,
            "coverage": coverage(one, size, confidence),
        }
    return {
        "run": f"{run.parent.name}/{run.name}",
        "epsilon": said["epsilon"],
        "certified": said["certified"],
        "certified_on": size,
        "claimed": CLAIMED,
        "fresh": figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.certificates")
    parser.add_argument("output", type=Path)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--texts", type=int, default=240)
    asked = parser.parse_args()
    entries = []
    for run in asked.runs:
        entries.append(entry(run, asked.texts))
        for name, one in entries[-1]["fresh"].items():
            print(
                f"{entries[-1]['run']} {name}: KL {one['kl']:.4f} on {one['texts']} fresh texts, bound "
                f"{one['bound']:.4f}, coverage {one['coverage']:.3f}",
                flush=True,
            )
    write_atomic(asked.output, json.dumps({"environment": environment(), "runs": entries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
