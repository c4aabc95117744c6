"""The acceptance that a small head alone costs: the target's own states, read through a pruned head or one of low rank.

    python -m studies.head_acceptance OUT.json TARGET LEARNT.parquet JUDGED.parquet [--tokens 2048,4096,8192,16384]
        [--ranks 64,128,256] [--steps 300] [--temperature 1] [--positions 16384]

The texts are those of `cotrain rollout`, which the target sampled. With the target's own states and the whole head,
every draft would be accepted. With the n most frequent tokens, counted on the texts LEARNT, the acceptance is the
target's mass of these tokens on the texts JUDGED, which no draft exceeds. A head of rank r starts from the singular
value decomposition and learns expected acceptance on LEARNT. A draft can adapt its states to its head, so the figure of
a low-rank head is no bound. Intervals are over texts (95 %, normal). `studies.small_heads` has the costs.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cotrain.data.texts import Texts
from cotrain.rollout.training_texts import padded, read_rows
from cotrain.teacher.target_model import load_pair
from inference.drafts.atomic import write_atomic
from inference.measure.environment import environment
from inference.models.small_heads import LowRank, fill
from inference.sampling import probs_at, wide

CHUNK = 512  # positions whose distributions are in memory at once
RATE = 1e-3


@torch.inference_mode()
def states_of(target: PreTrainedModel, texts: Texts, positions: int) -> list[Tensor]:
    """The target's last states before each sampled token, (n, D) of each text, of as many texts, evenly spaced, as have
    about `positions` sampled tokens."""
    each = int(texts.sampled.sum()) / len(texts)
    some = texts.spread(max(round(positions / each), 2))
    found = []
    for ids, sampled, length in zip(some.ids, some.sampled, some.length.tolist(), strict=True):
        states = target.base_model(ids[None, :length].to(target.device), use_cache=False).last_hidden_state[0]
        found.append(wide(states[:-1][sampled[: length - 1]]))
    return found


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
    parser.add_argument("target")
    parser.add_argument("learnt", type=Path)
    parser.add_argument("judged", type=Path)
    parser.add_argument("--tokens", type=numbers, default=[2048, 4096, 8192, 16_384])
    parser.add_argument("--ranks", type=numbers, default=[64, 128, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--positions", type=int, default=16_384, help="of LEARNT and of JUDGED, whose states are read")
    asked = parser.parse_args(arguments)
    target, tokenizer = load_pair(asked.target)
    if getattr(target.config.get_text_config(), "final_logit_softcapping", None):
        raise ValueError(f"{asked.target}: its head caps logits, which heads of this study do not")
    texts = [padded(read_rows(path.with_suffix(""))) for path in (asked.learnt, asked.judged)]
    weight = wide(target.get_output_embeddings().weight.detach())[: len(tokenizer)]  # later rows are padding
    first, judged = (states_of(target, one, asked.positions) for one in texts)
    lengths, states, learnt_from = [len(one) for one in judged], torch.cat(judged), torch.cat(first)
    counts = torch.bincount(texts[0].ids[:, 1:][texts[0].sampled], minlength=len(weight)).to(weight.device)
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
    report = {
        "environment": about,
        "commit": about["commit"],
        "command": command,
        "temperature": asked.temperature,
        "vocabulary": len(weight),
        "width": weight.shape[1],
        "counted": int(counts.sum()),
        "positions": {"learnt": len(learnt_from), "judged": len(states)},
        "texts": len(lengths),
        "heads": heads,
    }
    write_atomic(asked.out, json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
