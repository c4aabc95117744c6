"""The figures of a verdict, each computed once more by hand, and the limits beyond which a check fails."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from inference.exactness.agreement import LogitsCheck
from inference.exactness.figures import CallsCheck, DepthCheck
from inference.exactness.likelihood import LikelihoodCheck
from inference.exactness.ties import TextCheck
from inference.exactness.verdict import Verdict

TEXT = TextCheck(7, 5, 2, 0, 0.25, 0.75, 0.5, 31, 37)


CALLS = CallsCheck(400, 101, 99.0, 5.0, 3, [0.9, 0.8], [0.9, 0.7], 6, 2.5)


DEPTH = DepthCheck(100, 57, 0.55, 0.38)


LOGITS = LogitsCheck(41, 0.1, 0.2, 0.5, 0.05, 0.3, 0.6)


SURPRISE = LikelihoodCheck(1000, 1.25, 1.5, 3.0, -2.0, 7)


VERDICT = Verdict(TEXT, CALLS, DEPTH, LOGITS, {}, SURPRISE)


FAILING: dict[str, list[Any]] = {
    "text": [replace(TEXT, unexplained=1)],
    "calls": [replace(CALLS, measured=120), replace(CALLS, measured=78), replace(CALLS, rare=14)],
    "depth": [replace(DEPTH, chance=0.0013)],
    "logits": [replace(LOGITS, one=0.31), replace(LOGITS, many=0.31), replace(LOGITS, worst=0.61)],
    "surprise": [
        replace(SURPRISE, z=5.1),
        replace(SURPRISE, z=-5.1),
        replace(SURPRISE, place_z=5.1),
        replace(SURPRISE, place_z=-5.1),
        replace(SURPRISE, impossible=21),
    ],
}


def test_each_figure_beyond_its_limit_fails_its_check_and_the_verdict() -> None:
    assert VERDICT.passed and {*FAILING} == {*VERDICT.figures} - {"passed", "missing"}
    for place, (name, wrong) in enumerate(FAILING.items(), 1):
        for one in wrong:
            verdict = replace(VERDICT, **{name: one})
            assert not one.passed and not verdict.passed, one
            assert not verdict.figures["passed"] and not verdict.figures[name]["passed"]
            assert [line.endswith("FAILED") for line in verdict.lines()] == [n in (0, place) for n in range(6)]
    assert not replace(VERDICT, lossy="lossy_typical").passed
    assert not replace(CALLS, sigma=0.0).passed  # without coins calls are exact
    assert replace(CALLS, rare=12).passed and replace(DEPTH, chance=0.0014).passed


def test_figures_of_a_verdict_are_its_counts_and_their_ratios() -> None:
    figures = VERDICT.figures
    for name, one in {"text": TEXT, "calls": CALLS, "depth": DEPTH, "logits": LOGITS, "surprise": SURPRISE}.items():
        for item in fields(one):
            assert figures[name][item.name] == getattr(one, item.name)
    ratios = {"z": (101 - 99) / 5, "z_rare": (6 - 2.5) / math.sqrt(2.5 + 3 + 1), "relative": 2 / 99, "tau": 400 / 99}
    for name, value in ratios.items():
        assert figures["calls"][name] == pytest.approx(value)
    assert figures["depth"]["measured"] == 0.57
    assert (
        TEXT.explained == 0.5
        and replace(TEXT, limit=9.0).explained == 0.5
        and replace(TEXT, noise=0.1).explained == 0.2
    )
    assert replace(VERDICT, calls=None, depth=None).figures["calls"] is None
