"""What `cotrain plan log=` says of a server's counters."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cotrain.errors import UserError
from cotrain.planning.drift import Drift, read_plan, served_counters
from cotrain.planning.drift import drift as drift_of
from inference.drafts.atomic import write_json
from tests.broken import broken

PREFIX = {"1": [0.6, 0.36, 0.22, 0.13], "0.3": [0.8, 0.64, 0.51, 0.41]}
PLAN: dict[str, Any] = {
    "recommended": "d",
    "acceptance": {"d": {t: {"prefix": prefix} for t, prefix in PREFIX.items()}},
    "cells": [
        {
            "draft": "d",
            "temperature": float(t),
            "tau": [1 + sum(prefix[:k]) for k in range(5)],
            "tau_errors": [0.0, 0.01, 0.01, 0.01, 0.01],
        }
        for t, prefix in PREFIX.items()
    ],
}


COUNTS = {"rounds": 1000, "accepted_by_depth": [600, 360, 220], "drafted": 2950}


@pytest.fixture
def drift(tmp_path: Path) -> Callable[[Any, Any], Drift]:
    def compared(plan: Any, counters: Any) -> Drift:
        """Of the recommended draft alone, and of it behind another draft, at temperatures in another order."""
        others = [
            cell | {"draft": "e", "tau": [1 + 0.1 * k for k in range(len(cell["tau"]))]} for cell in plan["cells"]
        ]
        several = plan | {
            "acceptance": {"e": {"1": {"prefix": [0.1] * 4}}, **plan["acceptance"]},
            "cells": others + plan["cells"][::-1],
        }
        write_json(tmp_path / "plan.json", plan)
        write_json(tmp_path / "several.json", several)
        found = drift_of(read_plan(tmp_path / "plan.json"), counters)
        assert found == drift_of(read_plan(tmp_path / "several.json"), counters)
        return found

    return compared


def counters(tmp_path: Path, shares: list[float], rounds: int = 20_000) -> Any:
    file = tmp_path / "log.json"
    write_json(file, {"rounds": rounds, "accepted_by_depth": [round(rounds * share) for share in shares]})
    return served_counters(file)


def test_what_was_forecast_is_no_drift(tmp_path: Path, drift: Any) -> None:
    found = drift(PLAN, counters(tmp_path, PREFIX["1"][:3]))
    assert (
        found.cause is None and found.tau == pytest.approx(2.18) == pytest.approx(found.forecast) and found.depths == 3
    )
    few = drift(PLAN, counters(tmp_path, [0.5, 0.3, 0.2], rounds=40))  # so few rounds may be anything
    assert few.cause is None and abs(few.z) < 3


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ([0.8, 0.64, 0.51], "as planned for temperature 0.3"),
        ([0.45, 0.2, 0.09], "served prompts differ"),
        ([0.6, 0.1, 0.02], "other states or positions"),
        ([0.95, 0.9, 0.85], "a longer draft may pay"),
    ],
)
def test_a_difference_has_its_likely_cause(shares: list[float], says: str, tmp_path: Path, drift: Any) -> None:
    found = drift(PLAN, counters(tmp_path, shares))
    assert found.cause and says in found.cause and "drift" in found.line


def test_the_score_is_that_of_the_rounds_and_of_the_texts(tmp_path: Path, drift: Any) -> None:
    """By hand for one draft: a share of 0.55 in 400 rounds, 0.6 forecast with a standard error of 0.01."""
    found = drift(PLAN, counters(tmp_path, [0.55], rounds=400))
    assert found.z == pytest.approx(-0.05 / (0.55 * 0.45 / 400 + 0.01**2) ** 0.5)


def test_the_forecast_is_that_of_the_servers_draft_length(tmp_path: Path, drift: Any) -> None:
    """Rounds of longer drafts begin elsewhere, so their profile is not that of shorter drafts."""
    plan = copy.deepcopy(PLAN)
    plan["cells"][0] |= {"tau": [1, 1.55, 1.9, 2.1, 2.2], "tau_errors": [0, 0.03, 0.05, 0.05, 0.05]}
    found = drift(plan, counters(tmp_path, [0.55, 0.35]))
    assert found.forecast == 1.9 and found.cause is None and abs(found.z) < 1e-6
    low = drift(plan, counters(tmp_path, [0.55], rounds=400))
    assert low.forecast == 1.55 and low.z == pytest.approx(0, abs=1e-9)
    off = drift(plan, counters(tmp_path, [0.5], rounds=10**9))
    assert off.z == pytest.approx(-0.05 / 0.03, rel=1e-3)


def test_the_page_of_a_server_is_read(tmp_path: Path) -> None:
    depth = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="%d"} %.1f'
    totals = {"num_drafts": 100, "num_draft_tokens": 200, "num_accepted_tokens": 90}
    page = [f"vllm:spec_decode_{name}_total {value}.0" for name, value in totals.items()]
    page += [depth % pair for pair in ((0, 60.0), (1, 30.0))]
    (tmp_path / "metrics").write_text("\n".join(page) + "\n")
    found = served_counters(tmp_path / "metrics")
    assert found.rounds == 100 and found.by_depth == (60, 30) and found.tau == pytest.approx(1.9)


def test_longer_drafts_than_the_plans_are_refused(tmp_path: Path, drift: Any) -> None:
    with pytest.raises(UserError, match="drafts 5 tokens"):
        drift(PLAN, counters(tmp_path, [0.6, 0.4, 0.3, 0.2, 0.1]))


def test_rounds_of_unequal_lengths_are_refused(tmp_path: Path, drift: Any) -> None:
    """Half of the rounds drafted four tokens and half one, as forecast: a schedule is no drift."""
    file = tmp_path / "log.json"
    accepted = [6000, 1800, 1100, 650]
    write_json(file, {"rounds": 10_000, "accepted_by_depth": accepted, "drafted": 25_000})
    with pytest.raises(UserError, match=r"rounds drafted 2.50 tokens on average, and 4 at most"):
        drift(PLAN, served_counters(file))
    whole = {"rounds": 10_000, "accepted_by_depth": [6000, 3600, 2200, 1300], "drafted": 39_500}
    write_json(file, whole)  # the ends of texts
    assert drift(PLAN, served_counters(file)).cause is None


def test_a_temperature_that_has_no_short_decimal(tmp_path: Path, drift: Any) -> None:
    plan = copy.deepcopy(PLAN)
    plan["acceptance"]["d"] = {"0.333333": plan["acceptance"]["d"]["1"]}
    plan["cells"][0]["temperature"] = 1 / 3
    assert drift(plan, counters(tmp_path, PREFIX["1"][:2])).temperature == pytest.approx(1 / 3, rel=1e-5)


@pytest.mark.parametrize(
    ("depths", "rounds", "drifts"), [([0, 0], 1000, True), ([8, 2], 1000, True), ([0, 0], 3, False)]
)
def test_a_draft_that_is_never_accepted_is_not_the_planned_one(
    depths: list[int], rounds: int, drifts: bool, tmp_path: Path, drift: Any
) -> None:
    """Other prompts lose some acceptance, and not all of it; but a few rounds without an accepted draft say nothing."""
    plan = copy.deepcopy(PLAN)
    plan["acceptance"]["d"]["2"] = {"prefix": [0.1, 0.02, 0.01, 0.0]}  # nearer than the planned temperature
    cause = drift(plan, counters(tmp_path, [n / rounds for n in depths], rounds)).cause or ""
    wanted = ["draft", "tokenizer", "states", "flags"] if drifts else []
    assert [cause.find(word) for word in wanted] == sorted(cause.find(word) for word in wanted)
    assert all(word in cause for word in wanted) and bool(cause) == drifts


SAVE = "save the page of a vLLM server, as with `curl .*, or JSON with rounds"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "log="),
        ('{"rounds": 1}\n{"rounds": 2}\n', SAVE),
        ('{"loss": 1}', SAVE),
        ("a,b\n1,2\n", SAVE),
        ("\xff", f"not UTF-8 text: {SAVE}"),
        ("vllm:spec_decode_num_drafts_total NaN\n", "log="),
        ("vllm:spec_decode_num_drafts 1e999\n", "log="),
        ("vllm:spec_decode_num_drafts_total 3\n", "log="),
        (json.dumps({"rounds": 10, "accepted_by_depth": [11]}), "cannot rise"),
        (json.dumps({"rounds": 10, "accepted_by_depth": [5, 6]}), "cannot rise"),
        (json.dumps(COUNTS | {"drafted": 4000}), "in 1000 rounds of at most 3"),
        (json.dumps(COUNTS | {"drafted": 1000}), "and 1180 accepted"),
        (json.dumps(COUNTS | {"accepted_by_depth": [600, -1, -2]}), "-1"),
        (json.dumps(COUNTS | {"accepted_by_depth": [600.5]}), "whole numbers"),
        (json.dumps(COUNTS | {"rounds": 0}), "serve some prompts"),
    ],
)
def test_a_file_of_something_else_is_told_what_to_save(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=says) as raised:
        served_counters(tmp_path / "log")
    assert "log" in str(raised.value)


def test_any_other_value_in_any_place_is_a_sentence_or_an_answer(tmp_path: Path) -> None:
    """Of a server's counters and of a plan."""
    plan, log = tmp_path / "plan.json", tmp_path / "log.json"
    answers = 0
    cases = [
        *((words, PLAN, one) for words, one in broken(COUNTS)),
        *((words, one, COUNTS) for words, one in broken(PLAN)),
    ]
    for words, given, counts in cases:
        plan.write_text(json.dumps(given))
        log.write_text(json.dumps(counts))
        try:
            found = drift_of(read_plan(plan), served_counters(log))
        except UserError as error:
            assert (
                str(error).startswith(("output=", "log")) and "\n" not in str(error) and "object" not in str(error)
            ), words
        else:
            assert math.isfinite(found.tau) and math.isfinite(found.forecast) and not math.isnan(found.z), words
            answers += 1
    assert 0 < answers < len(cases) / 2
