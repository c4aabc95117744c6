"""Costs of rounds, alone and in real calls, and the best draft length."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import astuple
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from inference import Engine, Sampling
from inference.measure.costs import (
    Costs,
    RealRound,
    calibrated,
    interleaved,
    measure_costs,
    measure_rounds,
    never_falling,
    of_stats,
)
from inference.models.lm import LM
from inference.output import Stats
from inference.policy import Fixed
from inference.proposers import Independent, eagle
from tests import standin
from tests.inference.test_stats import stats
from tests.kinds import KINDS
from tests.tiny import near, tiny


def test_seconds_of_a_round_are_all_of_its_parts() -> None:
    costs = Costs((1.0, 1.25, 1.75), 0.5, (0.125, 0.25, 0.375), first=0.0625)
    assert [costs.round(k) for k in range(3)] == [1.125, 0.5625 + 1.25 + 0.25, 1.0625 + 1.75 + 0.375]
    assert costs.ratio == 0.5 / 1.125
    assert Costs((3.0, 1.0, 2.0), 0.5, (0.0, 0.0, 0.0)).rounds == (
        1.5,
        1.5,
        3.0,
    )  # timed beside work
    one = stats(10)
    rounds = one.times["target"]
    seconds = [one.seconds[name] / rounds for name in ("draft", "target", "verify", "other")]
    drafted, plain = of_stats(one, 2), of_stats(one, 0)
    assert astuple(drafted) == pytest.approx((seconds[0], seconds[1], seconds[2] + seconds[3]))
    assert astuple(plain) == pytest.approx((0.0, seconds[1], seconds[0] + seconds[2] + seconds[3]))
    assert drafted.seconds == pytest.approx(sum(seconds)) == plain.seconds and isinstance(plain, RealRound)


def test_rounds_are_timed_on_other_prompts_and_noise_each_time() -> None:
    calls: list[tuple[Any, int, int]] = []

    def begin(prompts: Any, max_new_tokens: int, sampling: Sampling, seed: int, ids: Any, ignore_eos: bool) -> Any:
        calls.append((prompts, seed, engine.policy.k))
        assert ignore_eos
        return Ended()

    engine: Any = SimpleNamespace(rows=2, policy=Fixed(9), begin=begin, rounds=iter, proposer=None)
    measure_rounds({"a": (engine, 3)}, [[n] for n in range(5)], sampling=Sampling(), max_new_tokens=4, seed=7)
    assert calls[:3] == [([[0], [1]], 7, 3), ([[2], [3]], 8, 3), ([[4], [0]], 9, 3)]
    assert len(calls) == 6 and engine.policy == Fixed(9)


class Ended(list[Any]):
    """A call of one round, after which no row is active. seconds: of its target pass."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(["a round"])
        self.stats, self.active, self.rows = Stats(), [], []
        self.stats.times["target"], self.stats.seconds["target"] = 1, seconds


def test_only_full_rounds_are_timed() -> None:
    """Rows end after different numbers of rounds, and the last rounds of a row draft fewer tokens. Such rounds take
    less time, and there are none in plain decoding of equally long texts: their mean would flatter the draft."""
    target, seen, texts = tiny(), [], [0]

    class Watched(Independent):
        def propose(self, round: Any) -> Any:
            seen.append(list(round.k))
            texts.append(max(map(len, round.texts)))
            return super().propose(round)

    engine = Engine(target, Watched(near(target)), rows=3)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    for K, tokens in ((1, 40), (2, 40), (4, 24)):  # in the first two, rows end while others could draft on
        seen.clear()
        measure_rounds({K: (engine, K)}, prompts, sampling=Sampling(1.0), max_new_tokens=tokens)
        assert len(seen) > 6 and all(k == [K] * 3 for k in seen), K
    seen.clear()
    engine.policy = Fixed(4)
    engine.generate(prompts, max_new_tokens=24, sampling=Sampling(1.0))
    assert any(k != [4] * 3 for k in seen)  # there are such rounds
    short = Watched(near(tiny(positions=24)))
    seen.clear()
    texts.clear()
    prompts = [[1 + (3 * i + n) % 30 for i in range(14)] for n in range(3)]
    measure_rounds({2: (Engine(target, short, rows=3), 2)}, prompts, sampling=Sampling(1.0), max_new_tokens=30)
    assert len(seen) > 4 and max(texts) <= 24 - 2  # the draft's context ends before the text
    few = measure_rounds({4: (engine, 4)}, prompts, sampling=Sampling(1.0), max_new_tokens=3)
    assert few[4].draft > 0  # not one is full: the first counts


