"""Three disjoint sets of prompts: those learnt from, those that rank (checkpoints, draft lengths), and those that time
what is exported. What was chosen by some prompts looks better on them than on others, so no prompt is in two sets.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

SPLITS = ("train", "held_out", "final")  # learnt from; rank; time the exported draft
PERCENT = {"held_out": 5, "final": 5}

Prompt = list[int]


def split_of(content: str) -> str:
    """The split of a row of own data by a hash of what it says, so that a row that comes twice is in one split."""
    place = int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "big") % 100
    for name, percent in PERCENT.items():
        if place < percent:
            return name
        place -= percent
    return "train"


def shared(prompts: Sequence[Prompt], others: Sequence[Prompt]) -> list[Prompt]:
    """Those of `prompts` that are among the others, begin one of them, or begin with one: which index or file a prompt
    came from does not matter."""
    ordered = sorted(others)
    whole, sizes = {tuple(other) for other in others}, sorted({len(other) for other in others})

    def begins_one(prompt: Prompt) -> bool:
        at = bisect_left(ordered, prompt)
        return at < len(ordered) and ordered[at][: len(prompt)] == prompt

    def starts_with_one(prompt: Prompt) -> bool:
        return any(tuple(prompt[:size]) in whole for size in sizes if size <= len(prompt))

    return [prompt for prompt in prompts if begins_one(prompt) or starts_with_one(prompt)]


def without(prompts: Sequence[Prompt], others: Sequence[Prompt]) -> list[Prompt]:
    """`prompts`, each once, in their order, without those that share content with the others."""
    common = {tuple(prompt) for prompt in shared(prompts, others)}
    return [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts)) if prompt not in common]


@dataclass(frozen=True)
class Prompts:
    """ranking: of checkpoints and draft lengths; final: what times and checks the exported draft; source: "own" or
    "shipped". Raises ValueError when the two share content, or one is empty."""

    ranking: Sequence[Prompt]
    final: Sequence[Prompt]
    source: str

    def __post_init__(self) -> None:
        for name, prompts in (("rank checkpoints", self.ranking), ("time the exported draft", self.final)):
            if not prompts:
                raise ValueError(
                    f"data.path: no prompts are left to {name} that are in no other split: give more texts, "
                    "or raise rollout.prompt_tokens= (of cotrain bench, bench.prompt_tokens=)"
                )
        refuse_shared(self.final, self.ranking, "rank checkpoints")


def refuse_shared(final: Sequence[Prompt], others: Sequence[Prompt], used: str) -> None:
    """Raise ValueError for a prompt that would time the exported draft and was used otherwise."""
    common = shared(final, others)
    if common:
        raise ValueError(f"data.path: {len(common)} of {len(final)} prompts that time the exported draft also {used}, "
                         f"the first {common[0][:8]}...: the splits must be disjoint")  # fmt: skip


def apart(ranking: Sequence[Prompt], final: Sequence[Prompt], learnt: Sequence[Prompt], source: str) -> Prompts:
    """Prompts of a run: final ones that rank, or are learnt from, are left out, and own ones that rank and are learnt
    from (texts that begin alike are one prompt once they are cut). Raises as `Prompts`."""
    ranking = without(ranking, learnt) if source == "own" else ranking
    prompts = Prompts(ranking, without(final, [*ranking, *learnt]), source)
    refuse_shared(prompts.final, learnt, "were learnt from")
    return prompts
