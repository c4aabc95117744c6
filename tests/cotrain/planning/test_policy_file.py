"""The file of an adaptive policy: its estimates are those of the rounds that it was fitted to."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotrain.planning import policy_file
from cotrain.planning.policy_file import (
    BY_RATE,
    RowRound,
    content,
    decision_seconds,
    estimates,
    logistic,
    observed,
    policy_of,
    replayed,
    share,
)
from inference import Engine, Sampling
from inference.adaptive_policy import Adaptive, CallDecisions, Estimates, Recent, estimate, inputs
from inference.drafts.atomic import write_json
from inference.measure.costs import Costs
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from tests.tiny import near, tiny

PROMPTS = [[(7 * i + 5 * n) % 30 + 1 for i in range(4)] for n in range(30)]


def test_observed_rounds_are_those_of_the_longest_chains() -> None:
    target = tiny()
    engine = Engine(target, Independent(near(target)), policy=Fixed(1), rows=8)
    rounds = observed(engine, 3, PROMPTS, Sampling(0.9), 20, 1)
    assert engine.policy == Fixed(1)
    engine.policy = Fixed(3)
    stats = engine.generate(PROMPTS, max_new_tokens=20, sampling=Sampling(0.9), seed=1).stats
    assert sum(one.seen for one in rounds) == sum(stats.tried)
    assert sum(one.accepted for one in rounds) == sum(stats.accepted)
    assert share(rounds) == pytest.approx(sum(stats.accepted) / sum(stats.tried))
    assert sum(one.seen > 1 for one in rounds) == stats.tried[1]
    assert all(len(one.top) == one.drafted and len(set(one.top)) == len(one.top) for one in rounds)
    assert all((one.top > 1 / 32).all() and (one.top < 1).all() for one in rounds)  # of a vocabulary of 32
    assert rounds[0].recent == Recent()


def test_a_round_has_what_its_row_had_when_it_began() -> None:
    target = tiny()
    rounds = observed(Engine(target, Independent(near(target)), rows=1), 3, PROMPTS[:1], Sampling(0.9), 30, 1)
    tried = [one.recent.tried for one in rounds]
    assert (
        tried[0] == 0
        and 0 < tried[1] <= 3
        and all(now > before for before, now in zip(tried, tried[1:5], strict=False))
    )


def test_estimates_are_those_of_the_process_that_made_the_rounds() -> None:
    """Acceptance that depends on the probability of the likeliest token; the next draft's on that of the one before."""
    torch.manual_seed(0)
    rounds, top = [], torch.rand(6000, 2).double().numpy()
    for tops in top:
        accepted = 0
        if torch.rand(()) < tops[0]:
            accepted = 1 + bool(torch.rand(()) < 0.2 + 0.6 * tops[0])
        rounds.append(RowRound(Recent(), tops, 2, accepted))
    fit = estimates(0.5, rounds)
    for value in (0.2, 0.5, 0.9):
        given = inputs(np.array([0.5]), np.array([value]))
        assert estimate(fit.ahead, given) == pytest.approx(0.2 + 0.6 * value, abs=0.06)
    assert estimate(fit.here, inputs(np.array([0.5]), np.array([0.9])))[0] > 0.7


def test_rates_are_those_of_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's recent acceptance is shrunk to the mean in the fit as in a call."""
    read: list[float] = []
    true = policy_file.inputs
    monkeypatch.setattr(policy_file, "inputs", lambda rates, top: read.extend(rates) or true(rates, top))
    rounds = [RowRound(Recent(tried, 2.0), np.array([0.3, 0.6]), 2, n % 3) for n, tried in enumerate([3.0, 9.0] * 400)]
    fit = estimates(0.9, rounds)
    serving = CallDecisions(Adaptive({1: (1.0, 1.0)}, fit), {0: Recent(3.0, 2.0), 1: Recent(9.0, 2.0)})
    assert {*read} == {serving.rate(0), serving.rate(1)}


def test_drafts_that_are_not_asked_are_estimated_by_their_recent_acceptance() -> None:
    target = tiny()
    rounds = observed(Engine(target, NGram(), rows=8), 3, PROMPTS[:5], Sampling(0), 12, 1)
    assert rounds and all(len(one.top) == 0 for one in rounds)
    fit = estimates(share(rounds), rounds)
    assert fit.here == fit.ahead == BY_RATE
    assert estimate(fit.here, inputs(np.array([0.3, 0.8]), np.ones(2))) == pytest.approx([0.3, 0.8])
    assert policy_of({1: TABLE}, fit, rounds, 32, torch.device("cpu")).deciding == {}


TABLE = Costs((1.0, 1.1, 1.2), 0.1, (0.05, 0.05, 0.05), first=0.02)


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    policy = policy_of({8: TABLE, 1: TABLE}, estimates(0.6, []), [], 32, torch.device("cpu"))
    policy = replace(policy, deciding={8: 0.125}, draft="hash")
    file = tmp_path / "policy.json"
    write_json(file, content(policy))
    assert Adaptive.load(file) == policy and list(policy.seconds) == [1, 8]
    write_json(file, content(replace(policy, deciding=None)))
    assert Adaptive.load(file).decision(1) == 0.0  # everywhere
    assert policy.seconds[1] == pytest.approx([TABLE.round(k) for k in range(3)])


