"""Samplers, which let the target continue prompts: with this engine, with or without a draft, or with a server."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from cotrain.console import Display
from cotrain.errors import UserError
from inference import Engine, Sampling
from inference.drafts.atomic import naming_full_disk, write_atomic
from inference.servers.openai_client import Completion

WINDOW = 512  # prompts that are sorted by length
CALL = 4  # times the sampler's rows in a call, unless time is short: a row that ends leaves its place to the next
SEEDS = 2**32  # more than a set has keys, so each (seed, key) gives another number
Ids = list[list[int]]  # token ids of each prompt or text


@dataclass(frozen=True)
class Ask:
    """How much to sample. texts: the most texts per domain, keyed by split ("train", "held_out"). prompt_tokens,
    new_tokens: the most tokens in a prompt, and in a continuation."""

    texts: dict[str, int]  # keys: train, held_out
    prompt_tokens: int
    new_tokens: int


class Completing(Protocol):
    """A server or several, see `openai_client.Client`."""

    @property
    def sends_ids(self) -> bool: ...

    def complete(
        self, prompts: Sequence[Any], max_new_tokens: int, sampling: Sampling, seeds: Iterable[int], *, at_once: int = 8
    ) -> list[Completion]: ...


class Sampler(Protocol):
    """Continues prompts. rows: how many prompts are continued at once."""

    @property
    def rows(self) -> int: ...

    def __call__(self, prompts: Ids, sampling: Sampling, new_tokens: int, seed: int, keys: list[int]) -> Ids:
        """Return the new token ids for each prompt, including the end token that ended a text.

        prompts: token ids of each. sampling: the regime. new_tokens: the most tokens in a continuation. seed, keys: fix
        the random numbers; keys has one number per prompt.
        """


@dataclass(frozen=True)
class Own:
    """Samples with this engine. If the engine has a draft, it is faster, and the distribution of the texts is the same.
    A call raises UserError if the engine cannot continue a prompt."""

    engine: Engine

    @property
    def rows(self) -> int:
        return self.engine.rows

    def __call__(self, prompts: Ids, sampling: Sampling, new_tokens: int, seed: int, keys: list[int]) -> Ids:
        out = self.engine.generate(prompts, max_new_tokens=new_tokens, sampling=sampling, seed=seed, ids=keys)
        for message in filter(None, out.errors):  # else the part before the error would pass for a whole text
            raise UserError(f"the target cannot continue a prompt, {message}")
        return out.tokens


@dataclass(frozen=True)
class Remote:
    """Samples with an OpenAI-compatible server.

    If the server returns no token ids, prompts are sent as text, and answers are tokenized here. The tokens may then
    differ from the sampled ones, but they decode to the same text. If a prompt or an answer changes when it is encoded
    and decoded again, its continuation is [].

    rows: the most concurrent requests. ends: token ids that end a text. If the server does not report the id that ended
    a text, it is assumed to be the last of `ends` in the prompt (a chat template ends each turn with it) or, without
    one, the tokenizer's end token.
    """

    client: Completing
    tokenizer: PreTrainedTokenizerBase
    rows: int
    ends: frozenset[int]

    def __call__(self, prompts: Ids, sampling: Sampling, new_tokens: int, seed: int, keys: list[int]) -> Ids:
        asked: Any = prompts if self.client.sends_ids else [self._asked(prompt) for prompt in prompts]
        sent = [i for i, prompt in enumerate(asked) if prompt is not None]
        seeds = [seed * SEEDS + keys[i] for i in sent]
        answers = self.client.complete([asked[i] for i in sent], new_tokens, sampling, seeds, at_once=self.rows)
        completions: Ids = [[] for _ in prompts]
        for i, one in zip(sent, answers, strict=True):
            completions[i] = self._ids(prompts[i], one, new_tokens) if one.ids is None else one.ids
        return completions

    def _asked(self, prompt: list[int]) -> str | None:
        """Return a text that the server's tokenizer encodes as the prompt, or None if there is no such text. If the
        tokenizer adds a start token itself, the text does not have it."""
        texts = (self._text(prompt), self._text(prompt[1:]))
        return next((text for text in texts if list(self.tokenizer(text)["input_ids"]) == prompt), None)

    def _ids(self, prompt: list[int], one: Completion, new_tokens: int) -> list[int]:
        """Return the token ids of an answer, with the token that ended it, or [] if they do not decode to the answer.
        The answer is encoded together with the prompt, since some tokenizers begin a text with a space."""
        before = self._asked(prompt) or ""
        whole = list(self.tokenizer(before + one.text)["input_ids"])
        ids = whole[len(prompt) :]
        if whole[: len(prompt)] != prompt:
            ids = list(self.tokenizer(one.text, add_special_tokens=False)["input_ids"])
        if "\ufffd" in one.text or self._text(prompt + ids) != self._text(prompt) + one.text:
            return []
        if one.finish == "stop" and not (ids and ids[-1] in self.ends):
            default = self.tokenizer.eos_token_id
            likely = (*reversed(prompt), default, *sorted(self.ends))
            end = next((token for token in likely if token in self.ends), default) if one.end is None else one.end
            ids += [] if end is None else [end]
        return ids[:new_tokens]

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def collect(
    sampler: Sampler,
    asked: list[tuple[str, list[int]]],
    sampling: Sampling,
    new_tokens: int,
    seed: int,
    partial: Path,
    keys: Sequence[int] | None = None,
    seconds: float | None = None,
    title: str = "texts",
    window: int = WINDOW,
) -> list[dict[str, Any]]:
    """Sample a continuation of every prompt in `asked`, pairs (domain, token ids). Return one row {"domain", "prompt",
    "completion"} per prompt, with token ids, in the order in which they were sampled (`by_length`).

    Args:
        partial: the file to which each finished batch is appended. If it exists, sampling continues after its last row.
        keys: one number per prompt, for the random numbers; None for the index of each prompt. A resumed run thus
            samples the same texts as an uninterrupted one.
        seconds: a time limit, or None. After the first batch, no batch is started that is expected to end later, so
            there may be fewer rows than prompts.
        title: of the progress bar.
        window: how many prompts are sorted by length. With 1, the rows of fewer prompts are the first rows of more.
    """
    keys = range(len(asked)) if keys is None else keys
    order = by_length([len(prompt) for _, prompt in asked], WINDOW if seconds else 0, window)
    partial.parent.mkdir(parents=True, exist_ok=True)
    rows = _whole_lines(partial)
    first, clock = len(rows), time.perf_counter()
    size = sampler.rows if seconds else CALL * sampler.rows
    display = Display(title, len(asked), "texts", first)
    with display, naming_full_disk(partial), partial.open("a", encoding="utf-8") as file:
        while len(rows) < len(asked):
            chosen = order[len(rows) : len(rows) + size]
            batch = [asked[i] for i in chosen]
            texts = [prompt for _, prompt in batch]
            completions = sampler(texts, sampling, new_tokens, seed, [keys[i] for i in chosen])
            batch_rows = [
                {"domain": domain, "prompt": prompt, "completion": completion}
                for (domain, prompt), completion in zip(batch, completions, strict=True)
            ]
            file.writelines(json.dumps(row) + "\n" for row in batch_rows)
            file.flush()
            rows += batch_rows
            spent = time.perf_counter() - clock
            display.to(len(rows), f"{sum(len(row['completion']) for row in rows[first:]) / spent:.0f} tokens/s")
            if seconds:
                each, size = spent / (len(rows) - first), CALL * sampler.rows
                size = size if CALL * size * each < seconds - spent else sampler.rows
                if len(rows) < len(asked) and spent + size * each > seconds:
                    print(
                        f"sampling ends after {len(rows)} of {len(asked)} texts, since minutes= leaves no time for more"
                    )
                    break
    return rows


def by_length(lengths: Sequence[int], first: int = 0, window: int = WINDOW) -> list[int]:
    """Return the indices of prompts in the order in which they are sampled. lengths: tokens of each prompt. first: how
    many prompts at the beginning keep their order. window: how many are sorted at once.

    A batch takes as long as its longest prompt, so the longest prompts come first within each `window` prompts. The
    order does not depend on the batch size, so an interrupted run can be resumed with another one. Sampling with a time
    limit may end early, and a set of the longest prompts alone might miss some domains, hence `first`.
    """
    every = range(len(lengths))
    windows = (every[start : start + window] for start in range(first, len(lengths), window))
    return [*every[:first]] + [i for some in windows for i in sorted(some, key=lambda i: -lengths[i])]


def _whole_lines(partial: Path) -> list[dict[str, Any]]:
    """Return the rows in an interrupted run's file. An incomplete last line is removed from the file."""
    if not partial.exists():
        return []
    lines = [line for line in partial.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    write_atomic(partial, "".join(lines))
    return [json.loads(line) for line in lines]
