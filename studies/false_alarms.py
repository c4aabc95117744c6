"""How the exactness verdict judges exact engines: no alarm is wanted, however long the run.

    python -m studies.false_alarms [outputs/results/false_alarms.json]

The draft is the bundled target itself with its weights rounded to 8 bits, as close to the target as a draft can be:
nearly every round accepts everything, and a target call too many is seen at once. One run of 20,000 tokens, whose
target calls should lie within 3 sigma of the predicted ones, and 30 short runs with other noise, each with the whole
verdict: a share of them that fails would be a false alarm of that rate.

2026-11-22, before rounding was reckoned with in rare rounds (`side_by_side.rounded`): z +.75 over 20,096 tokens, but 34
rare rounds where 9.2 were expected, which failed the verdict; of the 30 short runs one failed so. Not run since.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cotrain.data.corpora import shipped_ids
from cotrain.teacher.target_model import load_pair
from inference import Engine, Sampling
from inference.exactness.verdict import check
from inference.measure.arms import engine_arm
from inference.measure.environment import environment
from inference.measure.timing import interleave
from inference.policy import Fixed
from inference.proposers import Independent

ROWS, NEW, LONG, SHORT, SEEDS = 32, 128, 20_000, 1_000, 30


def verdict(engine: Engine, prompts: list[list[int]], tokens: int, seed: int) -> dict[str, Any]:
    """Of a run of at least so many tokens: what each check found."""
    chosen = [prompts[(seed * 7 + i) % len(prompts)] for i in range(-(-tokens // NEW))]
    arm = engine_arm("speculative", engine, Sampling(), NEW)
    texts = interleave([arm], chosen, ROWS, seed, warmup=0).texts("speculative")
    found = check(engine, texts, Sampling(), NEW, seed, ROWS)
    calls = found.calls
    assert calls is not None
    return {"passed": found.passed, "z": calls.z, **asdict(calls)}


def run() -> dict[str, Any]:
    target, tokenizer = load_pair("bundled")
    _, prompts = shipped_ids(tokenizer, 48)
    engine = Engine(target, Independent(target, int8=True), rows=ROWS, policy=Fixed(4), tokenizer=tokenizer)
    seeds = [verdict(engine, prompts, SHORT, seed) for seed in range(SEEDS)]
    return {
        "long": verdict(engine, prompts, LONG, SEEDS),
        "seeds": seeds,
        "failed": sum(not one["passed"] for one in seeds),
        "environment": environment(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = run()
    print(
        json.dumps(
            {
                "z": found["long"]["z"],
                "failed": found["failed"],
                "of": SEEDS,
                "zs": [round(one["z"], 2) for one in found["seeds"]],
            }
        )
    )
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=2) + "\n")
