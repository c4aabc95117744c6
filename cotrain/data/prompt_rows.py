"""Sources of prompts: rows that are whole prompts (`PromptRows`), and texts that begin with a prompt (`TextStarts`).

Prompts have the special tokens that the tokenizer adds, as on a server, and are never cut at the front.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import datasets
import torch
from transformers import PreTrainedTokenizerBase

from cotrain.data.splits import shared

Row = dict[str, Any]  # with the keys of training_texts.FEATURES
BATCH = 1000  # texts that are tokenized at once
# the limit of the prompt length with rollout.prompt_tokens=0, see `prompt_tokens`
SHORTEST = 48  # tokens: the least limit, and the limit if there are no whole prompts
COVERED = 0.95  # share of the prompts that do not exceed the limit
LONGER = (
    "raise rollout.prompt_tokens (for cotrain bench, bench.prompt_tokens) or, where the context of the models is the "
    "limit, give shorter prompts or lower rollout.new_tokens and bench.new_tokens"
)
STEP = 16  # the limit is a multiple of it


@dataclass(frozen=True)
class PromptRows:
    """Whole prompts, each with its completion if the data has one; rows have the keys of `training_texts.FEATURES`.

    Methods leave out prompts longer than a limit in tokens. They are not cut, since the target would answer a cut
    prompt differently. rendered: whether the target's chat template rendered them. remarks: lines about how the data
    were read."""

    rows: list[Row]
    rendered: bool = False
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def left_out(self, tokens: int, split: str, key: str = "rollout.prompt_tokens") -> str:
        """A line that says how many prompts are not used because they are empty or have more than `tokens` ids, the
        value of the setting `key`. Empty if all are used."""
        sizes = [len(row["prompt"]) for row in self.rows]
        long, empty = sum(size > tokens for size in sizes), sizes.count(0)
        reasons = [f"{long} are longer than {key}={tokens}"] * (long > 0)
        reasons += [f"{empty} are empty"] * (empty > 0)
        said = f"data.path: of {len(sizes)} prompts of the split {split}, {' and '.join(reasons)}: left out"
        return said if reasons else ""

    def prompts(self, count: int, tokens: int, seed: int) -> list[tuple[str, list[int]]]:
        """Return (domain, prompt ids) of the rows that `chosen` returns. Raises ValueError if a domain has no prompt of
        at most `tokens` ids."""
        chosen = self.chosen(count, tokens, seed)
        present = {row["domain"] for row in chosen}
        for domain in sorted({row["domain"] for row in self.rows} - present):
            shortest = min(len(row["prompt"]) for row in self.rows if row["domain"] == domain)
            whose = f"the domain {domain}" if self.domains(tokens) else "it"
            raise ValueError(
                f"data.path: {whose} has no prompt of at most rollout.prompt_tokens={tokens}, the "
                f"shortest has {shortest}: {LONGER}"
            )
        return [(row["domain"], row["prompt"]) for row in chosen]

    def covered(self, tokens: int) -> bool:
        """Whether each domain has a prompt of at most `tokens` ids."""
        return all(each[0] <= tokens for each in _lengths(self))

    def chosen(self, count: int, tokens: int, seed: int) -> list[Row]:
        """At most `count` rows per domain, a random choice of those whose prompt has at most `tokens` ids."""
        fitting = self._fitting(tokens, seed)
        domains = sorted({row["domain"] for row in fitting})
        return [row for domain in domains for row in [one for one in fitting if one["domain"] == domain][:count]]

    def each(self, tokens: int) -> list[list[int]]:
        """The prompt of each row, in order; empty for a row whose prompt is not used."""
        return [row["prompt"] if len(row["prompt"]) <= tokens else [] for row in self.rows]

    def without(self, learnt: Sequence[list[int]], tokens: int) -> Self:
        """The rows whose prompt is not `splits.shared` with those that are learnt."""
        common = _common(self.each(tokens), learnt, tokens)
        rest = [row for row, shared in zip(self.rows, common, strict=True) if not shared]
        return replace(self, rows=rest, remarks=(*self.remarks, *_apart(common, tokens)))

    def several(self, tokens: int, seed: int) -> list[list[int]]:
        """All prompts of at most `tokens` ids, in random order. Raises ValueError if there are none."""
        fitting = self._fitting(tokens, seed)
        if not fitting:
            shortest = min(len(row["prompt"]) for row in self.rows)
            raise ValueError(f"data.path: no prompt of at most {tokens} tokens, the shortest has {shortest}: {LONGER}")
        return [row["prompt"] for row in fitting]

    def domains(self, tokens: int) -> dict[tuple[int, ...], str]:
        """The domain of each prompt by its ids; empty if there is only one."""
        domains = {tuple(row["prompt"]): row["domain"] for row in self.rows}
        return domains if len({*domains.values()}) > 1 else {}

    def units(self, tokens: int) -> dict[tuple[int, ...], int]:
        """The conversation of each prompt by its ids, as a number: turns of one are not independent."""
        return {tuple(row["prompt"]): row.get("unit", place) for place, row in enumerate(self.rows)}

    def _fitting(self, tokens: int, seed: int) -> list[Row]:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(seed)).tolist()
        return [self.rows[i] for i in order if 0 < len(self.rows[i]["prompt"]) <= tokens]


@dataclass(frozen=True)
class TextStarts:
    """Texts whose beginnings are prompts: the first `tokens` ids of a text, or all ids of a shorter one.

    starts: rows (text, domain) that prompts are the beginnings of. texts: rows (text, domain) for corpus steps and
    datastores; the same rows, or the documents that `starts` are pieces of."""

    starts: datasets.Dataset
    texts: datasets.Dataset
    tokenizer: PreTrainedTokenizerBase
    remarks: tuple[str, ...] = ()
    rendered = False

    def __len__(self) -> int:
        return len(self.starts)

    def left_out(self, tokens: int, split: str, key: str = "rollout.prompt_tokens") -> str:
        """Empty: long texts are used too, see `PromptRows.left_out`."""
        return ""

    def covered(self, tokens: int) -> bool:
        """True: texts are cut to any length."""
        return True

    def prompts(self, count: int, tokens: int, seed: int) -> list[tuple[str, list[int]]]:
        """Return (domain, prompt ids) of at most `count` random texts per domain."""
        generator, prompts = torch.Generator().manual_seed(seed), []
        domains: list[str] = list(self.starts["domain"])
        for domain in sorted(set(domains)):
            mine = [place for place, name in enumerate(domains) if name == domain]
            order = torch.randperm(len(mine), generator=generator)[:count].tolist()
            texts = self.starts[[mine[i] for i in order]]["text"]
            prompts += [(domain, ids[:tokens]) for ids in encoded(texts, self.tokenizer)]
        return prompts

    def each(self, tokens: int) -> list[list[int]]:
        """The prompt of each text, in order."""
        return [ids[:tokens] for ids in encoded(self.starts["text"], self.tokenizer)]

    def without(self, learnt: Sequence[list[int]], tokens: int) -> Self:
        """The same without texts whose prompt is `splits.shared` with those that are learnt."""
        common = _common(self.each(tokens), learnt, tokens)
        rest = self.starts.select([place for place, shared in enumerate(common) if not shared])
        return replace(self, starts=rest, remarks=(*self.remarks, *_apart(common, tokens)))

    def several(self, tokens: int, seed: int) -> list[list[int]]:
        """The prompts of all texts, in random order."""
        order = torch.randperm(len(self.starts), generator=torch.Generator().manual_seed(seed)).tolist()
        return [ids[:tokens] for ids in encoded(self.starts[order]["text"], self.tokenizer)]

    def domains(self, tokens: int) -> dict[tuple[int, ...], str]:
        """The domain of each prompt by its ids; empty if there is only one."""
        domains: list[str] = list(self.starts["domain"])
        return dict(zip(map(tuple, self.each(tokens)), domains, strict=True)) if len({*domains}) > 1 else {}

    def units(self, tokens: int) -> dict[tuple[int, ...], int]:
        """The document of each prompt by its ids, as a number: pieces of one are not independent."""
        rows = self.starts
        documents = rows["document"] if "document" in rows.column_names else range(len(rows))
        return dict(zip(map(tuple, self.each(tokens)), documents, strict=True))


Source = PromptRows | TextStarts


def said(sources: Mapping[str, Source], tokens: int, key: str = "rollout.prompt_tokens") -> list[str]:
    """Lines about how the data of splits were read, and what is left out of each."""
    lines = [line for source in sources.values() for line in source.remarks]
    left_out = (source.left_out(tokens, split, key) for split, source in sources.items())
    return [*dict.fromkeys(lines), *filter(None, left_out)]


def _common(prompts: Sequence[list[int]], learnt: Sequence[list[int]], tokens: int) -> list[bool]:
    """Whether each prompt is shared with those that are learnt. Raises ValueError if all are."""
    both = {tuple(prompt) for prompt in shared([one for one in prompts if one], [one for one in learnt if one])}
    common = [tuple(prompt) in both for prompt in prompts]
    if all(common):
        raise ValueError(
            f"data.path: all {len(common)} held-out prompts begin like ones that are learnt, of which "
            f"the model sees at most {tokens} tokens: give more texts, or raise rollout.prompt_tokens "
            "(for cotrain bench, bench.prompt_tokens)"
        )
    return common


def _apart(common: Sequence[bool], tokens: int) -> list[str]:
    return [
        f"data.path: {sum(common)} of {len(common)} held-out prompts begin like ones that are learnt, of which the "
        f"model sees at most {tokens} tokens: left out"
    ] * any(common)


def encoded(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yield the ids of each text with the special tokens that the tokenizer adds, as on a server."""
    for first in range(0, len(texts), BATCH):
        yield from tokenizer(list(texts[first : first + BATCH]), verbose=False)["input_ids"]