# --- whether deciding pays

ROUNDS = [RowRound(Recent(), np.full(2, top), 2, accepted) for top, accepted in ((0.9, 2), (0.1, 0)) * 60]
TELLING = Estimates(0.5, (-3.0, 0.0, 6.0, 0.0), (-3.0, 0.0, 6.0, 0.0))  # the likeliest token's probability tells


def test_rounds_are_replayed_as_they_would_be_decoded() -> None:
    """One row: a sure round drafts both tokens, another one ends after the first."""
    seconds = (1.0, 1.25, 1.75)
    asking = Adaptive({1: seconds}, TELLING, {1: 0.125})
    assert replayed(asking, ROUNDS, 1) == pytest.approx((3 + 1) / (1.75 + 0.25 + 1.25 + 0.125))
    k = Adaptive({1: seconds}, TELLING, {}).begin().open([0], True)
    assert replayed(Adaptive({1: seconds}, TELLING, {}), ROUNDS, 1) == pytest.approx((min(2, k) + 2) / 2 / seconds[k])
    # two rows share a round, and its length is that of the sure one if its gain is worth the seconds of both
    for last, wanted in ((1.5, 4 / 1.5), (1.75, 3 / 1.25)):
        both = Adaptive({2: (1.0, 1.25, last)}, TELLING, {2: 0.0})
        assert replayed(both, ROUNDS, 2) == pytest.approx(wanted)
    assert replayed(asking, ROUNDS[:3], 4) == 0.0  # too few
    bad = [RowRound(Recent(99.0, 0.0), one.top, 2, one.accepted) for one in ROUNDS]  # rows that accepted nothing lately
    plain = Adaptive({1: seconds}, Estimates(0.5, TELLING.here, TELLING.ahead), {})
    assert replayed(plain, bad, 1) == 1.0 != replayed(plain, ROUNDS, 1)
    unequal = [RowRound(Recent(), np.full(1, 0.9), 1, 1), *ROUNDS]  # a row's last round, which drafted less
    assert replayed(asking, unequal, 1) == replayed(asking, ROUNDS, 1)


@pytest.mark.parametrize(("seconds", "paying"), [(0.01, {1: 0.01}), (0.4, {})])
def test_deciding_is_left_out_where_it_costs_more_than_it_gains(
    seconds: float, paying: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_file, "decision_seconds", lambda policy, rows, vocabulary, device: seconds)
    costs = {1: Costs((1.0, 1.1, 1.2), 0.2, (0.0, 0.0, 0.0))}
    assert policy_of(costs, TELLING, ROUNDS, 32, torch.device("cpu")).deciding == paying


def test_a_decision_is_timed_with_the_reading_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    see, goes_on = CallDecisions.see, CallDecisions.goes_on

    def seen(self: CallDecisions, depth: int, logits: torch.Tensor, temperature: torch.Tensor) -> None:
        assert self.asks
        calls.append(("see", tuple(logits.shape)))
        time.sleep(0.002)
        see(self, depth, logits, temperature)

    def decided(self: CallDecisions, depth: int, room: Sequence[int]) -> bool:
        calls.append(("goes_on", len(room)))
        time.sleep(0.003)
        return goes_on(self, depth, room)

    monkeypatch.setattr(CallDecisions, "see", seen)
    monkeypatch.setattr(CallDecisions, "goes_on", decided)
    policy = Adaptive({3: (1.0, 1.1, 1.2)}, TELLING, {})
    assert 0.005 < decision_seconds(policy, 3, 32, torch.device("cpu")) < 0.05
    assert calls[:2] == [("see", (3, 32)), ("goes_on", 3)]


def test_the_fit_recovers_a_known_map() -> None:
    x = torch.randn(3000, 5, generator=torch.Generator().manual_seed(0)).double() * 3 + 1
    w, b = torch.tensor([0.5, -1.0, 0.0, 2.0, 0.1]).double(), 0.7
    weight, bias = logistic(x, torch.sigmoid(x @ w + b), 0.0)
    assert torch.allclose(weight, w, atol=1e-9) and float(bias) == pytest.approx(b, abs=1e-9)


def test_the_fit_is_the_minimum_and_a_constant_input_gets_nothing() -> None:
    """Also of labels that a line separates, where Newton's whole steps would diverge without the ridge."""
    g = torch.Generator().manual_seed(0)
    x = torch.cat(
        (torch.rand(100, 3, generator=g, dtype=torch.float64), torch.full((100, 1), 4.0, dtype=torch.float64)), 1
    )
    for labels in (torch.rand(100, generator=g, dtype=torch.float64), (x[:, 0] > 0.5).double()):
        weight, bias = logistic(x, labels, 0.01)
        gap = torch.sigmoid(x @ weight + bias) - labels
        deviation = x.std(0, correction=0)
        slope = ((x - x.mean(0)).T @ gap / 100)[:3] + 0.01 * weight[:3] * deviation[:3].square()
        assert weight[3] == 0 and abs(float(gap.mean())) < 1e-9 and float(slope.abs().max()) < 1e-9
