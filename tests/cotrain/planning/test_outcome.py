"""What a plan writes for other programs: the schedule and the acceptance profile, in the formats of their readers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain.planning import outcome
from cotrain.planning.forecast import Acceptance
from cotrain.planning.outcome import schedules, speculation_profile


def best(kind: str = "independent", verify: str = "token", prefix: tuple[float, ...] = (0.6, 0.3)) -> Any:
    """Two texts of 19 and 19 tokens; with two drafts a round emits 1 + 0.6 + 0.3 tokens, so each takes 10 rounds."""
    lengths = torch.tensor([19.0, 19.0], dtype=torch.float64)
    one = (1 + prefix[0]) if len(prefix) else 1.0
    at_least = [1.0, *prefix, 0.0]
    histogram = [at_least[n] - at_least[n + 1] for n in range(len(prefix) + 1)]
    calls = torch.stack([lengths, lengths / one, lengths / (1 + sum(prefix))])
    rates = Acceptance(calls, lengths, torch.zeros(3, 1, 2), 0.5, {"histogram": histogram})
    cells = {(1.0, 1): SimpleNamespace(k=2)}
    plan = SimpleNamespace(kind=kind, verify=verify, names=("/data/org/target", "/home/me/drafts/mine"))
    return SimpleNamespace(path="/home/me/drafts/mine", plan=plan, cells=cells, acceptance={1.0: rates})


MADE: Any = {"settings": {}, "environment": {}}


def test_the_profile_is_that_of_expected_rounds() -> None:
    """A round emits one token more than it accepts: position i of the rates is length i + 2 of the histogram."""
    found = speculation_profile(best(), 1.0, MADE)
    assert found["mean_accept_length"] == pytest.approx(1.9) and found["validation"]["mean_consistency"]["passed"]
    histogram = {int(n): count for n, count in found["acceptance_length_histogram"].items()}
    rounds = sum(histogram.values())
    assert rounds == pytest.approx(20) and set(histogram) == {1, 2, 3}
    assert sum(n * count for n, count in histogram.items()) / rounds == pytest.approx(found["mean_accept_length"])
    for i, rate in enumerate(found["marginal_accept_rates"]):
        assert sum(count for n, count in histogram.items() if n >= i + 2) / rounds == pytest.approx(rate)
    assert found["conditional_accept_rates"] == pytest.approx([0.6, 0.5])
    assert found["accept_length_by_k"] == pytest.approx({"1": 1.6, "2": 1.9})
    assert found["validation"]["marginal_monotonicity"] == {"passed": True, "violations": []}


def test_a_profile_that_contradicts_itself_says_so() -> None:
    given = best()
    given.acceptance[1.0].by_depth["histogram"] = [0.7, -0.3, 0.6]
    found = speculation_profile(given, 1.0, MADE)["validation"]
    assert found["marginal_monotonicity"]["violations"] == [
        {"position": 1, "value": 0.6, "previous": pytest.approx(0.3)}
    ]
    assert speculation_profile(best(), 1.0, MADE)["validation"]["mean_consistency"]["abs_delta"] == pytest.approx(
        0, abs=1e-9
    )


@pytest.mark.parametrize(
    ("kind", "verify", "method", "model"),
    [
        ("independent", "token", "draft_model", "chain_analytic"),
        ("eagle", "block", "eagle3", "chain_analytic"),
        ("block", "token", "dflash", "measured_per_k"),
        ("medusa", "token", "medusa", "measured_per_k"),
    ],
)
def test_kinds_have_their_names_there(kind: str, verify: str, method: str, model: str) -> None:
    found = speculation_profile(best(kind, verify), 1.0, MADE)
    assert (found["method"], found["accept_length_model"]) == (method, model)
    assert found["verification_method"] == ("block" if verify == "block" else "longest_prefix")


def test_paths_of_this_machine_are_not_published() -> None:
    found = speculation_profile(best(), 1.0, MADE)
    assert found["draft_checkpoint"] == {"id": "drafts/mine"} and found["target_model"] == {"id": "org/target"}


def test_a_schedule_is_given_to_both_engines() -> None:
    found = schedules({1: 4, 8: 2, 32: 0})
    assert found["ranges"] == [[1, 2, 4], [3, 16, 2], [17, 32, 0]]
    assert found["vllm"] == {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": found["ranges"]}
    assert found["tensorrt_llm"] == {"max_draft_len": 4, "draft_len_schedule": {"2": 4, "16": 2, "32": 0}}


def test_without_a_recommended_draft_no_engine_is_told_to_draft() -> None:
    found = schedules({1: 0, 8: 0})
    assert found == {"ranges": [[1, 8, 0]], "vllm": None, "tensorrt_llm": None}


def test_files_are_of_the_first_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    given = best()
    given.acceptance[0.0] = given.acceptance[1.0]
    other = SimpleNamespace(k=0)
    given.cells |= {(0.0, 1): other, (0.0, 4): other, (1.0, 4): SimpleNamespace(k=1)}
    given.policy, given.costs = None, {}
    monkeypatch.setattr(outcome, "policy_content", lambda policy: {})
    found = outcome.files(given, [1, 4], MADE)
    assert found["schedule.json"]["temperature"] == 1.0 and found["schedule.json"]["ranges"] == [[1, 2, 2], [3, 4, 1]]
    assert found["speculation_profile.json"]["measurement_conditions"]["temperature"] == 1.0
