"""Prompts from data: rows that are whole prompts (`PromptRows`), and texts that begin with a prompt (`TextStarts`).

Prompts have the special tokens that the tokenizer adds, as on a server. They are never cut at the front.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import datasets
import torch
from transformers import PreTrainedTokenizerBase

from cotrain.data.splits import Prompt, shared

Row = dict[str, Any]  # with the keys of training_texts.FEATURES
BATCH = 1000  # texts that are tokenized at once
# the limit of the prompt length with rollout.prompt_tokens=0, see `prompt_tokens`
SHORTEST = 48  # tokens: the least limit, and the limit if there are no whole prompts
COVERED = 0.95  # share of the prompts that do not exceed the limit
LONGER = (
    "raise rollout.prompt_tokens= (for cotrain bench, bench.prompt_tokens=) or, if the context of the models is the "
    "limit, give shorter prompts or lower rollout.new_tokens= and bench.new_tokens="
)
STEP = 16  # the limit is a multiple of it


@dataclass(frozen=True)
class PromptRows:
    """Whole prompts, each with its completion if the data has one. rows have the keys of `training_texts.FEATURES`.

    Methods leave out prompts with more than `tokens` tokens. Such prompts are not cut, since the target would answer a
    cut prompt differently. rendered: whether the target's chat template rendered the prompts. remarks: lines for the
    user about how the data were read.
    """

    rows: list[Row]
    rendered: bool = False
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def left_out(self, tokens: int, split: str, key: str = "rollout.prompt_tokens") -> str:
        """Return a line that counts the prompts that are not used, because they are empty or have more than `tokens`
        tokens. Return "" if all are used. split: the name of their split. key: the setting whose value is `tokens`."""
        sizes = [len(row["prompt"]) for row in self.rows]
        long, empty = sum(size > tokens for size in sizes), sizes.count(0)
        reasons = [f"{long} are longer than {key}={tokens}"] * (long > 0)
        reasons += [f"{empty} are empty"] * (empty > 0)
        said = f"data.path: of {len(sizes)} prompts of the split {split}, {' and '.join(reasons)}; these are left out"
        return said if reasons else ""

    def prompts(self, count: int, tokens: int, seed: int) -> list[tuple[str, Prompt]]:
        """Return pairs (domain, token ids of a prompt): at most `count` per domain, chosen at random from the prompts
        with at most `tokens` tokens. seed: of this choice. Raises ValueError if a domain has no such prompt."""
        chosen = self.chosen(count, tokens, seed)
        present = {row["domain"] for row in chosen}
        for domain in sorted({row["domain"] for row in self.rows} - present):
            shortest = min(len(row["prompt"]) for row in self.rows if row["domain"] == domain)
            whose = f"the domain {domain}" if self.domains(tokens) else "it"
            raise ValueError(
                f"data.path: {whose} has no prompt of at most rollout.prompt_tokens={tokens} tokens, the "
                f"shortest has {shortest}: {LONGER}"
            )
        return [(row["domain"], row["prompt"]) for row in chosen]

    def covered(self, tokens: int) -> bool:
        """Return whether each domain has a prompt with at most `tokens` tokens."""
        return all(each[0] <= tokens for each in _lengths(self))

    def chosen(self, count: int, tokens: int, seed: int) -> list[Row]:
        """Return at most `count` rows per domain, chosen at random from the rows whose prompt is not empty and has at
        most `tokens` tokens. seed: of this choice."""
        fitting = self._fitting(tokens, seed)
        domains = sorted({row["domain"] for row in fitting})
        return [row for domain in domains for row in [one for one in fitting if one["domain"] == domain][:count]]

    def each(self, tokens: int) -> list[Prompt]:
        """Return the token ids of each row's prompt, in order. A prompt with more than `tokens` tokens becomes []."""
        return [row["prompt"] if len(row["prompt"]) <= tokens else [] for row in self.rows]

    def without(self, learnt: Sequence[Prompt], tokens: int) -> Self:
        """Return the rows whose prompt shares no prefix with a training prompt: neither is equal to the other or begins
        with it (`splits.shared`). A remark counts the rows left out.

        learnt: token ids of the training prompts. tokens: a prompt with more tokens is not compared, and its row stays.
        Raises ValueError if no row remains.
        """
        places, remarks = _apart(self.each(tokens), learnt, tokens)
        return replace(self, rows=[self.rows[place] for place in places], remarks=(*self.remarks, *remarks))

    def several(self, tokens: int, seed: int) -> list[Prompt]:
        """Return the token ids of all prompts with at most `tokens` tokens, in random order. seed: of the order. Raises
        ValueError if there is no such prompt."""
        fitting = self._fitting(tokens, seed)
        if not fitting:
            shortest = min(len(row["prompt"]) for row in self.rows)
            raise ValueError(
                f"data.path: it has no prompt of at most {tokens} tokens, the shortest has {shortest}: {LONGER}"
            )
        return [row["prompt"] for row in fitting]

    def domains(self, tokens: int) -> dict[tuple[int, ...], str]:
        """Return the domain of each prompt, keyed by the prompt's token ids; {} if all prompts have the same domain.
        tokens: prompts with more tokens are left out."""
        domains = {tuple(row["prompt"]): row["domain"] for row in self.rows}
        return domains if len({*domains.values()}) > 1 else {}

    def units(self, tokens: int) -> dict[tuple[int, ...], int]:
        """Return the number of each prompt's conversation, keyed by the prompt's token ids. Prompts of one conversation
        are not independent of each other. tokens: prompts with more tokens are left out."""
        return {tuple(row["prompt"]): row.get("unit", place) for place, row in enumerate(self.rows)}

    def _fitting(self, tokens: int, seed: int) -> list[Row]:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(seed)).tolist()
        return [self.rows[i] for i in order if 0 < len(self.rows[i]["prompt"]) <= tokens]