def test_interleaved_costs_are_medians_of_a_round_robin():
    order, now = [], 0.0
    durations = {"a": iter([50, 3, 1, 2]), "b": iter([50, 7, 7, 7])}

    def task(name):
        def run():
            nonlocal now
            order.append(name)
            now += next(durations[name])

        return run

    result = interleaved({"a": task("a"), "b": task("b")}, repeats=3, warmup=1, clock=lambda: now)
    assert result == {"a": 2, "b": 7} and order == ["a", "b"] * 4


@pytest.mark.parametrize("kind", ["medusa"])
def test_no_task_is_timed_by_its_launches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the clock is read, the device has done all that it was given."""
    read = []

    def clock() -> float:
        assert not gpu.pending
        read.append(gpu.waits)
        return float(len(read))

    monkeypatch.setattr("inference.measure.costs.interleaved", partial(interleaved, clock=clock))
    with standin.device() as gpu:
        target = tiny().to("cuda")
        measure_costs(LM(target, rows=2), KINDS[kind].proposer(target), K=2, context=8, repeats=1, warmup=1)
    assert len(set(read)) > 10


def test_drafting_is_a_line_through_two_lengths(pair, monkeypatch):
    """7 seconds for two drafts and 19 for eight: 2 a step and 3 besides, of rounds that start with one lacking id."""
    drafted = []
    propose = Independent.propose

    def noted(self, round):
        drafted.append((round.k, list(self.stored)))
        return propose(self, round)

    def timed(tasks, *_):
        for task in [*tasks.values()] * 2:
            task()
        return {key: {("draft", 2): 7.0, ("draft", 8): 19.0}.get(key, 1.0) for key in tasks}

    monkeypatch.setattr(Independent, "propose", noted)
    monkeypatch.setattr("inference.measure.costs.interleaved", timed)
    result = measure_costs(LM(pair[0], 1), Independent(pair[1]), 2, context=10)
    assert (result.draft, result.first, result.drafting(0), result.drafting(4)) == pytest.approx((2, 3, 0, 11))
    assert drafted == [([2], [9]), ([8], [9])] * 2
    measure_costs(LM(pair[0], 2), Independent(pair[1]), 2, context=10)
    assert [stored for _, stored in drafted[4:]] == [[4, 9], [4, 9], [3, 8], [3, 8]]  # later some row lacks two


@pytest.mark.parametrize("seconds", [(1.0, 13.0), (9.0, 1.0), (0.0, 5.0), (3.0, 3.0)])
def test_no_draft_length_is_extrapolated_to_less_than_no_time(
    pair: Any, seconds: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However noisy the two lengths that were timed, alone or in real rounds."""
    monkeypatch.setattr(
        "inference.measure.costs.interleaved",
        lambda tasks, *_: {
            key: dict(zip((("draft", 2), ("draft", 8)), seconds, strict=True)).get(key, 1.0) for key in tasks
        },
    )
    alone = measure_costs(LM(pair[0], 1), Independent(pair[1]), 20, context=10)
    real = {k: RealRound(one, 1.0, 1.0) for k, one in zip((2, 8), seconds, strict=True)} | {0: RealRound(0.0, 1.0, 1.0)}
    for costs in (alone, calibrated(alone, real)):
        drafting = [costs.drafting(k) for k in range(21)]
        assert drafting == sorted(drafting) and drafting[0] == 0 and drafting[20] > 0
    both = {2: RealRound(7.0, 1.0, 1.0), 8: RealRound(19.0, 1.0, 1.0)}
    assert calibrated(alone, {0: RealRound(0.0, 1.0, 1.0), **both}).drafting(4) == pytest.approx(11)


