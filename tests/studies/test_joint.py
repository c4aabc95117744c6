"""The score of a target at a task, in the study of joint training."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import one_hot
from transformers import AutoTokenizer

from inference.drafts.bundled_target import NAME, resolve
from studies.joint import exact_lines

TEXT = '{\n  "city": "Paris",\n  "total": 12.5\n}\nunfinished'


@pytest.mark.parametrize(
    ("wrong", "right"), [([], 3), (["city"], 2), (["city", "Paris"], 2), (["12"], 2), (["unf"], 3)]
)
def test_a_line_is_exact_if_all_its_tokens_are_the_likeliest(wrong: list[str], right: int) -> None:
    """The first line and the unfinished one do not count."""
    tokenizer = AutoTokenizer.from_pretrained(resolve(NAME))

    def model(input_ids: Any) -> Any:
        """A target that knows the text, but for the tokens at the first places of `wrong`."""
        ids = input_ids[0].tolist()
        starts = [start for start, _ in tokenizer(TEXT, return_offsets_mapping=True)["offset_mapping"]]
        places = {max(i for i, start in enumerate(starts) if start <= TEXT.index(part)) for part in wrong}
        guesses = [ids[i] + (i in places) for i in range(1, len(ids))] + [0]
        return SimpleNamespace(logits=one_hot(torch.tensor([guesses]), len(tokenizer) + 1).float())

    assert exact_lines(model, tokenizer, TEXT) == (right, 3)  # type: ignore[arg-type]