def start_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that a text starts with: the tokenizer's start token if it writes one, else its end token. Raises
    ValueError if it has neither."""
    first = next(iter(tokenizer("a")["input_ids"]), None)
    start = first if first == tokenizer.bos_token_id else tokenizer.eos_token_id
    if start is None:
        raise ValueError("target.path: its tokenizer has no start token and no end token, which separate texts")
    return int(start)


def prompt_rows(texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> PromptRows:
    """Tokenize rows (text, domain) that are whole prompts."""
    ids = encoded(texts["text"], tokenizer)
    rows = [
        {"domain": domain, "prompt": one, "completion": []} for domain, one in zip(texts["domain"], ids, strict=True)
    ]
    return PromptRows(rows)


def _lengths(prompts: PromptRows) -> list[list[int]]:
    """The lengths of the prompts of each domain, in ascending order; empty prompts are left out."""
    lengths: dict[str, list[int]] = {}
    for row in prompts.rows:
        if row["prompt"]:
            lengths.setdefault(row["domain"], []).append(len(row["prompt"]))
    return [sorted(each) for each in lengths.values()]


def prompt_tokens(train: Source | None, room: int, others: Iterable[Source] = ()) -> int:
    """The limit of the prompt length, in tokens, that rollout.prompt_tokens=0 stands for.

    For whole prompts, the share `COVERED` of the training prompts of each domain does not exceed it; it is at least
    `SHORTEST`, and at most `room`, the tokens that the context has before the new ones. Each domain of the `others`,
    the splits to measure on, has a prompt that does not exceed it either. Otherwise it is `SHORTEST`. None: the
    embedded corpora."""
    if not isinstance(train, PromptRows):
        return SHORTEST
    covering = [each[min(int(COVERED * len(each)), len(each) - 1)] for each in _lengths(train)]
    covering += [each[0] for other in others if isinstance(other, PromptRows) for each in _lengths(other)]
    longest = max(covering, default=SHORTEST)
    return max(min(max(-(-longest // STEP) * STEP, SHORTEST), room), 1)
