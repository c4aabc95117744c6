"""Check (d): tolerances for the logits of an engine."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from inference import Engine
from inference.exactness import agreement
from inference.exactness.agreement import MOST, check_logits, most, step
from inference.models.lm import LM
from tests.tiny import tiny


@pytest.mark.parametrize("own", [0.0, 3.0, 1e9])
def test_limits_of_logits_follow_from_rounding_and_the_dtype(own: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """own: units in the last place that transformers' forward moves by; none, some, and more than a dtype excuses."""
    model, unit = tiny(dtype=torch.float32), torch.finfo(torch.float32).eps
    moved = own * unit * torch.tensor([1.0, 2.0, 2.0])
    sides = iter(
        [torch.tensor([3.0, 4.0]).double(), torch.tensor([6.0, 8.0]).double()]
    )  # of passes of one id, and of several
    monkeypatch.setattr(agreement, "difference", lambda a, b: moved.double())
    monkeypatch.setattr(agreement, "_passes", lambda *_: next(sides))
    check = agreement.check_logits(Engine(model, rows=1).target, [[1, 2]], [[3, 4, 5]], 3)
    mean = math.sqrt(3) * own * unit
    assert (check.one, check.many, check.worst) == (pytest.approx(math.sqrt(12.5)), pytest.approx(math.sqrt(50)), 8)
    assert check.own == pytest.approx(mean) and check.tokens == 3
    assert check.limit == pytest.approx(min(max(4 * mean, 4 * unit), 1e-3))
    assert check.worst_limit == pytest.approx(min(max(4 * 2 * own * unit, 24 * unit), 6e-3))


@pytest.mark.parametrize(("text", "token", "width"), [(0, 0, 1), (0, 59, 4), (1, 42, 1), (2, 57, 4), (2, 59, 4)])
def test_a_fault_at_one_token_shows_wherever_it_stands(
    text: int, token: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes of one id or of several, at the first or the last tokens, or at one of the few between them."""
    monkeypatch.setattr(agreement, "POSITIONS", 12)
    monkeypatch.setattr(agreement, "LAST", 4)
    plain, model = agreement.teacher_forced, tiny()

    def faulty(*given: Any, width: int = 1, **more: Any) -> Any:
        for part in plain(*given, width=width, **more):
            at = token - part.start
            if text in part.rows and 0 <= at < part.x.shape[1] and width == broken:
                part.logits[part.rows.index(text), at, 3] += 1.0
            yield part

    monkeypatch.setattr(agreement, "teacher_forced", faulty)
    prompts, texts = [[1, 2], [3], [4, 5, 6]], [[(7 * i + n) % 30 for i in range(60)] for n in range(3)]
    lm = Engine(model, rows=3).target
    broken = 0
    right = agreement.check_logits(lm, prompts, texts, 4)
    assert right.passed and (right.first, right.last) == (1, 62) and right.tokens == 36
    broken = width
    wrong = agreement.check_logits(lm, prompts, texts, 4)
    assert not wrong.passed and wrong.worst > wrong.worst_limit
    assert (wrong.one > right.one, wrong.many > right.many) == (width == 1, width == 4)


ON_CPU, ON_GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "flags", "unit"),
    [
        (ON_CPU, (False, False), torch.float32),
        (ON_CPU, (True, False), torch.bfloat16),
        (ON_CPU, (False, True), torch.bfloat16),
        (ON_GPU, (True, False), torch.bfloat16),
        (ON_GPU, (False, True), torch.float32),
    ],
)
def test_rounded_weights_are_judged_by_the_dtype_of_their_products(
    device: torch.device, flags: tuple[bool, bool], unit: torch.dtype
) -> None:
    """bitsandbytes multiplies 8 bits by 8 bits everywhere, and one row by 4 bits in bfloat16 on CPUs that can."""
    loaded = {"is_loaded_in_8bit": flags[0], "is_loaded_in_4bit": flags[1]}
    model: Any = SimpleNamespace(dtype=torch.float32, device=device, config=PretrainedConfig(), **loaded)
    assert (most(model), step(model)) == (MOST[unit], torch.finfo(unit).eps)


def test_a_wrong_token_of_wide_passes_alone_is_compared_with_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = tiny(), LM.forward

    def wrong(self, ids, start, *rest, **settings):  # type: ignore[no-untyped-def]
        output = right(self, ids, start, *rest, **settings)
        if ids.shape[1] == 1:
            return output
        spoilt = output.logits.clone()
        spoilt[:, -1, 3] += 5.0
        return output._replace(logits=spoilt)

    monkeypatch.setattr(LM, "forward", wrong)
    logits = check_logits(LM(model, 2), [[3, 5], [4]], [[1, 2, 3, 4], [5, 6, 7, 8]], 4)
    assert logits.worst > logits.worst_limit and not logits.passed and logits.worst > 10 * logits.one
