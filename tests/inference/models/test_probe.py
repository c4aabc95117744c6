"""What the self-check compares: each place, row, layer and node with the model's own, and how much rounding excuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.models import probe
from inference.models.forward import Lean
from inference.models.passes import LAST, Pass
from inference.models.probe import SAMPLES, Found, Probe
from tests import tiny as tinies

PLACES = 20  # of both rows
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)


def tiny(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return tinies.tiny(dtype=dtype)


def seen(model: PreTrainedModel) -> tuple[Probe, list[Tensor]]:
    """A check, and right numbers of ours to spoil."""
    made = Probe(model, 256)
    with torch.no_grad():
        return made, made._rows([found.logits.clone() for found in made._passes(lambda c: Lean(model, c))])


def judged(made: Probe, ours: list[Tensor]) -> Found:
    return made._judged(ours, [*made.own], lambda: [*made._own(made.ids)], "logits", made._stepped)


def noises(monkeypatch: pytest.MonkeyPatch, loud: dict[int, float], parts: int = 1) -> None:
    """Rounding moves all places by .04, some of each layer further."""
    noise = torch.full((parts, PLACES), 0.04)
    for place, one in loud.items():
        noise[:, place] = one
    monkeypatch.setattr(Probe, "_noise", lambda self, *settings: noise.flatten())


def moved(row: Tensor, by: float) -> Tensor:
    """Numbers of a place that are `by` of their deviation away."""
    signs = torch.ones_like(row)
    signs[::2] = -1
    return row + by * row.float().std() * signs


@pytest.mark.parametrize(
    ("place", "by", "agrees"),
    [
        (2, 0.5, True),  # loud: 4 times its own noise are allowed
        (2, 0.9, False),
        (3, 0.07, True),  # all others: twice the noise of those that are not loud
        (3, 0.1, False),
        (2, float("nan"), False),
        (3, float("inf"), False),
    ],
)
def test_a_loud_place_has_a_bound_of_its_own(
    place: int, by: float, agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, ours = seen(tiny())
    ours[0][place] = moved(made.own[0][place], by)
    noises(monkeypatch, {2: 0.18})
    assert judged(made, ours).agrees is agrees


def test_what_may_move_further_than_the_bound_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 times its noise are more than the bound: a place of its own, which changes nothing for the others."""
    made, ours = seen(tiny())
    noises(monkeypatch, {2: 0.07})
    ours[0][2] = moved(made.own[0][2], 0.25)
    assert judged(made, ours).agrees
    ours[0][3] = moved(made.own[0][3], 0.1)
    assert not judged(made, ours).agrees


@pytest.mark.parametrize(("loud", "agrees"), [(9, True), (10, False), (20, False)])
def test_loud_places_are_fewer_than_half(loud: int, agrees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, ours = seen(tiny())
    ours[0][2] = moved(made.own[0][2], 0.3)
    noises(monkeypatch, dict.fromkeys(range(loud), 0.18))
    assert judged(made, ours).agrees is agrees


def test_loud_places_are_counted_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Early layers, which are quiet, excuse none of the last."""
    noise = torch.full((3, PLACES), 0.04)
    noise[2] = 0.18
    monkeypatch.setattr(Probe, "_noise", lambda self, *settings: noise.flatten())
    made, ours = seen(tiny())
    rows = [row.clone() for _ in range(3) for row in ours]
    rows[4][2] = moved(made.own[0][2], 0.3)
    found = made._judged(rows, [*made.own] * 3, list, "states", parts=3)
    assert not found.agrees and found.allowed == probe.MOST


def test_noise_is_of_five_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """By two passes for one, and by four samples of embeddings rounded once more: the largest, place by place."""
    made, ours = seen(tiny())
    lengths, own = [len(row) for row in ours], [*made.own]
    again = lambda: [*made._own(made.ids)]  # noqa: E731
    samples = [made._rounded(again, seed) for seed in range(SAMPLES)]
    assert all(not torch.equal(one[0], other[0]) for one, other in zip(samples, samples[1:], strict=False))
    far = [row + 1 for row in own]
    each = torch.stack([probe._apart([r[:n] for r, n in zip(way, lengths, strict=True)], own) for way in samples])
    assert torch.equal(made._noise(lengths, own, again), each.amax(0)) and SAMPLES == 4
    assert float(made._noise(lengths, own, again, lambda: far).min()) > float(each.max())
    assert float(made._noise(lengths, own, again, lambda: [row + 1e9 for row in own]).max()) == pytest.approx(0.8)
    asked: list[Any] = []
    none = Found(1.0, 0.0)
    monkeypatch.setattr(Probe, "_judged", lambda self, *settings, **more: asked.append(settings) or none)
    made.found(lambda cache: Lean(made.model, cache))
    assert asked[0][4:] == (made._stepped,)


def wrong(row: int, change: Callable[[Pass, int], None]) -> type[Lean]:
    class Wrong(Lean):
        def forward(self, ids: Tensor, window: Any, *settings: Any, **more: Any) -> Pass:
            found = super().forward(ids, window, *settings, **more)
            found = Pass(found.logits.clone(), {layer: states.clone() for layer, states in found.states.items()})
            change(found, row)
            return found

    return Wrong


def last_states(found: Pass, row: int) -> None:
    if found.states:
        found.states[LAST][row, -1] = moved(found.states[LAST][row, -1], 3.0)


def first_states(found: Pass, row: int) -> None:
    if found.states:
        found.states[0][row, -1] = moved(found.states[0][row, -1], 3.0)


def logits(found: Pass, row: int) -> None:
    found.logits[row, -1] = moved(found.logits[row, -1], 3.0)


@DTYPES
@pytest.mark.parametrize("row", [0, 1])
def test_each_row_is_compared(row: int, dtype: torch.dtype) -> None:
    """Of logits, of the states of the first and the last layer, and of trees."""
    model = tiny(dtype)
    with torch.no_grad():
        for look, change in (
            (Probe.found, logits), (Probe.states, last_states), (Probe.states, first_states), (Probe.trees, logits),
        ):  # fmt: skip
            assert look(Probe(model, 256), lambda c: Lean(model, c)).agrees
            spoilt = wrong(row, change)
            found = look(Probe(model, 256), lambda c, spoilt=spoilt: spoilt(model, c))  # type: ignore[misc]
            assert not found.agrees, (look.__name__, change.__name__)


@DTYPES
def test_numbers_that_are_none_are_refused(dtype: torch.dtype) -> None:
    model = tiny(dtype)

    def none(found: Pass, row: int) -> None:
        found.logits[row, -1, 3] = torch.nan

    with torch.no_grad():
        for look in (Probe.found, Probe.trees):
            assert not look(Probe(model, 256), lambda c: wrong(1, none)(model, c)).agrees
