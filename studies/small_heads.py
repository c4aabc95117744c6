"""What one draft step costs with a whole, a pruned and a low-rank head: milliseconds and bytes of weights.

    python -m studies.small_heads OUT.json [--vocabularies 49152,151936] [--widths 576,1024] [--tokens 8192,16384]
        [--ranks 64,128,256] [--dtypes float32,bfloat16] [--batches 1,8] [--repeats 200] [--device cpu]

A draft of one layer with random weights, which cost what trained ones cost. A step is one pass over one token a row,
after a text of 256 tokens, with its distribution and its draw at temperature 1; the pass alone is timed too. In each
repeat every head takes its turn, in random order, so that what else the machine does falls on all alike. Reported are
medians with 95 % intervals (of the binomial distribution: a median between two order statistics), and the ratio of the
step to that of the whole head, the median over repeats. Acceptance is another matter: it is measured by training.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from inference.drafts.atomic import write_atomic
from inference.measure.environment import environment
from inference.measure.floor import weight_bytes
from inference.models.lm import LM
from inference.models.passes import wait_for
from inference.models.small_heads import RANK, VOCABULARY, put_small_head
from inference.sampling import draw, probs_at, wide

TEXT, WARM, HEAD_DIM = 256, 5, 64

Step = Callable[[], Any]


def model(width: int, vocabulary: int, tokens: int | None, rank: int | None) -> PreTrainedModel:
    """A Llama of one layer with random weights and the head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=1,
        num_attention_heads=width // HEAD_DIM,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=2 * TEXT,
        tie_word_embeddings=True,
    )
    network = LlamaForCausalLM(config).eval().requires_grad_(False)
    if tokens or rank:
        network.config.update({VOCABULARY: tokens, RANK: rank})
        put_small_head(network)
    return network


def steps(network: PreTrainedModel, batch: int) -> tuple[LM, Step, Step]:
    """The LM after a text of `TEXT` tokens in each row, its step, and the pass of it alone."""
    lm = LM(network, batch, graphs=True)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(lm.vocabulary, (batch, TEXT), generator=generator).to(lm.device)
    u, starts = torch.rand(batch, generator=generator).to(lm.device), [TEXT] * batch
    at = torch.tensor(starts, device=lm.device)
    lm.store(ids, [0] * batch)

    def single() -> Tensor:
        return lm.forward(ids[:, :1], starts, at=at).logits[:, -1]

    return lm, lambda: draw(probs_at(wide(single()), 1.0), u), single


def middle(values: Sequence[float]) -> dict[str, float]:
    """The median and its 95 % interval."""
    ordered, n = sorted(values), len(values)
    reach = 0.98 * n**0.5
    low, high = max(0, round(n / 2 - reach) - 1), min(n - 1, round(n / 2 + reach))
    return {"value": (ordered[(n - 1) // 2] + ordered[n // 2]) / 2, "low": ordered[low], "high": ordered[high]}


@torch.inference_mode()
def timed(made: dict[str, tuple[LM, Step, Step]], repeats: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of each head's step and pass, interleaved, and the ratio of its step to that of `whole`."""
    seconds: dict[tuple[str, str], list[float]] = {(name, part): [] for name in made for part in ("step", "pass")}
    turns, order = list(seconds), random.Random(0)
    for repeat in range(-WARM, repeats):
        order.shuffle(turns)
        for name, part in turns:
            lm, step, single = made[name]
            begin = time.perf_counter()
            (step if part == "step" else single)()
            wait_for(lm.device)
            if repeat >= 0:
                seconds[name, part].append(1000 * (time.perf_counter() - begin))
    whole, found = seconds["whole", "step"], {}
    for name in made:
        ratios = [ours / theirs for ours, theirs in zip(seconds[name, "step"], whole, strict=True)]
        found[name] = {part: middle(seconds[name, part]) for part in ("step", "pass")} | {"of_whole": middle(ratios)}
    return found


def heads(tokens: Sequence[int], ranks: Sequence[int]) -> dict[str, tuple[int | None, int | None]]:
    """By name, the tokens and the rank of each head that is timed."""
    named: dict[str, tuple[int | None, int | None]] = {"whole": (None, None)}
    named |= {f"{one} tokens": (one, None) for one in tokens} | {f"rank {one}": (None, one) for one in ranks}
    return named


def cell(width: int, vocabulary: int, dtype: str, batch: int, asked: Any) -> dict[str, Any]:
    """One cell of the report: every head, of one width, vocabulary, dtype and number of rows."""
    made, size = {}, {}
    for name, (tokens, rank) in heads(asked.tokens, asked.ranks).items():
        network = torch.nn.Module.to(model(width, vocabulary, tokens, rank), asked.device, getattr(torch, dtype))
        made[name] = steps(network, batch)
        size[name] = weight_bytes(made[name][0])[0]
    found = timed(made, asked.repeats)
    for name, one in found.items():
        one["bytes"] = size[name]
    return {"width": width, "vocabulary": vocabulary, "dtype": dtype, "batch": batch, "heads": found}


def main(arguments: list[str]) -> None:
    def numbers(text: str) -> list[int]:
        return [int(one) for one in text.split(",") if one]

    parser = argparse.ArgumentParser(prog="python -m studies.small_heads")
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocabularies", type=numbers, default=[49_152, 151_936])
    parser.add_argument("--widths", type=numbers, default=[576, 1024])
    parser.add_argument("--tokens", type=numbers, default=[8192, 16_384])
    parser.add_argument("--ranks", type=numbers, default=[64, 128, 256])
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32", "bfloat16"])
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args(arguments)
    about, cells = environment(), []
    for width, vocabulary in ((width, size) for width in asked.widths for size in asked.vocabularies):
        for dtype, batch in ((dtype, batch) for dtype in asked.dtypes for batch in asked.batches):
            cells.append(cell(width, vocabulary, dtype, batch, asked))
            line = ", ".join(f"{name} {one['step']['value']:.2f}" for name, one in cells[-1]["heads"].items())
            print(f"width {width}, {vocabulary} tokens, {dtype}, batch {batch}, ms: {line}", flush=True)
    command = " ".join(["python -m studies.small_heads", *arguments])
    report = {
        "environment": about,
        "commit": about["commit"],
        "command": command,
        "text": TEXT,
        "repeats": asked.repeats,
        "device": asked.device,
        "threads": torch.get_num_threads(),
        "cells": cells,
    }
    write_atomic(asked.out, json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
