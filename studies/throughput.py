"""Tokens per second of a distillation step beside what its two models cost bare, and beside TRL's GKD trainer.

    python -m studies.throughput [outputs/results/throughput.json]

One forward and backward on the same 8 texts of 256 tokens, in turn: cotrain's training step (target live, forward KL,
total variation, and forward KL on texts that come again, whose states of the target are remembered), the two models
alone (the target's forward, the draft's forward and backward of the sum of its logits), and GKDTrainer's training step
where `trl` is installed. Draft: four of the bundled target's layers in float32 under bfloat16 autocast, as in training.
"""

import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cotrain.losses.spec import parse
from cotrain.students import independent
from cotrain.teacher.target_model import load_pair
from cotrain.training import optim
from cotrain.training.module import Distillation, Stage
from inference.measure.environment import environment

BATCH, LENGTH, REPEATS, WARMUP = 8, 256, 30, 3
Step = Callable[[Tensor], None]


def ours(target: Any, network: Any, loss: str, remember: int = 0) -> Step:
    factories = partial(optim.adamw, lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95)), lambda optimizer: None
    module: Any = Distillation(
        independent.IndependentStudent(network), target, [Stage(1.0, parse(loss))], *factories, {}, remember=remember
    )
    module._trainer = SimpleNamespace(max_steps=1, global_step=0, world_size=1)
    type(module).global_step = 0

    def step(ids: Tensor) -> None:
        every = torch.ones(BATCH, LENGTH - 1, dtype=torch.bool)
        batch = {"ids": ids, "predicted": every, "key": torch.arange(BATCH), "temperature": torch.ones(BATCH)}
        with torch.autocast("cpu", torch.bfloat16):
            value = module.training_step(batch, 0)
        value.backward()

    return step


def bare(target: Any, network: Any) -> Step:
    def step(ids: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                target(input_ids=ids, use_cache=False)
            value = network(input_ids=ids, use_cache=False).logits.sum()
        value.backward()

    return step


def trl(target: Any, network: Any, tokenizer: Any, folder: str) -> Step:
    """Off-policy, forward KL, without recomputing activations: as little work as it can be set to."""
    try:
        from trl.experimental.gkd import GKDConfig, GKDTrainer
    except ImportError:
        from trl import GKDConfig, GKDTrainer
    from datasets import Dataset

    settings = GKDConfig(
        folder,
        lmbda=0.0,
        bf16=True,
        use_cpu=True,
        report_to=[],
        gradient_checkpointing=False,
        per_device_train_batch_size=BATCH,
    )
    texts = Dataset.from_list([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}])
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    trainer = GKDTrainer(network, target, settings, train_dataset=texts, processing_class=tokenizer)
    trainer.current_gradient_accumulation_steps = 1

    def step(ids: Tensor) -> None:
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": ids,
            "prompts": ids[:, :1],
            "prompt_attention_mask": torch.ones_like(ids[:, :1]),
        }
        trainer.training_step(trainer.model, inputs)

    return step


def run() -> dict[str, Any]:
    target, tokenizer = load_pair("bundled")
    network = independent.from_layers(target, [0, 1, -2, -1]).train()
    ids = torch.randint(2, target.config.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    steps = {
        "bare": bare(target, network),
        "kl": ours(target, network, "kl"),
        "tv": ours(target, network, "tv"),
        "kl, again": ours(target, network, "kl", 2**30),
    }
    version = None
    try:
        import trl as module

        version = module.__version__
        steps["trl"] = trl(target, copy.deepcopy(network), tokenizer, tempfile.mkdtemp())
    except ImportError:
        print("trl is not installed: its side is left out", file=sys.stderr)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(WARMUP + REPEATS):
        for name, step in steps.items():
            start = time.perf_counter()
            step(ids)
            if repeat >= WARMUP:
                seconds[name].append(time.perf_counter() - start)
    speeds = {name: BATCH * LENGTH / float(np.median(found)) for name, found in seconds.items()}
    over = {
        name: {base: _ratio(seconds[base], seconds[name]) for base in ("bare", "trl") if base in steps}
        for name in ("kl", "tv", "kl, again")
    }
    return {"tokens_per_second": speeds, "over": over, "repeats": REPEATS, "trl": version}


def _ratio(theirs: list[float], ours: list[float]) -> dict[str, float]:
    """Speed over another's, of medians, with a 95 % bootstrap interval over repeats, paired."""
    pairs, rng = np.array([theirs, ours]), np.random.default_rng(0)
    draws = [np.median(pairs[:, rng.integers(REPEATS, size=REPEATS)], axis=1) for _ in range(2000)]
    low, high = np.quantile([a / b for a, b in draws], [0.025, 0.975])
    a, b = np.median(pairs, axis=1)
    return {"value": float(a / b), "low": float(low), "high": float(high)}


if __name__ == "__main__":
    found = run() | {"environment": environment()}
    print(json.dumps(found, indent=2))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=2) + "\n")
