"""Prompts as a server gets them: whole, from their start, with the special tokens that the tokenizer writes.

Two kinds of sources hold them: rows that are prompts, and texts whose starts are prompts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]  # of training_texts.FEATURES
BATCH = 1000  # texts that are tokenized at once
# which prompts are used with rollout.prompt_tokens=0, as `prompt_tokens` says
SHORTEST = 48  # tokens: of starts of texts, and at least
COVERED = 0.95  # of the prompts
STEP = 16


@dataclass(frozen=True)
class PromptRows:
    """Prompts, each with the completion of the logs if they hold one: rows of `training_texts.FEATURES`. Prompts longer
    than asked for are left out: a prompt that was cut is another prompt."""

    rows: list[Row]

    def left_out(self, tokens: int, split: str, key: str = "rollout.prompt_tokens") -> str:
        """A line that says how many prompts have more ids than the setting `key` allows, or none, and are not used;
        nothing where all are."""
        sizes = [len(row["prompt"]) for row in self.rows]
        long, empty = sum(size > tokens for size in sizes), sizes.count(0)
        reasons = [f"{long} are longer than {key}={tokens}"] * (long > 0)
        reasons += [f"{empty} are empty"] * (empty > 0)
        said = f"data.path: of {len(sizes)} prompts of the split {split}, {' and '.join(reasons)}: left out\n"
        return said if reasons else ""

    def prompts(self, count: int, tokens: int, seed: int) -> list[tuple[str, list[int]]]:
        """(domain, prompt ids) of at most `count` rows of each domain, as `chosen`. Raises ValueError for a domain
        without a prompt of at most `tokens` ids."""
        chosen = self.chosen(count, tokens, seed)
        present = {row["domain"] for row in chosen}
        for domain in sorted({row["domain"] for row in self.rows} - present):
            shortest = min(len(row["prompt"]) for row in self.rows if row["domain"] == domain)
            raise ValueError(f"data.path: {domain} has no prompt of at most rollout.prompt_tokens={tokens}, the "
                             f"shortest has {shortest}: raise rollout.prompt_tokens")  # fmt: skip
        return [(row["domain"], row["prompt"]) for row in chosen]

    def chosen(self, count: int, tokens: int, seed: int) -> list[Row]:
        """At most `count` rows of each domain, chosen by seed among those with at most `tokens` ids of prompt."""
        fitting = self._fitting(tokens, seed)
        domains = sorted({row["domain"] for row in fitting})
        return [row for domain in domains for row in [one for one in fitting if one["domain"] == domain][:count]]

    def several(self, tokens: int, seed: int) -> list[list[int]]:
        """Every prompt of at most `tokens` ids, in an order of the seed. Raises ValueError without any."""
        fitting = self._fitting(tokens, seed)
        if not fitting:
            shortest = min(len(row["prompt"]) for row in self.rows)
            raise ValueError(f"data.path: no prompt of at most {tokens} tokens, the shortest has {shortest}: raise "
                             "rollout.prompt_tokens (of cotrain bench, bench.prompt_tokens)")  # fmt: skip
        return [row["prompt"] for row in fitting]

    def _fitting(self, tokens: int, seed: int) -> list[Row]:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(seed)).tolist()
        return [self.rows[i] for i in order if 0 < len(self.rows[i]["prompt"]) <= tokens]


@dataclass(frozen=True)
class TextStarts:
    """Texts: each is a prompt, from its start; of one longer than asked for, as many ids as asked for are the prompt,
    and the target writes on. starts: rows (text, domain); texts: the same rows, or those that the starts are parts of,
    for steps that learn from the texts themselves."""

    starts: datasets.Dataset
    texts: datasets.Dataset
    tokenizer: PreTrainedTokenizerBase

    def left_out(self, tokens: int, split: str, key: str = "rollout.prompt_tokens") -> str:
        """Nothing: a longer text is begun."""
        return ""

    def prompts(self, count: int, tokens: int, seed: int) -> list[tuple[str, list[int]]]:
        """(domain, prompt ids) of at most `count` texts of each domain, by seed."""
        generator, prompts = torch.Generator().manual_seed(seed), []
        domains: list[str] = list(self.starts["domain"])
        for domain in sorted(set(domains)):
            mine = [place for place, name in enumerate(domains) if name == domain]
            order = torch.randperm(len(mine), generator=generator)[:count].tolist()
            texts = self.starts[[mine[i] for i in order]]["text"]
            prompts += [(domain, ids[:tokens]) for ids in encoded(texts, self.tokenizer)]
        return prompts

    def several(self, tokens: int, seed: int) -> list[list[int]]:
        """The start of every text, in an order of the seed."""
        order = torch.randperm(len(self.starts), generator=torch.Generator().manual_seed(seed)).tolist()
        return [ids[:tokens] for ids in encoded(self.starts[order]["text"], self.tokenizer)]


def encoded(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Ids of each text as a server sees it: with the tokenizer's own special tokens."""
    for first in range(0, len(texts), BATCH):
        yield from tokenizer(list(texts[first : first + BATCH]), verbose=False)["input_ids"]


def prompt_rows(texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> PromptRows:
    """Rows (text, domain); each is one whole prompt and is used unchanged."""
    ids = encoded(texts["text"], tokenizer)
    rows = [
        {"domain": domain, "prompt": one, "completion": []} for domain, one in zip(texts["domain"], ids, strict=True)
    ]
    return PromptRows(rows)


def prompt_tokens(train: PromptRows | TextStarts | None, room: int) -> int:
    """Tokens of the longest prompt that is used: `COVERED` of the prompts to learn from are no longer, as far as `room`
    tokens before the new ones allow. Texts without prompts (and none, which stands for the embedded corpora) begin with
    `SHORTEST`."""
    if not isinstance(train, PromptRows):
        return SHORTEST
    lengths = sorted(len(row["prompt"]) for row in train.rows if row["prompt"])
    if not lengths:
        return SHORTEST
    covering = lengths[min(int(COVERED * len(lengths)), len(lengths) - 1)]
    return max(min(max(-(-covering // STEP) * STEP, SHORTEST), room), 1)
