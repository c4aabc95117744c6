"""What measurements run on and when they end, with engines and clocks that a test makes up."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.measure import arms as arms_module
from inference.measure import contention, floor
from inference.measure.adaptive import Wanted, until_known
from inference.measure.arms import Arm, ArmResult, transformers_arm
from inference.measure.gating import places_of
from inference.measure.real_costs import measure_drafting
from inference.models.lm import LM
from inference.models.memory import token_bytes
from inference.output import Output
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.retrieval import Retrieval
from inference.report.recorder import Recorder, _Row, _told
from inference.report.table import _speedup
from inference.stats import Counts, Stats
from tests.tiny import near, tiny


def arms(seconds: list[float]) -> list[Arm]:
    """Two that take turns; of the first, seconds run by run, over and over."""
    runs = iter(range(10**6))

    def timed(name: str) -> Arm:
        def run(prompts: Any, ids: Any, seed: int) -> ArmResult:
            took = seconds[next(runs) % len(seconds)] if name == "ours" else 1.0
            return ArmResult([[0] * 4 for _ in prompts], took, took)

        return Arm(name, run)

    return [timed("ours"), timed("plain")]


@pytest.mark.parametrize(
    ("prompts", "seconds", "until", "least", "batches", "enough"),
    [
        (40, [1.0], 1e9, 2, 8, True),
        (3, [1.0], 1e9, 2, 8, False),  # as near as asked for, over three batches alone
        (40, [1.0], 5.0, 2, 5, False),  # and over five, since time was over
        (40, [1.0], 9.5, 12, 9, False),  # and over nine of the twelve that were asked for
        (40, [0.5, 1.5, 0.7], 30.0, 2, 30, False),
    ],
)
def test_enough_is_said_of_narrow_intervals_over_enough_batches(
    prompts: int, seconds: list[float], until: float, least: int, batches: int, enough: bool
) -> None:
    now, told = [0.0], list[int]()

    def turned(done: int) -> None:
        now[0] += 1.0

    each = [[n] for n in range(prompts)]
    _, found = until_known(
        arms(seconds), each, 1, ("ours", "plain"), Wanted(least, 1e-6, until), clock=lambda: now[0],
        say=lambda done, near: told.append(done), turned=turned,
    )  # fmt: skip
    assert found.enough == enough and found.batches == min(batches, prompts)
    assert told == [n for n in (8, 10, 12, 15, 18, 22, 27) if least <= n <= found.runs]  # by a quarter more each time


def test_places_of_a_gate_are_what_the_text_had_there() -> None:
    prompt, text, starts = [1, 2, 3, 1], [2, 3, 9, 1, 2, 3, 1, 2], [0, 3, 4]
    stats = Stats(rows=[Counts(), Counts(starts=starts)])
    found = places_of(Retrieval(shortest=1), prompt, Output([[], text], None, [], stats), 1, 3)
    assert [place.accepted for place in found] == [2, None, None, 0, 3, None, None, None]  # the last one too
    for t, place in enumerate(found):
        right = 0
        while right < min(len(place.match.drafts), len(text) - t) and place.match.drafts[right] == text[t + right]:
            right += 1
        assert place.right == right
    assert {place.right for place in found} >= {0, 2}


def test_rounds_are_timed_on_other_prompts_and_noise_each_time() -> None:
    calls: list[tuple[Any, int, int]] = []

    def generate(prompts: Any, *, max_new_tokens: int, sampling: Sampling, seed: int, ignore_eos: bool) -> Output:
        calls.append((prompts, seed, engine.policy.k))
        stats = Stats()
        stats.times["target"] = 1
        return Output([], None, [], stats)

    engine: Any = SimpleNamespace(rows=2, policy=Fixed(9), generate=generate)
    measure_drafting({"a": (engine, 3)}, [[n] for n in range(5)], sampling=Sampling(), max_new_tokens=4, seed=7)
    assert calls[:3] == [([[0], [1]], 7, 3), ([[2], [3]], 8, 3), ([[4], [0]], 9, 3)]
    assert len(calls) == 6 and engine.policy == Fixed(9)


def test_time_of_ended_children_is_this_processes_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "times", lambda: SimpleNamespace(user=1, system=2, children_user=4, children_system=8))
    assert contention.reading().own == 15


def test_a_copy_reads_and_writes_and_a_product_multiplies_and_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "_median", lambda *_: 0.5)
    monkeypatch.setattr(floor, "COPIED", 64)
    monkeypatch.setattr(floor, "SIDE", 4)
    assert floor.measure_machine(torch.device("cpu"), torch.float32) == floor.Machine(256.0, 256.0)


def test_keys_and_values_count_in_what_they_are_held_in() -> None:
    lm = LM(tiny(dtype=torch.bfloat16), 2)
    weights, _ = floor.weight_bytes(lm)
    kept = token_bytes(lm.model.config, lm.held)
    assert lm.held != lm.dtype  # on a CPU
    assert floor.pass_load(lm, 2, 3, 5).bytes == weights + 2 * kept * 8 + 8 * 2 * 3 * lm.vocabulary


def test_a_baseline_decodes_as_many_rows_together_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def made(model: Any, prompts: list[list[int]], settings: dict[str, Any]) -> ArmResult:
        sizes.append(len(prompts))
        return ArmResult([[0] for _ in prompts], 1.0, 1.0)

    monkeypatch.setattr(arms_module, "_generate", made)
    prompts, model = [[n] for n in range(5)], tiny()
    for rows, assistant in ((2, None), (None, None), (2, model)):
        transformers_arm("hf", model, Sampling(), 1, rows=rows, assistant=assistant).run(prompts, [], 0)
    assert sizes == [2, 2, 1, 5, *[1] * 5]


@pytest.mark.parametrize(
    ("low", "high", "says"), [(1.1, 1.3, ""), (0.9, 1.3, "no speed-up is shown"), (0.7, 0.9, "a slow-down")]
)
def test_an_interval_is_told_in_words(low: float, high: float, says: str) -> None:
    whole = {"value": (low + high) / 2, "low": low, "high": high}
    decode = {"value": 3.25, "low": 3.0, "high": 3.5}
    line, *words = _speedup({"speedup": {"of": "a", "over": "b", "whole": whole, "decode": decode}, "extra": {}}).split(
        "\n"
    )
    assert f"{whole['value']:.3f} [{low:.3f}, {high:.3f}] with prefill, 3.250 [3.000, 3.500] decode only" in line
    assert [word[: len(says)] for word in words] == ([says] if says else [])


def test_a_record_is_of_the_last_call_and_a_row_that_ended_refused_nothing() -> None:
    record = Recorder()
    engine = Engine(tiny(), Independent(near(tiny())), policy=Fixed(3), rows=1, record=record)
    engine.generate([[1, 2, 3]], max_new_tokens=9)
    engine.generate([[4, 5]], max_new_tokens=4, seed=3)
    told = record.replay()
    assert [row["prompt"] for row in told["rows"]] == ["4 5"] and told["rounds"][0][0]["start"] == 0
    assert [one[0]["start"] for one in told["rounds"]] == sorted({one[0]["start"] for one in told["rounds"]})
    bits = [0] * 9
    ended = _Row(0, 0, 2, 3, (0, 1), 7, (4, 5, 6), bits, (-1, 0, 1))  # its end token is the second draft
    assert [draft["state"] for draft in _told(ended, 1, None)["drafts"]] == ["accepted", "accepted", "unread"]
    assert _told(ended._replace(taken=3), 1, None)["drafts"][2]["state"] == "refused"
