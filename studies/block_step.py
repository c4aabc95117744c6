"""What a training step of a block draft costs with many depths beside one depth, on the bundled target.

    python -m studies.block_step OUT.json [--depths 1,8] [--repeats 40] [--set draft.markov=32 ...]

Both drafts have the same layers and learn from the same two texts a step, whose states of the target are cached. Steps
(forward, loss and backward, without the optimiser) take turns in random order; reported are medians in milliseconds and
the median over repeats of the ratio to the step of the first number of depths, with 95 % intervals of the median.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir

from cotrain.config.overrides import quote
from cotrain.config.settings import checked, register
from cotrain.paths import folder as shipped
from cotrain.rollout.training_texts import padded, read_rows
from cotrain.training.job import models
from inference.drafts.atomic import write_atomic
from inference.measure.environment import environment
from studies.small_heads import middle
from studies.training_rates import module_of


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.block_step")
    parser.add_argument("out", type=Path)
    parser.add_argument("--depths", default="1,8")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of cotrain train")
    asked = parser.parse_args(arguments)
    depths = [int(one) for one in asked.depths.split(",")]
    register()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        configs: list[Any] = [
            checked("train", compose("train", overrides=quote(["draft=block", *asked.set, f"draft.depths={n}"])))
            for n in depths
        ]
    target, tokenizer = models(configs[0])
    texts = padded(list(read_rows(shipped("data") / "rollouts" / "train_T1"))[:2])
    modules = [module_of(cfg, target, len(tokenizer), texts) for cfg in configs]
    batch = {"ids": texts.ids, "predicted": texts.predicted, "key": torch.arange(2), "temperature": torch.ones(2)}
    seconds: list[list[float]] = [[] for _ in depths]
    for repeat in range(asked.repeats + 3):
        for number in random.Random(repeat).sample(range(len(depths)), len(depths)):
            module = modules[number]
            module._trainer.global_step = repeat
            module.draft.zero_grad()
            began = time.perf_counter()
            module.training_step(batch, 0).backward()
            if repeat >= 3:
                seconds[number].append(time.perf_counter() - began)
    about = environment()
    rows: list[dict[str, Any]] = [
        {
            "depths": n,
            "milliseconds": [1000 * one for one in middle(mine).values()],
            "ratio": list(middle([own / first for own, first in zip(mine, seconds[0], strict=True)]).values()),
        }
        for n, mine in zip(depths, seconds, strict=True)
    ]
    command = " ".join(["python -m studies.block_step", *arguments])
    report = {
        "environment": about,
        "commit": about["commit"],
        "command": command,
        "texts": list(texts.ids.shape),
        "rows": rows,
    }
    write_atomic(asked.out, json.dumps(report, indent=2) + "\n")
    print("\n".join(f"{row['depths']} depths: {row['milliseconds'][0]:.1f} ms, {row['ratio'][0]:.2f}x" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1:])