@dataclass(frozen=True)
class TextStarts:
    """Texts whose beginnings are prompts. A prompt is the first `tokens` tokens of a text, or all tokens of a shorter
    one; `tokens` is an argument of the methods.

    starts: rows (text, domain); each text begins with a prompt.
    texts: rows (text, domain) for corpus steps and datastores. These are the rows of `starts`, or the documents from
    which `starts` were cut.
    remarks: lines for the user about how the data were read.
    """

    starts: datasets.Dataset
    texts: datasets.Dataset
    tokenizer: PreTrainedTokenizerBase
    remarks: tuple[str, ...] = ()
    rendered = False

    def __len__(self) -> int:
        return len(self.starts)

    def covered(self, tokens: int) -> bool:
        """Return True, since texts are cut to any number of tokens."""
        return True

    def prompts(self, count: int, tokens: int, seed: int) -> list[tuple[str, Prompt]]:
        """Return pairs (domain, token ids of a prompt): at most `count` per domain, of texts chosen at random. tokens:
        the most tokens of a prompt. seed: of the choice."""
        generator, prompts = torch.Generator().manual_seed(seed), []
        domains: list[str] = list(self.starts["domain"])
        for domain in sorted(set(domains)):
            mine = [place for place, name in enumerate(domains) if name == domain]
            order = torch.randperm(len(mine), generator=generator)[:count].tolist()
            texts = self.starts[[mine[i] for i in order]]["text"]
            prompts += [(domain, ids[:tokens]) for ids in encoded(texts, self.tokenizer)]
        return prompts

    def each(self, tokens: int) -> list[Prompt]:
        """Return the token ids of each text's prompt, at most `tokens` of each, in the order of the texts."""
        return [ids[:tokens] for ids in encoded(self.starts["text"], self.tokenizer)]

    def without(self, learnt: Sequence[Prompt], tokens: int) -> Self:
        """Return the texts whose prompt shares no prefix with a training prompt: neither is equal to the other or
        begins with it (`splits.shared`). A remark counts the texts left out.

        learnt: token ids of the training prompts. tokens: the most tokens of a prompt. Raises ValueError if no text
        remains.
        """
        places, remarks = _apart(self.each(tokens), learnt, tokens)
        return replace(self, starts=self.starts.select(places), remarks=(*self.remarks, *remarks))

    def several(self, tokens: int, seed: int) -> list[Prompt]:
        """Return the token ids of all prompts, in random order. tokens: the most tokens of a prompt. seed: of the
        order."""
        order = torch.randperm(len(self.starts), generator=torch.Generator().manual_seed(seed)).tolist()
        return [ids[:tokens] for ids in encoded(self.starts[order]["text"], self.tokenizer)]

    def domains(self, tokens: int) -> dict[tuple[int, ...], str]:
        """Return the domain of each prompt, keyed by the prompt's token ids; {} if all prompts have the same domain.
        tokens: the most tokens of a prompt."""
        domains: list[str] = list(self.starts["domain"])
        return dict(zip(map(tuple, self.each(tokens)), domains, strict=True)) if len({*domains}) > 1 else {}

    def units(self, tokens: int) -> dict[tuple[int, ...], int]:
        """Return the number of each prompt's document, keyed by the prompt's token ids. Pieces of one document are not
        independent of each other. tokens: the most tokens of a prompt."""
        rows = self.starts
        documents = rows["document"] if "document" in rows.column_names else range(len(rows))
        return dict(zip(map(tuple, self.each(tokens)), documents, strict=True))


