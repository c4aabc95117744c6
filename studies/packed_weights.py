"""Time of a pass of a target with and without packed copies of its weights (`inference.models.packing`), by ids.

    python -m studies.packed_weights --output OUT.json [--target smollm2] [--ids 1,2,4,5,9,17,64,512] [--repeats 15]

Both ways are timed in turn, after 200 stored tokens; a figure is a median in milliseconds. So is
`read`: a sum over as many bytes as the copies have, in the same turns. Raises ValueError for a target that is not
packed on this CPU.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch

from inference.drafts.atomic import write_atomic
from inference.drafts.bundled_target import resolve
from inference.measure.environment import environment
from inference.measure.floor import weight_bytes
from inference.models.forward import Lean
from inference.models.llama import weights_of
from inference.models.lm import LM
from inference.models.packing import can_pack
from inference.models.pretrained import load_model

STORED = 200


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.packed_weights")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument(
        "--ids", type=lambda text: [int(one) for one in text.split(",")], default=[1, 2, 4, 5, 9, 17, 64, 512]
    )
    parser.add_argument("--repeats", type=int, default=15)
    asked = parser.parse_args(arguments)
    model = load_model(resolve(asked.target))
    if not can_pack(model):
        raise ValueError(f"--target {asked.target}: its weights are not packed on this CPU")
    with_copies, without = LM(model, 1), LM(model, 1)
    assert isinstance(without.run, Lean)
    without.run.weights, without.run.flat = weights_of(model), None
    like = torch.ones(int(weight_bytes(with_copies)[0]) // 4)
    ways = {"copies": with_copies, "none": without}
    report = {"target": asked.target, "environment": environment(), "milliseconds": {n: {} for n in (*ways, "read")}}
    with torch.inference_mode():
        stored = torch.randint(0, model.config.vocab_size, (1, STORED))
        for lm in ways.values():
            lm.store(stored, [0])
        for count in asked.ids:
            ids = torch.randint(0, model.config.vocab_size, (1, count))
            tasks = {name: partial(lm.forward, ids, [STORED]) for name, lm in ways.items()} | {"read": like.sum}
            seconds: dict[str, list[float]] = {name: [] for name in tasks}
            for repeat in range(asked.repeats + 2):
                for name, task in tasks.items():
                    start = time.perf_counter()
                    task()
                    if repeat > 1:
                        seconds[name].append(time.perf_counter() - start)
            for name, times in seconds.items():
                report["milliseconds"][name][str(count)] = 1000 * median(times)
            print(count, {name: round(1000 * median(times), 1) for name, times in seconds.items()}, flush=True)
    report["environment"]["command"] = "python -m studies.packed_weights " + " ".join(arguments)
    write_atomic(asked.output, json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
