"""Teacher-forced passes of given texts."""

import pytest
import torch

from inference import Sampling
from inference.exactness import teacher_forced as module
from inference.exactness.teacher_forced import teacher_forced, whole_texts
from inference.models.lm import LM
from tests import standin
from tests.inference.exactness.test_verdict import PROMPTS, V
from tests.tiny import tiny


def test_teacher_forcing_gives_the_logits_of_whole_texts(pair):
    texts = [[3, 1, 4, 1, 5], [2, 6], [7, 1, 1, 3]]
    for width, block in ((None, 64), (1, 3), (2, 4)):
        rows = {}
        settings = {"vocabulary": V, "width": width, "block": block, "rows": 2}
        for one in teacher_forced(pair[0], PROMPTS[:3], texts, Sampling(), **settings):
            for a, i in enumerate(one.rows):
                rows.setdefault(i, []).append(one.logits[a][one.valid[a]])
                assert one.x[a][one.valid[a]].tolist() == texts[i][one.start : one.start + one.x.shape[1]]
        for i, (prompt, text) in enumerate(zip(PROMPTS[:3], texts, strict=True)):
            whole = pair[0](torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(torch.cat(rows[i]), whole, atol=1e-10, rtol=0)


def test_teacher_forcing_applies_the_history_of_each_token(pair):
    text = [3, 1, 3, 2]
    plain, penal = (
        next(teacher_forced(pair[0], [[3, 5]], [text], sampling, vocabulary=V)).logits[0]
        for sampling in (Sampling(), Sampling(frequency_penalty=0.5))
    )
    expected = torch.zeros(4, V, dtype=torch.float64)
    expected[1:, 3], expected[2:, 1] = 0.5, 0.5
    expected[3, 3] = 1.0  # the prompt's own 3 does not count
    torch.testing.assert_close(plain - penal, expected)


def test_logits_of_recorded_passes_are_those_of_each_pass() -> None:
    """A recorded pass overwrites the logits of the one before."""

    def logits(device: str) -> torch.Tensor:
        lm = LM(tiny(positions=128).to(device), 1, graphs=device == "cuda")  # type: ignore[arg-type]
        (found,) = teacher_forced(lm, [[5, 9, 3]], [[7, 1, 4, 8]], Sampling(), width=1)
        return found.logits.to("cpu")

    with standin.device() as gpu:
        recorded = logits("cuda")
        assert gpu.recordings
    torch.testing.assert_close(recorded, logits("cpu"))


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
    """Logits by transformers' own forward, however many positions are held at once."""
    model, prompts, texts = tiny(), [[1, 2, 3], [4]], [[5, 6, 5, 7, 5, 6, 8], [9, 9, 3, 9]]
    by_length = []
    for length in (100, 3, 2, 1):
        monkeypatch.setattr(module, "CELLS", length * 32)
        blocks = list(whole_texts(model, prompts, texts, SETTINGS[name], 32))
        assert len(blocks) == sum(-(-len(text) // length) for text in texts)
        by_length.append(
            [torch.cat([block.logits[0] for block in blocks if block.rows == [row]]) for row in range(len(texts))]
        )
    for other in by_length[1:]:
        for ours, whole in zip(other, by_length[0], strict=True):
            torch.testing.assert_close(ours, whole)


def test_texts_of_a_model_in_half_precision_are_scored_as_they_are_decoded() -> None:
    """In passes of few ids: longer ones are less precise, so that another token may be the likeliest."""
    model, text = tiny(dtype=torch.bfloat16), [i % 31 for i in range(3, 80, 2)]
    whole, single = (
        torch.cat([part.logits[0] for part in teacher_forced(model, [[1, 2]], [text], Sampling(), width=width)])
        for width in (None, 1)
    )
    torch.testing.assert_close(whole, single, rtol=1e-4, atol=1e-4)
