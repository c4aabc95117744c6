"""Sampling training texts with the draft under training beside plain sampling, by rows at once.

    python -m studies.rollouts outputs/demo/draft outputs/results/rollouts.json

Prompts and lengths as `cotrain train` samples them, temperature 1, both sides in turn, batch by batch, as in
training; tokens a second, end tokens ignored so that both emit as many.
"""

import json
import sys
from pathlib import Path
from typing import Any

from cotrain.data.corpora import shipped
from inference import Engine, Sampling, load
from inference.measure.arms import engine_arm
from inference.measure.environment import environment
from inference.measure.timing import interleave

ROWS, BATCHES, PROMPT, NEW = (1, 4, 8, 32), 6, 48, 208


def measured(folder: str, rows: int) -> dict[str, Any]:
    drafted = load(folder, rows=rows)
    tokenizer: Any = drafted.tokenizer
    plain = Engine(drafted.target.model, tokenizer=tokenizer, rows=rows)
    arms = [engine_arm(name, engine, Sampling(), NEW) for name, engine in (("draft", drafted), ("plain", plain))]
    texts = [row["text"] for row in shipped()]
    count = rows * (BATCHES if rows > 1 else 3 * BATCHES)
    prompts = [tokenizer(texts[i % len(texts)])["input_ids"][:PROMPT] for i in range(count)]
    timing = interleave(arms, prompts, rows, 0)
    ratio = timing.ratio("draft", "plain")._asdict()
    return {"rows": rows, "draft": timing.speed("draft"), "plain": timing.speed("plain"), "ratio": ratio}


def main(folder: str, report: str) -> None:
    cells = []
    for rows in ROWS:
        cells.append(measured(folder, rows))
        print(cells[-1], flush=True)
    made = {"environment": environment(), "draft": folder, "cells": cells}
    Path(report).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
