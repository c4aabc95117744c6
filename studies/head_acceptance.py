"""The acceptance that a small head alone costs: the target's own states, read through a pruned head or one of low rank.

    python -m studies.head_acceptance OUT.json [--tokens 2048,4096,8192,16384] [--ranks 64,128,256] [--prompts 64]
        [--new-tokens 192] [--steps 300] [--temperature 1] [--set target.path=... data.path=... ...]

The target samples texts from prompts (those shipped, or of data.path=). With the target's own states and the whole
head, every draft would be accepted. With the n most frequent tokens, counted on one half of the texts, the acceptance
is the target's mass of these tokens on the other half, which no draft exceeds. A head of rank r starts from the
singular value decomposition and learns expected acceptance on the first half. A draft can adapt its states to its head,
so the figure of a low-rank head is no bound. Intervals are over texts (95 %, normal). `studies.small_heads` has the costs.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from cotrain.commands.bench import prompts
from cotrain.config.overrides import quote
from cotrain.config.settings import checked, register
from cotrain.paths import folder as shipped
from cotrain.training.job import models
from inference import Engine, Sampling
from inference.drafts.atomic import write_atomic
from inference.measure.environment import environment
from inference.models.small_heads import LowRank, fill
from inference.sampling import probs_at, wide

CHUNK = 512  # positions whose distributions are in memory at once
RATE = 1e-3


@torch.inference_mode()
def sampled(engine: Engine, ids: list[list[int]], new_tokens: int, temperature: float) -> list[tuple[Tensor, Tensor]]:
    """Of each prompt: the tokens sampled (N,), and the target's last states (N, D) before them."""
    made = engine.generate(ids, max_new_tokens=new_tokens, sampling=Sampling(temperature=temperature), seed=0).tokens
    model, texts = engine.target.model, []
    for prompt, tokens in zip(ids, made, strict=True):
        whole = torch.tensor([prompt + list(tokens)], device=model.device)
        states = model.base_model(whole, use_cache=False).last_hidden_state
        texts.append((whole[0, len(prompt) :], states[0, len(prompt) - 1 : -1]))
    return texts


def accepted_pruned(known: Tensor, states: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Acceptance (N,) of q = p cut to the tokens known (V,), a mask, and normalised: the mass of p in them."""
    parts = [probs_at(wide(some @ weight.T), temperature)[:, known].sum(-1) for some in states.split(CHUNK)]
    return torch.cat(parts)


def accepted_low_rank(head: LowRank, states: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Acceptance (N,), sum_v min(p, q), of q from the head."""
    parts = []
    for some in states.split(CHUNK):
        p, q = (probs_at(wide(logits), temperature) for logits in (some @ weight.T, head(some)))
        parts.append(torch.minimum(p, q).sum(-1))
    return torch.cat(parts)


def low_rank(rank: int, states: Tensor, weight: Tensor, temperature: float, steps: int) -> tuple[LowRank, LowRank]:
    """A head of the rank as it starts, and after it has learnt acceptance on states (N, D) for some steps."""
    start, learnt = (LowRank(weight.shape[1], len(weight), rank).to(weight.device, weight.dtype) for _ in range(2))
    fill(start, weight)
    fill(learnt, weight)
    optimizer = torch.optim.Adam(learnt.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
        some = states[torch.randint(len(states), (CHUNK,), generator=generator).to(states.device)]
        with torch.no_grad():
            p = probs_at(wide(some @ weight.T), temperature)
        loss = 1 - torch.minimum(p, probs_at(wide(learnt(some)), temperature)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return start, learnt


def over_texts(values: Tensor, lengths: list[int]) -> dict[str, float]:
    """Mean of values (N,) over positions, and its 95 % interval with whole texts as units."""
    sizes = torch.tensor(lengths, dtype=torch.float64)
    sums = torch.stack([one.double().sum() for one in values.split(lengths)])
    mean = float(sums.sum() / sizes.sum())
    reach = 1.96 * float((sums - mean * sizes).std() * len(lengths) ** 0.5 / sizes.sum())
    return {"value": mean, "low": mean - reach, "high": mean + reach}


def main(arguments: list[str]) -> None:
    def numbers(text: str) -> list[int]:
        return [int(one) for one in text.split(",") if one]

    parser = argparse.ArgumentParser(prog="python -m studies.head_acceptance")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=numbers, default=[2048, 4096, 8192, 16_384])
    parser.add_argument("--ranks", type=numbers, default=[64, 128, 256])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of cotrain bench")
    asked = parser.parse_args(arguments)
    register()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        cfg: Any = checked("bench", compose("bench", overrides=quote(["quantisation=none", *asked.set])))
    target, tokenizer = models(cfg)
    target.requires_grad_(False)
    engine = Engine(target, tokenizer=tokenizer, rows=16)
    given = prompts(cfg, target, tokenizer)
    ids = [*given.ranking, *given.final][: asked.prompts]
    texts = sampled(engine, ids, asked.new_tokens, asked.temperature)
    counted, judged = texts[::2], texts[1::2]
    weight, lengths = wide(target.get_output_embeddings().weight.detach()), [len(tokens) for tokens, _ in judged]
    states, learnt_from = (wide(torch.cat([states for _, states in half])) for half in (judged, counted))
    counts = torch.bincount(torch.cat([tokens for tokens, _ in counted]), minlength=len(weight))
    heads = {}
    for size in (one for one in asked.tokens if one < len(weight)):
        known = torch.zeros_like(counts, dtype=torch.bool)
        known[counts.argsort(descending=True, stable=True)[:size]] = True
        heads[f"{size} tokens"] = {
            "accepted": over_texts(accepted_pruned(known, states, weight, asked.temperature), lengths)
        }
        print(f"{size} tokens: {heads[f'{size} tokens']}", flush=True)
    for rank in (one for one in asked.ranks if one < weight.shape[1]):
        start, learnt = low_rank(rank, learnt_from, weight, asked.temperature, asked.steps)
        with torch.no_grad():
            both = [accepted_low_rank(head, states, weight, asked.temperature) for head in (learnt, start)]
        heads[f"rank {rank}"] = {"accepted": over_texts(both[0], lengths), "at_start": over_texts(both[1], lengths)}
        print(f"rank {rank}: {heads[f'rank {rank}']}", flush=True)
    about, command = environment(), " ".join(["python -m studies.head_acceptance", *arguments])
    report = {"environment": about, "commit": about["commit"], "command": command, "target": str(cfg.target.path),
              "temperature": asked.temperature, "vocabulary": len(weight), "width": weight.shape[1],
              "positions": {"counted": len(learnt_from), "judged": len(states)}, "texts": len(texts),
              "heads": heads}  # fmt: skip
    write_atomic(asked.out, json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
