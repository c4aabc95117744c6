"""The index of an n-gram draft: equal to a search of the text, and it reads new tokens alone."""

from typing import Any

import pytest
import torch

from inference.proposers.retrieval import NGramIndex


def slow_look_up(text: list[int], k: int, max_n: int) -> list[int]:
    """The definition: the latest earlier occurrence of the longest suffix of at most max_n tokens."""
    for n in range(min(max_n, len(text) - 1), 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + k]
    return []


@pytest.mark.parametrize("max_n", [1, 2, 3, 5])
def test_a_growing_index_gives_what_a_search_gives(max_n: int) -> None:
    generator = torch.Generator().manual_seed(max_n)
    for alphabet in (2, 3, 9):
        text = [0]
        seen = NGramIndex(text, max_n)
        while len(text) < 120:
            text += torch.randint(
                alphabet, (int(torch.randint(1, 6, (), generator=generator)),), generator=generator
            ).tolist()
            assert seen.look_up(4) == slow_look_up(text, 4, max_n) == NGramIndex(text, max_n).look_up(4)


def test_rounds_only_index_what_is_new() -> None:
    """Of a long text a round reads the new tokens, not the whole."""

    class Counting(list):  # type: ignore[type-arg]
        read = 0

        def __getitem__(self, at: Any) -> Any:
            item = super().__getitem__(at)
            Counting.read += len(item) if isinstance(at, slice) else 1
            return item

    text = Counting(range(3000))
    seen = NGramIndex(text, 3)
    seen.look_up(4)
    Counting.read = 0
    text += [1, 2, 3]
    assert seen.look_up(4) == [4, 5, 6, 7] and Counting.read < 50
