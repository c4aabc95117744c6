"""Tokens per second of the three parts of a training (sampling, reading the target, learning), each beside its floor.

    python -m studies.training_rates OUT.json TARGET TEXTS.parquet --draft "draft=independent draft.vocabulary=8192" ...
        [--rows 8,32] [--new-tokens 48] [--batch 2] [--repeats 12]

TEXTS are those of `cotrain rollout`. Sampling continues their prompts in a batch of rows. Reading is a pass of the
target over whole texts. A learning step is forward, loss, backward and AdamW for a batch of texts whose states of the
target are cached, in the precision of `trainer.precision=auto`; each --draft (settings of cotrain train) is timed in
turn. The floor is operations over the machine's measured rate, or bytes over its bandwidth if that is longer. Of
learning it counts 6 operations per weight of the draft's layers and head, and 2 per weight of the target's head, for
each token that is predicted. Reported are medians.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn

from cotrain.config.overrides import quote
from cotrain.config.settings import checked, register
from cotrain.data.texts import Texts
from cotrain.losses.spec import parse
from cotrain.paths import folder as shipped
from cotrain.rollout.training_texts import padded, read_rows
from cotrain.training.assembly import new_student
from cotrain.training.job import models, settle
from cotrain.training.module import Distillation, Stage
from cotrain.training.optim import adamw, precision
from inference import Engine, Sampling
from inference.drafts.atomic import write_atomic
from inference.measure.environment import device, environment
from studies.floor import Machine, measure_machine, pass_load, weight_bytes

CONTEXT = 128  # tokens before the pass whose floor is that of sampling
WARM = 2


def config(settings: list[str]) -> Any:
    """The checked configuration of cotrain train with these settings."""
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        return checked("train", compose("train", overrides=quote(settings)))


def timed(task: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a task until the device is done, after `WARM` more runs."""
    seconds, done = [], torch.cuda.synchronize if device() == "cuda" else lambda: None
    for _ in range(repeats + WARM):
        began = time.perf_counter()
        task()
        done()
        seconds.append(time.perf_counter() - began)
    return median(seconds[WARM:])


def sampling(engine: Engine, prompts: list[list[int]], new_tokens: int, machine: Machine) -> dict[str, float]:
    """Tokens per second of plain decoding in `engine.rows` rows, and of the floor of its passes."""
    rows = engine.rows
    some = [prompts[i % len(prompts)] for i in range(rows)]

    def run() -> None:
        engine.generate(some, max_new_tokens=new_tokens, sampling=Sampling(temperature=1.0), seed=0, ignore_eos=True)

    floor = pass_load(engine.target, rows, 1, CONTEXT).seconds(machine)
    return {"rows": rows, "tokens_per_second": rows * new_tokens / timed(run, 1), "floor": rows / floor}


def batch_of(texts: Texts, size: int) -> dict[str, Any]:
    """The first texts of nearly full length as a batch of a training step."""
    rows = texts.length.argsort(descending=True)[:size]
    some = texts.rows(rows.tolist())
    batch = {"ids": some.ids, "predicted": some.predicted, "key": torch.arange(size), "temperature": torch.ones(size)}
    return {name: value.to(device()) for name, value in batch.items()}


def reading(module: Any, batch: dict[str, Any], weights: float, machine: Machine, repeats: int) -> dict[str, float]:
    """Tokens per second of the target's pass over whole texts. weights: of its body."""
    ids: Tensor = batch["ids"]
    with torch.no_grad():
        seconds = timed(lambda: module.teacher.read(ids), repeats)
    return {"tokens_per_second": ids.numel() / seconds, "floor": machine.rate / (2 * weights)}


