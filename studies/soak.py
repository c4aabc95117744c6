"""Long runs of tiny models: does memory grow with the rounds of an engine, or with the steps of a training?

    python -m studies.soak outputs/results/trust.json [--rounds 100000] [--steps 20000]

One engine serves calls of mixed prompts and settings until it has run so many rounds. One training runs so many steps
through the command line, in this process, without measurement. Memory is what the process holds (resident, in MiB)
after each tenth, and the number of Python objects. Growth is that from the second tenth, when all is warm, to the last.
"""

import argparse
import gc
import json
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from cotrain.cli import main
from cotrain.training.interrupts import Keeper
from inference import Engine, Sampling
from inference.policy import Fixed
from inference.proposers import Independent
from studies.trust import write_part
from tests.folders import own_texts, target_folder
from tests.tiny import near, tiny

TENTHS, ROWS, K = 10, 8, 3
TRAINING = """data.block=64 rollout.texts=32 rollout.held_out_texts=4 rollout.prompt_tokens=8 rollout.new_tokens=16
rollout.temperatures=[1.0] trainer.corpus_steps=0 trainer.batch=1 trainer.validations=4 trainer.threads=1
init.layers=[0] measure=false trainer.checkpoint_minutes=1""".split()
REGIMES = (Sampling(), Sampling(0.0), Sampling(0.7, top_k=8), Sampling(top_p=0.8), Sampling(repetition_penalty=1.2))


def resident() -> float:
    """Return the memory that this process holds now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def noted(memory: list[float], objects: list[int]) -> None:
    gc.collect()
    memory.append(round(resident(), 1))
    objects.append(len(gc.get_objects()))


def figures(memory: list[float], objects: list[int], seconds: float, **more: Any) -> dict[str, Any]:
    growth = {"memory": memory[-1] / memory[1] - 1, "objects": objects[-1] / objects[1] - 1}
    return more | {"resident_mib": memory, "objects": objects, "growth": growth, "seconds": round(seconds, 1)}


def rounds(count: int) -> dict[str, Any]:
    """Serve until so many rounds are done."""
    model, rng = tiny(eos=7, dtype=torch.float32), random.Random(0)
    engine = Engine(model, Independent(near(model)), rows=ROWS, policy=Fixed(K))
    memory, objects, done, tokens, calls = list[float](), list[int](), 0, 0, 0
    clock = time.perf_counter()
    while done < count:
        prompts = [[rng.randrange(32) for _ in range(rng.choice((1, 2, 5, 20, 60)))] for _ in range(3 * ROWS)]
        limits = [rng.choice((1, 8, 48, 160)) for _ in prompts]
        regimes = [rng.choice(REGIMES) for _ in prompts]
        out = engine.generate(prompts, max_new_tokens=limits, sampling=regimes, seed=calls, ignore_eos=True)
        calls += 1
        done, tokens = done + out.stats.times["target"], tokens + sum(map(len, out.tokens))
        if done >= len(memory) * count / TENTHS + count / TENTHS:
            noted(memory, objects)
    return figures(memory, objects, time.perf_counter() - clock, rounds=done, calls=calls, tokens=tokens)


def steps(count: int, place: Path) -> dict[str, Any]:
    """Train so many steps."""
    target_folder(place / "target")
    own_texts(place / "own.jsonl", 220)
    memory, objects = list[float](), list[int]()
    true: Callable[..., None] = Keeper.on_train_batch_end

    def ended(self: Keeper, trainer: Any, *arguments: Any) -> None:
        true(self, trainer, *arguments)
        if trainer.global_step >= (len(memory) + 1) * count / TENTHS:
            noted(memory, objects)

    clock = time.perf_counter()
    with patch.object(Keeper, "on_train_batch_end", ended):
        status = main(
            ["train", f"target.path={place / 'target'}", f"data.path={place / 'own.jsonl'}", f"output={place / 'run'}"]
            + [*TRAINING, f"trainer.steps={count}"]
        )
    assert status == 0
    texts = json.loads((place / "run" / "held_out.json").read_text())["texts"]["1"]
    return figures(memory, objects, time.perf_counter() - clock, steps=count, alpha=texts["alpha"])


def main_of_study() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.soak")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=20_000)
    asked = parser.parse_args()
    command = f"python -m studies.soak {asked.out} --rounds {asked.rounds} --steps {asked.steps}"
    found: dict[str, Any] = {"command": command, "engine": rounds(asked.rounds)}
    print(found["engine"], flush=True)
    with tempfile.TemporaryDirectory() as place:
        found["training"] = steps(asked.steps, Path(place))
    print(found["training"])
    write_part(asked.out, "soak", found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main_of_study()
