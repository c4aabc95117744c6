"""The score of a target at a task, in the study of joint training."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import one_hot
from transformers import AutoTokenizer

from inference.drafts.bundled_target import NAME, resolve
from studies.joint import scored

TEXT = '{\n  "city": "Paris",\n  "total": 12.5\n}\nunfinished'
BLANK = "def f():\n    return 1\n\n\ndef g():\n    pass\n"


def places_of(tokenizer: Any, parts: list[str]) -> set[int]:
    """The tokens of TEXT at which parts of it begin."""
    starts = [start for start, _ in tokenizer(TEXT, return_offsets_mapping=True)["offset_mapping"]]
    return {max(i for i, start in enumerate(starts) if start <= TEXT.index(part)) for part in parts}


@pytest.mark.parametrize(
    ("wrong", "right"), [([], 3), (["city"], 2), (["city", "Paris"], 2), (["12"], 2), (["unf"], 3)]
)
def test_a_line_is_exact_if_all_its_tokens_are_the_likeliest(wrong: list[str], right: int) -> None:
    """The first line and the unfinished one do not count."""
    tokenizer = AutoTokenizer.from_pretrained(resolve(NAME))

    def model(input_ids: Any) -> Any:
        """A target that knows the text, but for the tokens at the first places of `wrong`."""
        ids, places = input_ids[0].tolist(), places_of(tokenizer, wrong)
        guesses = [ids[i] + (i in places) for i in range(1, len(ids))] + [0]
        return SimpleNamespace(logits=one_hot(torch.tensor([guesses]), len(tokenizer) + 1).float())

    exact, whole, nats = scored(model, tokenizer, TEXT)  # type: ignore[arg-type]
    assert (exact, whole) == (right, 3)
    ids = tokenizer(TEXT)["input_ids"]
    likeliest = (len(tokenizer) + torch.e) / torch.e  # of logits 1 and many 0: p = 1 / it, and 1 / (e it) of others
    mistakes = len(places_of(tokenizer, wrong) - {0})
    assert nats == pytest.approx((len(ids) - 1) * math.log(likeliest) + mistakes, rel=1e-5)


def test_a_token_over_several_lines_counts_in_each() -> None:
    """Blank lines, and indents, whose tokens begin with the end of the line before."""
    tokenizer = AutoTokenizer.from_pretrained(resolve(NAME))
    ids = tokenizer(BLANK)["input_ids"]

    def model(input_ids: Any) -> Any:
        return SimpleNamespace(logits=one_hot(torch.tensor([[len(tokenizer)] * len(ids)]), len(tokenizer) + 1).float())

    assert scored(model, tokenizer, BLANK)[:2] == (0, 5)  # type: ignore[arg-type]
