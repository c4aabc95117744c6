"""How long prompts are where the settings leave it open: as the data call for, as far as the target holds."""

import datasets
import pytest

from cotrain.data.prompt_rows import PromptRows, TextStarts, prompt_tokens
from tests.folders import tokenizer


def rows(*lengths: int) -> PromptRows:
    return PromptRows([{"domain": "a", "prompt": [2] * length, "completion": []} for length in lengths])


@pytest.mark.parametrize(
    ("lengths", "room", "wanted"),
    [
        ([3] * 20, 1000, 48),  # short ones need no less than what texts are cut to
        ([100] * 95 + [700] * 5, 1000, 704),
        ([100] * 96 + [700] * 4, 1000, 112),  # a few long ones are left out
        ([500] * 20, 300, 300),  # as far as the target holds
        ([0, 0, 60], 1000, 64),  # empty ones do not count
        ([0], 1000, 48),
    ],
)
def test_most_prompts_are_used(lengths: list[int], room: int, wanted: int) -> None:
    assert prompt_tokens(rows(*lengths), room) == wanted


def test_texts_are_begun() -> None:
    texts = datasets.Dataset.from_dict({"text": ["abc" * 500], "domain": ["a"]})
    assert prompt_tokens(TextStarts(texts, texts, tokenizer()), 1000) == prompt_tokens(None, 1000) == 48
