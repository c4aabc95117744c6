"""What recording a generation costs: `Engine(record=Recorder())` beside the same engine without, and that one again.

    python -m studies.recording [outputs/results/recording.json]

The bundled target with four of its layers as the draft (untrained: what a round costs does not depend on what it
accepts), k = 4, temperature 1. Three engines share the models and continue the same prompts in turn, in an order that
rotates; the ratio of seconds has a 95 % interval by a bootstrap over batches, paired. "off again" is the same engine as
"off": how far its ratio is from 1 is what this machine cannot tell apart. A tree is recorded too, since it has more to
say of a round. Wanted: at most 1.05 while recording.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from cotrain.data.corpora import shipped_ids
from cotrain.students.independent import from_layers
from cotrain.teacher.target_model import load_pair
from inference import Engine, Sampling
from inference.measure.arms import engine_arm
from inference.measure.environment import environment
from inference.measure.timing import interleave
from inference.policy import Fixed
from inference.proposers import Independent
from inference.report.replay import Recorder

LAYERS, K, TREE = [0, 1, -2, -1], 4, (-1, -1, 0, 0, 1, 2)
PROMPTS, TOKENS, REPEATS, WANTED = 32, 96, 3, 1.05


def run(prompts: int = PROMPTS, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """A cell for one row, four rows, and one row with trees."""
    torch.set_num_threads(1)
    target, tokenizer = load_pair("bundled")
    draft = from_layers(target, LAYERS).eval()
    texts = shipped_ids(tokenizer, 48)[1][:prompts]
    cells = []
    for rows, shape in ((1, None), (4, None), (1, TREE)):
        proposer = Independent(draft, shape=shape) if shape else Independent(draft)
        found = cell(target, proposer, texts, rows, "tree" if shape else "token", repeats)
        cells.append({"rows": rows, "tree": list(shape or ()), **found})
        print(line(cells[-1]), flush=True)
    return cells


def cell(
    target: Any, proposer: Any, prompts: list[list[int]], rows: int, rule: str, repeats: int, tokens: int = TOKENS
) -> dict[str, Any]:
    """Seconds of "on" and of "off again" over those of "off", each with its interval; the recorder kept every round."""
    record = Recorder(most=10**6)
    arms = []
    for name, kept in (("off", None), ("on", record), ("off again", None)):
        engine = Engine(target, proposer, verify=rule, policy=Fixed(K), rows=rows, record=kept)
        arms.append(engine_arm(name, engine, Sampling(), tokens))
    timing = interleave(arms, prompts, rows, repeats=repeats)
    assert record.rounds
    ratios = {name: timing.ratio("off", name)._asdict() for name in ("on", "off again")}
    return {"seconds_over_off": ratios, "tokens_per_second": {arm: timing.speed(arm) for arm in timing.arms},
            "batches": len(timing.batches), "repeats": repeats}  # fmt: skip


def line(found: dict[str, Any]) -> str:
    said = [f"{name}: {ratio['value'] - 1:+.1%} [{ratio['low'] - 1:+.1%}, {ratio['high'] - 1:+.1%}]"
            for name, ratio in found["seconds_over_off"].items()]  # fmt: skip
    shape = ", trees" if found["tree"] else ""
    return f"{found['rows']} rows{shape}: seconds over those without recording, {', '.join(said)}"


if __name__ == "__main__":
    made = run()
    report = {"environment": environment(), "wanted": WANTED, "cells": made}
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(int(any(one["seconds_over_off"]["on"]["low"] > WANTED for one in made)))
