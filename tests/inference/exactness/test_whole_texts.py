"""Logits of whole texts by transformers' own forward are the same however many positions are held at once."""

import pytest
import torch

from inference import Sampling
from inference.exactness import teacher_forced
from tests.tiny import tiny

PROMPTS, TEXTS = [[1, 2, 3], [4]], [[5, 6, 5, 7, 5, 6, 8], [9, 9, 3, 9]]
SETTINGS = {
    "plain": Sampling(1.0),
    "repetition": Sampling(1.0, repetition_penalty=1.7),
    "presence": Sampling(1.0, presence_penalty=1.1),
    "frequency": Sampling(1.0, frequency_penalty=0.8),
    "banned": Sampling(1.0, banned=((5, 6), (9,))),
    "first tokens": Sampling(1.0, min_new_tokens=3, stop_ids=(2,)),
    "biased": Sampling(1.0, logit_bias={3: 1.5}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_blocks_of_any_length_give_the_same_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    by_length = []
    for length in (100, 3, 2, 1):
        monkeypatch.setattr(teacher_forced, "CELLS", length * 32)
        blocks = list(teacher_forced.whole_texts(model, PROMPTS, TEXTS, SETTINGS[name], 32))
        assert len(blocks) == sum(-(-len(text) // length) for text in TEXTS)
        by_length.append([
            torch.cat([block.logits[0] for block in blocks if block.rows == [row]]) for row in range(len(TEXTS))
        ])  # fmt: skip
    for other in by_length[1:]:
        for ours, whole in zip(other, by_length[0], strict=True):
            torch.testing.assert_close(ours, whole)