def test_costs_are_measured_on_the_given_shapes(pair):
    widths = []
    target, draft = LM(pair[0], 3), Independent(pair[1])
    forward = target.forward

    def noted(ids, *rest, **options):
        widths.append(ids.shape)
        return forward(ids, *rest, **options)

    target.forward = noted
    result = measure_costs(target, draft, 2, context=10, repeats=1, warmup=0)
    assert widths.count((3, 1)) == 2 and widths.count((3, 2)) == 1 and widths.count((3, 3)) == 2
    assert len(result.target) == len(result.rest) == 3
    assert min(*result.target, *result.rest, result.draft) > 0
    assert (result.rows, result.context, result.target_dtype) == (3, 10, "float64")
    with pytest.raises(ValueError, match="context=254"):
        measure_costs(target, draft, 2, context=254)


TABLE = Costs((1.0, 1.2, 2.0, 2.0, 2.0), 0.1, (0.1,) * 5, first=0.2)


SLOW = {0: RealRound(0, 1.0, 0.1), 2: RealRound(0.8, 2.0, 0.2), 4: RealRound(1.6, 2.0, 0.3)}


@pytest.mark.parametrize("kind", ["eagle", "p_eagle", "block"])
def test_drafts_are_timed_where_slots_are_added(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longer drafts need them first, and the shorter ones find them there."""
    monkeypatch.setattr(eagle, "FIRST_SLOTS", 24)
    target = tiny()
    proposer: Any = KINDS[kind].proposer(target)
    costs = measure_costs(LM(target, 1), proposer, 2, context=23, repeats=1, warmup=1)
    assert costs.context == 23 and proposer.cache.slots > 24


def test_the_call_that_warms_up_is_not_counted() -> None:
    """As one that compiles does; medians of two would be moved by it."""
    calls = itertools.count()

    def begin(*_: Any) -> Any:
        return Ended(9.0 if next(calls) == 0 else 1.0 + next(calls))

    engine = SimpleNamespace(begin=begin, rounds=iter, policy=Fixed(2), rows=1, proposer=None)
    result = measure_rounds({2: (engine, 2)}, [[1]], sampling=Sampling(), max_new_tokens=4, until=-1.0)  # type: ignore
    assert result[2].target == (3.0 + 5.0) / 2


def test_a_calibrated_table_has_its_own_shape_at_the_level_of_real_rounds() -> None:
    result = calibrated(TABLE, SLOW)
    assert result.target == pytest.approx((1.0, 1.2, 2.0, 2.0, 2.0))  # as measured at 0, 2 and 4; the cliff stays
    assert result.rest == pytest.approx((0.1, 0.15, 0.2, 0.25, 0.3))
    assert (result.draft, result.first) == (pytest.approx(0.4), pytest.approx(0.0, abs=1e-9))
    for k, round in SLOW.items():
        assert result.round(k) == pytest.approx(round.seconds)
    assert calibrated(TABLE, {0: SLOW[0], 2: SLOW[2]}).drafting(4) == pytest.approx(
        2 * 0.6
    )  # the table's line, doubled


def test_passes_over_more_ids_take_no_less_time() -> None:
    assert never_falling([1.0, 2.0, 2.5]) == (1.0, 2.0, 2.5)
    assert never_falling([2.0, 1.0, 3.0]) == (1.5, 1.5, 3.0)
    given = [2.9, 5.0, 1.0, 0.5, 4.0, 4.5, 4.0, 9.0, 8.0]  # some means are of more lengths than others
    found = never_falling(given)
    assert list(found) == sorted(found) and sum(found) == pytest.approx(sum(given))

    def distance(some: Sequence[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(some, given, strict=True))

    generator = random.Random(0)
    for _ in range(2000):  # none that rises is nearer
        assert distance(sorted(one + generator.gauss(0, 0.3) for one in found)) >= distance(found)
