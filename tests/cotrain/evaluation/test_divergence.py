"""Where two distributions differ: the curve against sums done by hand, the worst place against whole distributions."""

import pytest
import torch

from cotrain.evaluation.divergence import divergence, lorenz
from cotrain.evaluation.held_out import evaluate
from cotrain.students.independent import IndependentStudent
from cotrain.teacher.target_model import split
from tests.cotrain.evaluation.test_profile import DRAFT, IDS, TARGET, TEXTS, direct, held


def test_the_curve_gives_the_share_of_the_largest_values() -> None:
    assert lorenz([1, 4, 0, 5], 4) == pytest.approx([0, 0.5, 0.9, 1, 1])
    assert lorenz([1, 3], 4) == pytest.approx([0, 0.375, 0.75, 0.875, 1])  # half a value counts in half
    assert lorenz([0.0, 0.0], 2) == lorenz([], 2) == [0, 0.5, 1]


def test_mean_and_worst_positions_agree_with_whole_distributions() -> None:
    one = held(0.7)
    figures = divergence(one, IndependentStudent(DRAFT), split(TARGET)[1], lambda ids: " ".join(map(str, ids)))
    assert figures["positions"] == int(TEXTS.predicted.sum())
    assert abs(figures["mean"] - 1 + evaluate(one, IndependentStudent(DRAFT), split(TARGET)[1])["all"].alpha) < 1e-5
    tv = torch.zeros(TEXTS.predicted.shape, dtype=direct(0.7, 0.7).dtype)
    tv[TEXTS.predicted] = 1 - direct(0.7, 0.7)
    for one, row in zip(figures["worst"], tv.amax(1).argsort(descending=True).tolist(), strict=True):
        at = int(tv[row].argmax())
        assert one["tv"] == pytest.approx(float(tv[row, at]), abs=1e-5)
        assert one["before"] == " ".join(map(str, IDS[row, : at + 1].tolist()))
        assert (one["next"], one["domain"]) == (str(int(IDS[row, at + 1])), TEXTS.domain[row])
        with torch.no_grad():
            p, q = ((model(IDS[row : row + 1]).logits[0, at] / 0.7).softmax(-1) for model in (TARGET, DRAFT))
        for side, by in (("target", p), ("draft", q)):
            assert [int(token["text"]) for token in one[side]] == by.topk(3).indices.tolist()
            assert [token["q"] for token in one[side]] == pytest.approx(q[by.topk(3).indices].tolist(), abs=1e-5)
            assert [token["p"] for token in one[side]] == pytest.approx(p[by.topk(3).indices].tolist(), abs=1e-5)
