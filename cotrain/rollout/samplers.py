"""Sampling continuations of prompts from the target: with this project's own engine, sped up by a draft if there is
one, or by a server."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from cotrain.console import Display, Say
from cotrain.errors import UserError
from inference import Engine, Sampling
from inference.drafts.atomic import naming_full_disk, write_atomic
from inference.sampling import noise
from inference.servers.openai_client import Client, Completion

SEEDS = 2**32  # keys of a set are fewer


@dataclass(frozen=True)
class Ask:
    """How much to sample: texts of each domain by split, tokens of a prompt and of its continuation."""

    texts: dict[str, int]  # train, held_out
    prompt_tokens: int
    new_tokens: int


class Sampler(Protocol):
    """Continues prompts; rows: as many at once. A key a prompt decides its noise."""

    @property
    def rows(self) -> int: ...

    def __call__(
        self, prompts: list[list[int]], sampling: Sampling, new_tokens: int, seed: int, keys: list[int]
    ) -> list[list[int]]:
        """New ids of each prompt, end tokens kept."""


@dataclass(frozen=True)
class Own:
    """This engine; with a proposer it is faster, and the texts' distribution is the same."""

    engine: Engine

    @property
    def rows(self) -> int:
        return self.engine.rows

    def __call__(
        self, prompts: list[list[int]], sampling: Sampling, new_tokens: int, seed: int, keys: list[int]
    ) -> list[list[int]]:
        out = self.engine.generate(prompts, max_new_tokens=new_tokens, sampling=sampling, seed=seed, ids=keys)
        for message in filter(None, out.errors):  # what came before would be kept as a short text
            raise UserError(f"the target cannot continue a prompt, {message}")
        return out.tokens


@dataclass
class Faster:
    """Samplers of one distribution, by name: each continues one batch, then one against the clock, then the fastest
    goes on.
    Every text counts: the distribution is the same. speeds: tokens a second, as last measured."""

    samplers: Mapping[str, Sampler]
    speeds: dict[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return min(sampler.rows for sampler in self.samplers.values())

    def __call__(
        self, prompts: list[list[int]], sampling: Sampling, new_tokens: int, seed: int, keys: list[int]
    ) -> list[list[int]]:
        name = next((one for one in self.samplers if self.speeds.get(one, 0.0) <= 0.0), None)
        name = name or max(self.speeds, key=self.speeds.__getitem__)
        clock = time.perf_counter()
        completions = self.samplers[name](prompts, sampling, new_tokens, seed, keys)
        speed = sum(map(len, completions)) / (time.perf_counter() - clock)
        self.speeds[name] = speed if name in self.speeds else 0.0  # the first batch warms up
        return completions


@dataclass(frozen=True)
class Mixed:
    """Prompts continued by the target, a share of them by the draft under training instead: contexts that it leads
    itself into, where the target then teaches (Agarwal et al. 2024, 2306.13649). Which ones depends on seed and key.
    It lowered tau(8) by 1.1 % (outputs/results/on_draft.json); it stays so that others can compare."""

    target: Faster
    draft: Sampler
    share: float

    @property
    def rows(self) -> int:
        """The batch size at which the busier sampler has all its rows in use."""
        return round(self.target.rows / max(self.share, 1 - self.share))

    @property
    def speeds(self) -> dict[str, float]:
        return self.target.speeds

    def __call__(
        self, prompts: list[list[int]], sampling: Sampling, new_tokens: int, seed: int, keys: list[int]
    ) -> list[list[int]]:
        zero, rows = torch.zeros(len(keys), dtype=torch.int64), torch.tensor(keys)
        drafted = (noise.uniform(seed, rows, zero, zero[:1], noise.DRAFT)[:, 0] < self.share).tolist()
        completions: dict[int, list[int]] = {}
        for sampler, mine in ((self.draft, True), (self.target, False)):
            at = [i for i, one in enumerate(drafted) if one is mine]
            if at:
                part = [prompts[i] for i in at], sampling, new_tokens, seed, [keys[i] for i in at]
                completions |= dict(zip(at, sampler(*part), strict=True))
        return [completions[i] for i in range(len(keys))]


@dataclass(frozen=True)
class Remote:
    """An OpenAI-compatible server. One that tells no ids is asked in text, and its text is encoded again: where that
    does not give back what it sampled, the text is the target's still and its cut into tokens is not."""

    client: Client
    tokenizer: PreTrainedTokenizerBase
    rows: int

    def __call__(
        self, prompts: list[list[int]], sampling: Sampling, new_tokens: int, seed: int, keys: list[int]
    ) -> list[list[int]]:
        sends_ids = self.client.sends_ids
        asked: Any = prompts if sends_ids else [str(self.tokenizer.decode(prompt)) for prompt in prompts]
        seeds = [seed * SEEDS + key for key in keys]
        answers = self.client.complete(asked, new_tokens, sampling, seeds, at_once=self.rows)
        return [self._ids(one, new_tokens) for one in answers]

    def _ids(self, one: Completion, new_tokens: int) -> list[int]:
        if one.ids is not None:
            return one.ids
        ids = list(self.tokenizer(one.text, add_special_tokens=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        return (ids + [end] * (one.finish == "stop" and end is not None))[:new_tokens]


def collect(
    sampler: Sampler, asked: list[tuple[str, list[int]]], sampling: Sampling, new_tokens: int, seed: int, partial: Path,
    say: Say | None = None, keys: Sequence[int] | None = None, seconds: float | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Sample a continuation of every (domain, prompt); rows of `training_texts.FEATURES`, end tokens kept.

    seconds: no batch begins that would end later, so that rows may be fewer than asked for; the first one always does.

    Finished batches are kept in the file `partial`, so an interrupted run goes on with the next one. say: takes a line
    a batch; None: see `Display`. keys: of the noise, by default the place in the
    list: a resumed run samples what an uninterrupted one would have.
    """
    keys = range(len(asked)) if keys is None else keys
    partial.parent.mkdir(parents=True, exist_ok=True)
    rows = _whole_lines(partial)
    first, clock = len(rows), time.perf_counter()
    display = Display(f"rollout T={sampling.temperature:g}", len(asked), "texts", first, say)
    with display, naming_full_disk(partial), partial.open("a", encoding="utf-8") as file:
        for start in range(first, len(asked), sampler.rows):
            batch = asked[start : start + sampler.rows]
            texts = [prompt for _, prompt in batch]
            completions = sampler(texts, sampling, new_tokens, seed, list(keys[start : start + len(batch)]))
            batch_rows = [
                {"domain": domain, "prompt": prompt, "completion": completion}
                for (domain, prompt), completion in zip(batch, completions, strict=True)
            ]
            file.writelines(json.dumps(row) + "\n" for row in batch_rows)
            file.flush()
            rows += batch_rows
            speed = sum(len(row["completion"]) for row in rows[first:]) / (time.perf_counter() - clock)
            display.to(len(rows), f"{speed:.0f} tokens/s")
            batches, spent = (len(rows) - first) / sampler.rows, time.perf_counter() - clock
            if seconds and len(rows) < len(asked) and spent * (1 + 1 / batches) > seconds:
                print(f"sampling ends with {len(rows)} of {len(asked)} texts, which minutes= leaves time for")
                break
    return rows


def _whole_lines(partial: Path) -> list[dict[str, Any]]:
    """Rows of an interrupted run; a last line cut short by its death is dropped, from the file too."""
    if not partial.exists():
        return []
    lines = [line for line in partial.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    write_atomic(partial, "".join(lines))
    return [json.loads(line) for line in lines]
