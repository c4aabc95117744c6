"""One draft that is told the temperature beside a specialist of each: predicted tau on the same held-out texts.

    python -m studies.temperatures OUT.json CONDITIONED T=FOLDER [T=FOLDER ...] [--k 4] [--set KEY=VALUE ...]

Folders are of `cotrain train`: CONDITIONED of the draft that is told, T=FOLDER of the specialist of temperature T. The
held-out texts are those of experiment=temperatures (--set target.path=, data.path=, rollout.folder= for others), made
at T, or read where kept. A row is a temperature: tau of both at k drafts a round under the token rule, one
teacher-forced pass each, and the share that the told draft reaches, with its 95 % interval over texts, which both sides
share in every resample.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir

from cotrain.config.overrides import quote
from cotrain.config.settings import checked, register, truncation
from cotrain.evaluation.held_out import HeldOut, Scores, evaluate, held_out
from cotrain.paths import folder as shipped
from cotrain.students.base import student_class
from cotrain.training.job import Job, models
from inference.drafts.atomic import write_atomic
from inference.drafts.draft_folder import read
from inference.measure.environment import environment

RESAMPLES = 2000


def job_of(settings: list[str]) -> Job:
    """Whose held-out texts are judged on."""
    register()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        cfg: Any = checked("train", compose("train", overrides=["experiment=temperatures", *quote(settings)]))
    return Job(cfg, Path(cfg.output), *models(cfg))


def scores(job: Job, folder: str, held: HeldOut) -> Scores:
    """Of the draft in a folder, on all texts together."""
    student = student_class(read(folder).kind).load(Path(folder), job.target, job.vocabulary)
    network: Any = student.network
    network.to(job.target.device).eval()
    return evaluate(held, student, job.halves[1])["all"]


def shares(ours: Scores, theirs: Scores, k: int) -> dict[str, float]:
    """tau of both, how much of theirs ours is, and the 95 % interval of that. Raises ValueError for other texts."""
    if ours.lengths.tolist() != theirs.lengths.tolist():
        raise ValueError("both sides are judged on the same texts")
    own, others = (one.calls(k).double().numpy() for one in (ours, theirs))
    rng, count = np.random.default_rng(0), len(own)
    draws = [rng.integers(count, size=count) for _ in range(RESAMPLES)]
    low, high = np.quantile([others[at].sum() / own[at].sum() for at in draws], [0.025, 0.975])
    return {
        "specialist": theirs.tau(k),
        "conditioned": ours.tau(k),
        "share": float(others.sum() / own.sum()),
        "low": float(low),
        "high": float(high),
    }


def row(job: Job, told: str, temperature: float, specialist: str, k: int) -> dict[str, float]:
    held = held_out(job.read, job.texts("held_out", temperature), temperature, truncation(job.cfg.regime))
    ours, theirs = (scores(job, folder, held) for folder in (told, specialist))
    return {"temperature": temperature} | shares(ours, theirs, k) | {"texts": len(held.texts)}


def line(row: dict[str, float]) -> str:
    return (
        f"{row['temperature']:>4g}  {row['specialist']:10.3f}  {row['conditioned']:11.3f}  {row['share']:6.1%} "
        f"[{row['low']:.1%}, {row['high']:.1%}]"
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.temperatures")
    parser.add_argument("out", type=Path)
    parser.add_argument("conditioned")
    parser.add_argument("specialists", nargs="+", metavar="T=FOLDER")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of cotrain train")
    asked = parser.parse_args(arguments)
    specialists = {float(t): folder for t, folder in (one.split("=", 1) for one in asked.specialists)}
    job, about = job_of(asked.set), environment()
    command = " ".join(["python -m studies.temperatures", *arguments])
    report: dict[str, Any] = {
        "environment": about,
        "commit": about["commit"],
        "command": command,
        "target": job.cfg.target.path,
        "conditioned": asked.conditioned,
        "k": asked.k,
        "rows": [],
    }
    print(f"{'T':>4}  specialist  conditioned   share [95 % interval], tau({asked.k})")
    for temperature, folder in sorted(specialists.items()):
        report["rows"].append(row(job, asked.conditioned, temperature, folder, asked.k))
        write_atomic(asked.out, json.dumps(report, indent=2, allow_nan=False) + "\n")
        print(line(report["rows"][-1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
