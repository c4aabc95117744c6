"""Figures of evaluation are the same however many texts are read at once."""

import inspect
from typing import Any

import pytest
import torch

from cotrain.data.texts import Texts
from cotrain.evaluation import divergence as divergences
from cotrain.evaluation import held_out as scores
from cotrain.evaluation import profile as profiles
from cotrain.teacher.target_model import served, split
from tests.student_kinds import STUDENTS, target

COUNT, LENGTH = 7, 12
DRAW = torch.Generator().manual_seed(0)
TEXTS = Texts(
    torch.randint(2, 30, (COUNT, LENGTH), generator=DRAW),
    torch.tensor([3, 4, 5, 3, 1, 2, 6]),
    torch.tensor([12, 12, 9, 7, 11, 12, 8]),
    ["a", "b", "a", "c", "b", "a", "c"],
)


def of_batch(size: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """All that evaluation says, with so many texts at once."""
    for module, name in ((scores, "held_out"), (scores, "score"), (profiles, "positions")):
        function: Any = inspect.unwrap(getattr(module, name))
        monkeypatch.setattr(function, "__defaults__", (*function.__defaults__[:-1], size))
    model = target()
    student, head = STUDENTS[kind](model), split(model)[1]
    held = scores.held_out(served(model, None, student.reads)[0], TEXTS, 0.7)
    with torch.no_grad():
        evaluated = scores.evaluate(held, student, head)
        return {
            "scores": scores.figures(evaluated),
            "profile": profiles.profile(held, student, head),
            "divergence": divergences.divergence(held, student, head, lambda ids: " ".join(map(str, ids))),
        }


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: one for part, inner in value.items() for key, one in flat(inner, f"{name}/{part}").items()}
    if isinstance(value, list | tuple):
        return {key: one for part, inner in enumerate(value) for key, one in flat(inner, f"{name}/{part}").items()}
    return {name: value}


@pytest.mark.parametrize("kind", ["independent", "heads", "eagle"])
def test_any_number_of_texts_at_once_gives_the_same_figures(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = flat(of_batch(16, kind, monkeypatch))
    domains = {value for key, value in whole.items() if key.endswith("/domain")}
    assert domains == {"a", "b", "c"}
    parts = flat(of_batch(3, kind, monkeypatch))
    assert parts.keys() == whole.keys()
    close = {
        key: pytest.approx(one, abs=1e-5, nan_ok=True) if isinstance(one, float) else one for key, one in whole.items()
    }
    assert {key: one for key, one in parts.items() if one != close[key]} == {}
