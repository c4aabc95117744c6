"""Kinds of draft beside each other: tokens per call, acceptance and speed on one target, on the same prompts.

    python -m studies.proposers OUT.json KIND=FOLDER [KIND=FOLDER ...] [--minutes 60] [--temperatures 0,0.7,1]
        [--batches 1,8] [--rules token,block] [--set bench.new_tokens=64 ...]

Folders are of `cotrain train`, the target is the one that the first names (--set target.path=). Behind KIND may stand
more, as in "eagle, pruned". A cell is a temperature, a number of rows and a rule: plain decoding and every kind take
turns on the same prompts (those shipped, or of --set data.path=), each kind at the draft length that its own rounds and
its predicted tau call for there. OUT holds the cells that are done; a cell is begun if there is time left of --minutes,
and planned and timed in its share.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from cotrain.commands.served_pair import load_network, measurable_folder, prompts, refuse_pair, resolved
from cotrain.config.drafts import DRAFTS
from cotrain.config.overrides import quote
from cotrain.config.settings import checked, register
from cotrain.paths import folder as shipped
from cotrain.planning.plan import Plan
from cotrain.students.base import DEFAULT
from cotrain.training.job import models
from inference import Sampling
from inference.drafts.atomic import write_atomic
from inference.drafts.draft_folder import REPORT, Folder
from inference.drafts.weight_files import read_json
from inference.measure.environment import environment
from inference.verify.rules import rule_of
from studies.kinds_in_turn import Draft, Study


def drafts(folders: dict[str, str], settings: list[str]) -> list[Draft]:
    """Every folder beside the one target. Raises UserError or ValueError for one that does not fit it."""
    register()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        cfg: Any = checked("bench", compose("bench", overrides=quote(settings)))
    cfg.draft.path = next(iter(folders.values()))
    path, found = resolved(cfg), []
    for name, place in folders.items():
        if not name.startswith(kind := measurable_folder(place).kind):
            raise ValueError(f"{name}={place}: the folder is of kind {kind}")
        refuse_pair(place, path)
    target, tokenizer = models(cfg)
    given = prompts(cfg.data, cfg.bench, target, tokenizer)
    for name, place in folders.items():
        folder = measurable_folder(place)
        network = load_network(folder, target, tokenizer)
        objective = folder.metadata.objective if folder.metadata else "sampled"
        plan = Plan(
            target,
            tokenizer,
            network,
            Sampling(),
            cfg.verify,
            cfg.bench,
            (path, place),
            objective,
            given=given,
            kind=folder.kind,
        )
        size = sum(weight.numel() for weight in network.parameters() if weight.requires_grad)
        found.append(Draft(name, folder, plan, size, trained(folder)))
    return found


def trained(folder: Folder) -> float | None:
    """Seconds, as the folder's report says."""
    if not DRAFTS[folder.kind].trained:
        return 0.0
    report = read_json(folder.path / REPORT) if (folder.path / REPORT).is_file() else {}
    seconds: float | None = report.get("extra", {}).get("training", {}).get("seconds")
    return seconds


def finite(value: Any) -> Any:
    """What JSON takes: None for NaN and infinity."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def line(row: dict[str, Any]) -> str:
    cell = f"T {row['temperature']:g}, {row['rows']} rows, {row['rule']}"
    tau, speed, over = row["tau"], row["speedup"], row["over_independent"]
    beside = f", {over['value']:.2f}x [{over['low']:.2f}, {over['high']:.2f}] of {DEFAULT}" if over else ""
    predicted = f" ({tau['predicted']:.2f}, z {tau['z']:+.1f})" if tau["predicted"] else ""
    return (
        f"{cell}  {row['kind']:14} k {row['k']}  tau {tau['measured']:.2f}{predicted}  {speed['value']:.2f}x "
        f"[{speed['low']:.2f}, {speed['high']:.2f}], {speed['predicted']:.2f}x predicted{beside}"
        f"{'' if row['exact'] else '  NOT EXACT'}"
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.proposers")
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", nargs="+", metavar="KIND=FOLDER")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--temperatures", default="0,0.7,1")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rules", default="block")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of cotrain bench")
    asked = parser.parse_args(arguments)
    start = time.perf_counter()
    rules = asked.rules.split(",")
    for rule in rules:
        rule_of(rule)
    found = drafts(dict(one.split("=", 1) for one in asked.folders), asked.set)
    study = Study(found, start + 60 * asked.minutes)
    about = environment()
    command = " ".join(["python -m studies.proposers", *arguments])
    report = {
        "environment": about,
        "commit": about["commit"],
        "command": command,
        "target": found[0].plan.names[0],
        "rows": [],
    }
    lists = [float(t) for t in asked.temperatures.split(",")], [int(n) for n in asked.batches.split(",")]
    for rows in study.cells(*lists, rules):
        report["rows"] += finite(rows)
        write_atomic(asked.out, json.dumps(report, indent=2, allow_nan=False) + "\n")
        print("\n".join(map(line, rows)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