def module_of(cfg: Any, target: Any, vocabulary: int, texts: Texts) -> Any:
    """A module that learns with the first loss of its configuration, without a trainer."""
    student = new_student(cfg, target, vocabulary)
    if cfg.draft.vocabulary:
        student.know(torch.bincount(texts.ids[:, 1:][texts.sampled], minlength=vocabulary))
    stages = [Stage(1.0, parse(cfg.loss.first))]
    unused: Any = None  # neither an optimiser nor a schedule
    module: Any = Distillation(student, target, stages, unused, unused, {}, remember=2**31, decay=cfg.loss.decay)
    module.draft.to(target.device)
    module._trainer = SimpleNamespace(global_step=0, max_steps=10**6, world_size=1)
    return module


def learning(module: Any, batch: dict[str, Any], head: float, machine: Machine, repeats: int) -> dict[str, float]:
    """Tokens per second of a step, and its floor. head: weights of the target's head."""
    optimizer, mixed = adamw(module.draft, 1e-4, 0.0, (0.9, 0.95)), precision("auto") == "bf16-mixed"

    def step() -> None:
        with torch.autocast(device(), torch.bfloat16, enabled=mixed):
            loss = module.training_step(batch, 0)
        loss.backward()
        nn.utils.clip_grad_norm_(module.draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    tokens = int(batch["predicted"].sum())
    embedding = module.draft.get_input_embeddings() if hasattr(module.draft, "model") else None
    tables = 0 if embedding is None else embedding.weight.numel()
    weights = sum(one.numel() for one in module.draft.parameters() if one.requires_grad) - tables
    if module.draft.get_output_embeddings() is not None and module.draft.config.tie_word_embeddings:
        weights += tables
    return {
        "tokens_per_second": tokens / timed(step, repeats),
        "tokens": tokens,
        "weights": weights,
        "floor": machine.rate / (6 * weights + 2 * head),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.training_rates")
    parser.add_argument("out", type=Path)
    parser.add_argument("target")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--draft", action="append", required=True, metavar="SETTINGS")
    parser.add_argument("--rows", type=lambda text: [int(one) for one in text.split(",") if one], default=[8, 32])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=12)
    asked = parser.parse_args(arguments)
    register()
    settle(0, 0)  # as a run does
    settings = {draft: config([f"target.path={asked.target}", *shlex.split(draft)]) for draft in asked.draft}
    target, tokenizer = models(next(iter(settings.values())))
    texts, about = padded(read_rows(asked.texts.with_suffix(""))), environment()
    machine = measure_machine(target.device, target.dtype)
    engines = [Engine(target, tokenizer=tokenizer, rows=rows) for rows in asked.rows]
    rows = [sampling(engine, texts.prompts, asked.new_tokens, machine) for engine in engines]
    for one in rows:
        print(
            f"sampling, {one['rows']} rows: {one['tokens_per_second']:.0f} tokens/s, floor {one['floor']:.0f}",
            flush=True,
        )
    del engines
    head, batch = float(target.get_output_embeddings().weight.numel()), batch_of(texts, asked.batch)
    body = weight_bytes(Engine(target, rows=1).target)[1] - head
    learnt: dict[str, dict[str, float]] = {}
    read: dict[str, float] = {}
    for draft, cfg in settings.items():
        module = module_of(cfg, target, len(tokenizer), texts)
        read = read or reading(module, batch, body, machine, asked.repeats)
        learnt[draft] = learning(module, batch, head, machine, asked.repeats)
        one = learnt[draft]
        print(f"learning, {draft}: {one['tokens_per_second']:.0f} tokens/s, floor {one['floor']:.0f}", flush=True)
    print(f"reading: {read['tokens_per_second']:.0f} tokens/s, floor {read['floor']:.0f}")
    command = " ".join(["python -m studies.training_rates", *map(shlex.quote, arguments)])
    report = {
        "environment": about,
        "commit": about["commit"],
        "command": command,
        "machine": {"bandwidth": machine.bandwidth, "rate": machine.rate},
        "batch": list(batch["ids"].shape),
        "sampling": rows,
        "reading": read,
        "learning": learnt,
    }
    write_atomic(asked.out, json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