Source = PromptRows | TextStarts


def said_of_rows(sources: Mapping[str, Source], tokens: int, key: str = "rollout.prompt_tokens") -> list[str]:
    """Return lines for the user: how the data were read, and how many prompts of each split are left out.

    sources: keyed by split. tokens: the most tokens of a prompt. key: the setting whose value is `tokens`.
    """
    lines = [line for source in sources.values() for line in source.remarks]
    left_out = (
        source.left_out(tokens, split, key) for split, source in sources.items() if isinstance(source, PromptRows)
    )
    return [*dict.fromkeys(lines), *filter(None, left_out)]


def _apart(prompts: Sequence[Prompt], learnt: Sequence[Prompt], tokens: int) -> tuple[list[int], list[str]]:
    """Return the indices of the prompts that share no prefix with a training prompt (neither is equal to the other or
    begins with it), and a line for the user that counts the others; [] if there are none. prompts, learnt: token ids of
    each prompt and of each training prompt. tokens: the most tokens of a prompt, for the messages. Raises ValueError if
    no prompt is left."""
    both = {tuple(prompt) for prompt in shared([one for one in prompts if one], [one for one in learnt if one])}
    common = [tuple(prompt) in both for prompt in prompts]
    if all(common):
        raise ValueError(
            f"data.path: all {len(common)} held-out prompts begin like training prompts (their first {tokens} tokens "
            "are compared): give more texts, or raise rollout.prompt_tokens= (for cotrain bench, bench.prompt_tokens=)"
        )
    remark = (
        f"data.path: {sum(common)} of {len(common)} held-out prompts are left out, because they begin like training "
        f"prompts (their first {tokens} tokens are compared)"
    )
    return [place for place, alike in enumerate(common) if not alike], [remark] * any(common)


def encoded(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yield the token ids of each text, with the special tokens that the tokenizer adds."""
    for first in range(0, len(texts), BATCH):
        yield from tokenizer(list(texts[first : first + BATCH]), verbose=False)["input_ids"]


def start_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token id that separates texts: the tokenizer's start token if it writes one, otherwise its end token.
    Raises ValueError if the tokenizer has neither."""
    first = next(iter(tokenizer("a")["input_ids"]), None)
    start = first if first == tokenizer.bos_token_id else tokenizer.eos_token_id
    if start is None:
        raise ValueError(
            "target.path: its tokenizer has no start or end token for texts: set eos_token in tokenizer_config.json"
        )
    return int(start)


def prompt_rows(texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> PromptRows:
    """Return each text as a whole prompt, tokenized, without a completion. texts: rows (text, domain)."""
    ids = encoded(texts["text"], tokenizer)
    rows = [
        {"domain": domain, "prompt": one, "completion": []} for domain, one in zip(texts["domain"], ids, strict=True)
    ]
    return PromptRows(rows)


def _lengths(prompts: PromptRows) -> list[list[int]]:
    """Return one list per domain: the lengths of its prompts in tokens, ascending, without empty prompts."""
    lengths: dict[str, list[int]] = {}
    for row in prompts.rows:
        if row["prompt"]:
            lengths.setdefault(row["domain"], []).append(len(row["prompt"]))
    return [sorted(each) for each in lengths.values()]


def prompt_tokens(train: Source | None, room: int, others: Iterable[Source] = ()) -> int:
    """Return the most tokens of a prompt that rollout.prompt_tokens=0 stands for.

    train: the training prompts, or None for the embedded corpora. If they are not whole prompts, the result is
    `SHORTEST`. Otherwise it is the lowest multiple of `STEP` that admits the share `COVERED` of each domain's training
    prompts, and at least one prompt of each domain in `others`. It is then at least `SHORTEST`, and at most `room`.
    room: how many tokens of the context are left for prompts.
    others: the prompts of the splits to measure on.
    """
    if not isinstance(train, PromptRows):
        return SHORTEST
    covering = [each[min(int(COVERED * len(each)), len(each) - 1)] for each in _lengths(train)]
    covering += [each[0] for other in others if isinstance(other, PromptRows) for each in _lengths(other)]
    longest = max(covering, default=SHORTEST)
    return max(min(max(-(-longest // STEP) * STEP, SHORTEST), room), 1)
