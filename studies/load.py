"""Many requests of mixed lengths and settings through the queue at batch 8: none lost, no leak, each as if alone.

    python -m studies.load 10000 [outputs/results/load.json]

Memory is the peak of the process after each tenth of the requests: a leak would raise it.
`tests/studies/test_load.py` runs a few hundred in the suite.
"""

import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from inference import Engine, Sampling
from inference.measure.environment import environment
from inference.policy import Fixed
from inference.proposers import Independent
from tests.tiny import near, tiny

ROWS, TENTHS, ALONE = 8, 10, 100


def requests(count: int, seed: int = 0) -> list[tuple[list[int], int, Sampling]]:
    """(prompt ids, most new tokens, settings)."""
    rng = random.Random(seed)
    regimes = [Sampling(), Sampling(0.0), Sampling(0.7, top_k=8), Sampling(top_p=0.8), Sampling(repetition_penalty=1.2)]
    found = []
    for _ in range(count):
        prompt = [rng.randrange(32) for _ in range(rng.choice((1, 2, 5, 20, 60)))]
        found.append((prompt, rng.choice((1, 2, 8, 24, 48)), rng.choice(regimes)))
    return found


def engine(rows: int) -> Engine:
    model = tiny(eos=7)
    return Engine(model, Independent(near(model)), rows=rows, policy=Fixed(3))


def run(count: int) -> dict[str, Any]:
    """Serve them a tenth at a time by one engine, then a sample of them alone; figures of both."""
    asked, many, served, memory = requests(count), engine(ROWS), [], []
    start = time.perf_counter()
    for tenth in range(TENTHS):
        part = range(tenth * count // TENTHS, (tenth + 1) * count // TENTHS)
        prompts, limits, regimes = map(list, zip(*(asked[i] for i in part), strict=True))
        out = many.generate(prompts, max_new_tokens=limits, sampling=regimes, ids=list(part), seed=1)
        served += list(zip(out.tokens, out.finish, strict=True))
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    seconds = time.perf_counter() - start
    one = engine(1)
    sample = random.Random(2).sample(range(count), min(ALONE, count))
    differ = [i for i in sample if alone(one, i, *asked[i]) != served[i]]
    whole = sum(
        finish == "stop" or len(text) == limit for (text, finish), (_, limit, _) in zip(served, asked, strict=True)
    )
    return {
        "requests": count,
        "answered": len(served),
        "whole": whole,
        "tokens": sum(len(text) for text, _ in served),
        "seconds": round(seconds, 1),
        "sample": len(sample),
        "differ": differ,
        "peak_mib": [round(m / 1024, 1) for m in memory],
        # after the first tenth, which allocates the slots
        "growth": memory[-1] / memory[0] - 1,
    }


def alone(one: Engine, key: int, prompt: list[int], limit: int, sampling: Sampling) -> tuple[list[int], str]:
    out = one.generate([prompt], max_new_tokens=limit, sampling=sampling, ids=[key], seed=1)
    return out.tokens[0], out.finish[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = run(int(sys.argv[1])) | {"environment": environment()}
    print(json.dumps(found, indent=2))
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(found, indent=2) + "\n")
