"""Three disjoint sets of prompts: for training, for ranking (checkpoints, draft lengths), and for timing the exported
draft.

A draft that was chosen on some prompts looks better on these than on others, so no prompt is in two sets.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SPLITS = ("train", "held_out", "final")  # for training, ranking, and timing the exported draft
ALL_ROWS = "all"  # instead of a split: all rows of a data set
PERCENT = {"held_out": 5, "final": 5}
LEAST, PART = 4, 5  # of a small data set, held_out and final have so many rows each, or the PART-th part of all

Prompt = list[int]


def split_of(content: str) -> str:
    """Return the split of a row of the user's data: "train", "held_out" or "final". A hash of `content`, the row's
    text, decides it, so equal rows are in the same split."""
    place = text_hash(content) % 100
    for name, percent in PERCENT.items():
        if place < percent:
            return name
        place -= percent
    return "train"


def text_hash(text: str) -> int:
    """Return a number of 64 bits that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def splits_of(contents: Sequence[str]) -> list[str]:
    """Return the split of each row of a data set: "train", "held_out" or "final". contents: one text per row.

    A hash of the text decides the split (`split_of`). If held_out or final would then have too few different rows, that
    split also gets the training rows with the lowest hashes or, if none is left, rows of the other split. Too few is
    less than `LEAST`, or in a small data set less than one row in `PART`.
    """
    split = {content: split_of(content) for content in contents}
    least = min(LEAST, len(split) // PART)
    for name in PERCENT:
        for _ in range(least - list(split.values()).count(name)):
            others = [one for one in split if split[one] == "train"] or [one for one in split if split[one] != name]
            split[min(others, key=text_hash)] = name
    return [split[content] for content in contents]


def in_split(contents: Sequence[str], split: str) -> list[int]:
    """Return the indices (0-based) of the rows in `split`, as `splits_of` assigns them; of all rows if `split` is
    `ALL_ROWS`. contents: one text per row."""
    return [row for row, own in enumerate(splits_of(contents)) if split in (own, ALL_ROWS)]


def shared(prompts: Sequence[Prompt], others: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts, in order, that share a prefix with a prompt in `others`: one of the two is equal to the
    other, or begins with it. A prompt is a list of token ids."""
    ordered = sorted(others)
    whole, sizes = {tuple(other) for other in others}, sorted({len(other) for other in others})

    def begins_one(prompt: Prompt) -> bool:
        at = bisect_left(ordered, prompt)
        return at < len(ordered) and ordered[at][: len(prompt)] == prompt

    return [
        prompt
        for prompt in prompts
        if begins_one(prompt) or any(tuple(prompt[:size]) in whole for size in sizes if size <= len(prompt))
    ]


def without(prompts: Sequence[Prompt], others: Sequence[Prompt]) -> list[Prompt]:
    """Return the distinct prompts, in order, that share no prefix with a prompt in `others`: neither is equal to the
    other, or begins with it."""
    common = {tuple(prompt) for prompt in shared(prompts, others)}
    return [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts)) if prompt not in common]


@dataclass(frozen=True)
class Prompts:
    """Prompts to measure on, as token ids. Raises ValueError if `ranking` or `final` is empty, or if a prompt of one is
    equal to a prompt of the other or begins with it.

    Args:
        ranking: prompts used to rank checkpoints and draft lengths.
        final: prompts on which the exported draft is timed and checked.
        source: "own" (the user's data) or "shipped".
        domains: the domain of each prompt, keyed by its token ids; {} if all prompts have the same domain.
    """

    ranking: Sequence[Prompt]
    final: Sequence[Prompt]
    source: str
    domains: Mapping[tuple[int, ...], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, prompts in (("rank checkpoints", self.ranking), ("time the exported draft", self.final)):
            if not prompts:
                raise ValueError(
                    f"data.path: no prompt is left to {name}, since all are also prompts of another split: give more "
                    "texts, or raise rollout.prompt_tokens= (for cotrain bench, bench.prompt_tokens=)"
                )
        refuse_shared(self.final, self.ranking, "rank checkpoints")


def refuse_shared(final: Sequence[Prompt], others: Sequence[Prompt], used: str) -> None:
    """Raise ValueError if a final prompt is equal to one of `others`, begins with it, or is a prefix of it. used: what
    `others` were used for, for the message, such as "rank checkpoints"."""
    common = shared(final, others)
    if common:
        raise ValueError(
            f"data.path: {len(common)} of {len(final)} prompts that time the exported draft also {used}, "
            f"the first {common[0][:8]}...: remove them from one of the two"
        )


def apart(ranking: Sequence[Prompt], final: Sequence[Prompt], learnt: Sequence[Prompt], source: str) -> Prompts:
    """Return the prompts to measure on, made disjoint: texts of different splits may begin with the same prompt.

    A final prompt is dropped if it shares a prefix with a ranking or training prompt. A ranking prompt from the user's
    data is dropped if it shares a prefix with a training prompt. learnt: the training prompts. source: "own" (the
    user's data) or "shipped". Raises ValueError if no ranking or no final prompt remains.
    """
    ranking = without(ranking, learnt) if source == "own" else ranking
    prompts = Prompts(ranking, without(final, [*ranking, *learnt]), source)
    refuse_shared(prompts.final, learnt, "were learnt from")
    return prompts
