"""Sampling continuations of prompts from the target with this project's own engine."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cotrain.data import Blocks
from inference import Engine, Sampling
from inference.atomic import write_atomic


@dataclass(frozen=True)
class Ask:
    """How much to sample: texts of each domain by split, tokens of a prompt and of its continuation."""

    texts: dict[str, int]  # train, held_out
    prompt_tokens: int
    new_tokens: int


def prompts(blocks: Blocks, count: int, tokens: int, seed: int) -> Iterator[tuple[str, list[int]]]:
    """(domain, prompt ids): the first `tokens` of blocks chosen by seed, `count` of each domain.

    Raises ValueError when a domain has fewer blocks, or blocks are shorter.
    """
    if tokens > blocks.ids.shape[1]:
        raise ValueError(f"rollout.prompt_tokens: {tokens} do not fit data.block={blocks.ids.shape[1]}")
    generator = torch.Generator().manual_seed(seed)
    for index, domain in enumerate(blocks.domains):
        mine = (blocks.domain == index).nonzero().squeeze(1)
        if len(mine) < count:
            raise ValueError(f"rollout.texts, rollout.held_out_texts: {count} prompts asked of {domain}, there are "
                             f"{len(mine)} blocks: ask for fewer, lower data.block, or give more text")  # fmt: skip
        for at in mine[torch.randperm(len(mine), generator=generator)[:count]].tolist():
            yield domain, blocks.ids[at, :tokens].tolist()


def collect(
    engine: Engine, asked: list[tuple[str, list[int]]], sampling: Sampling, new_tokens: int, seed: int, partial: Path,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:  # fmt: skip
    """Sample a continuation of every (domain, prompt); rows of rollouts.FEATURES, end tokens kept.

    Finished batches are kept in the file `partial`, so an interrupted run goes on with the next one. The place in
    the list is the key of the noise: a resumed run samples what an uninterrupted one would have.
    """
    partial.parent.mkdir(parents=True, exist_ok=True)
    rows = _whole_lines(partial)
    begun, clock = len(rows), time.perf_counter()
    with partial.open("a", encoding="utf-8") as file:
        for start in range(begun, len(asked), engine.rows):
            batch = asked[start : start + engine.rows]
            keys = list(range(start, start + len(batch)))
            texts = [prompt for _, prompt in batch]
            out = engine.generate(texts, max_new_tokens=new_tokens, sampling=sampling, seed=seed, ids=keys)
            made = [
                {"domain": domain, "prompt": prompt, "completion": completion}
                for (domain, prompt), completion in zip(batch, out.tokens, strict=True)
            ]
            file.writelines(json.dumps(row) + "\n" for row in made)
            file.flush()
            rows += made
            left = (time.perf_counter() - clock) / (len(rows) - begun) * (len(asked) - len(rows))
            say(f"rollout T={sampling.temperature:g}: {len(rows)}/{len(asked)} texts, {left:.0f} s left")
    return rows


def _whole_lines(partial: Path) -> list[dict[str, Any]]:
    """Rows of an interrupted run; a last line cut short by its death is dropped, from the file too."""
    if not partial.exists():
        return []
    lines = [line for line in partial.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    write_atomic(partial, "".join(lines))
    return [json.loads(line) for line in lines]
