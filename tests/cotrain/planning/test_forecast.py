"""Forecasts against their definitions, and what noise must not decide."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cotrain.acceptance import iid_tau
from cotrain.planning.forecast import Acceptance, acceptance, alone, forecast, stops_paying
from inference.exactness.figures import Figures
from inference.measure.costs import Costs
from tests.bench_stubs import rates_of

K = 4


def costs(target: tuple[float, ...] = (1.0, 1.05, 1.1, 1.15, 1.2), draft: float = 0.1, rows: int = 1) -> Costs:
    return Costs(target, draft, (0.02,) * 5, rows)


def calls(alpha: float | Tensor, texts: int = 40, tokens: int = 400) -> Acceptance:
    """Long texts whose drafts are accepted with the same probability at every depth; alpha (N,) for each text."""
    each = torch.as_tensor(alpha, dtype=torch.float64).expand(texts)
    lengths = torch.full((texts,), float(tokens), dtype=torch.float64)
    rows = [lengths / torch.tensor([iid_tau(float(a), k) for a in each], dtype=torch.float64) for k in range(K + 1)]
    return Acceptance(torch.stack(rows), lengths, torch.zeros(K + 1, 1, texts))


def figures(r: Tensor, lengths: Tensor) -> Figures:
    """Figures of texts whose tokens' drafts are accepted with probability r (B, T)."""
    none, whole = torch.zeros_like(r, dtype=torch.bool), torch.full(r.shape, K)
    return Figures(torch.full_like(r, -0.1), r.log() - 0.1, r, none, none, whole, lengths)


def test_seconds_per_token_decide() -> None:
    one = forecast(calls(0.8), costs())
    speed = [iid_tau(0.8, k) * 1.02 / (k * 0.1 + 1 + 0.05 * k + 0.02) for k in range(K + 1)]
    assert one.speedups == pytest.approx(speed) and one.k == one.fastest == max(range(K + 1), key=speed.__getitem__)
    assert one.perfect == pytest.approx(5 * 1.02 / 1.62)
    edge = one.break_even
    at, below = (max(iid_tau(edge + d, k) * 1.02 / one.seconds[k] for k in range(1, K + 1)) for d in (1e-6, -1e-3))
    assert at == pytest.approx(1, abs=1e-4) and below < 1


def test_a_draft_that_costs_more_than_it_saves_is_not_used() -> None:
    none = forecast(calls(0.9), costs(target=(1.0, 3.0, 5.0, 7.0, 9.0)))
    assert none.k == none.fastest == 0 and none.break_even is None and none.perfect == 1
    some = {1: forecast(calls(0.8), costs()), 8: none, 32: none}
    assert stops_paying(some) == 8 and stops_paying({1: some[1]}) is None
    assert stops_paying({1: none, 8: some[1]}) is None


def test_a_length_that_noise_prefers_is_not_chosen() -> None:
    """Texts whose best length differs: on most draws of the texts a longer draft looks a little faster by chance."""
    torch.manual_seed(1)
    longer = wrong = 0
    for _ in range(60):
        alpha = (0.45 + 0.25 * torch.randn(10, dtype=torch.float64)).clamp(0.02, 0.95)
        one = forecast(calls(alpha, 10), costs(draft=0.28))
        assert one.k <= one.fastest
        longer += one.fastest > one.k
        wrong += one.undecided
        assert one.gain >= 0
    assert longer > 10 and wrong > 10
    sure = forecast(calls(0.9, 200), costs())
    assert sure.k == sure.fastest == K and not sure.undecided and sure.errors[K] < 1e-6


def test_the_error_is_the_spread_of_other_samples() -> None:
    torch.manual_seed(0)
    taus, speeds, said_tau, said = [], [], [], []
    for _ in range(300):
        alpha = 0.3 + 0.5 * torch.rand(30, dtype=torch.float64)
        one = forecast(calls(alpha, 30), costs())
        taus.append(one.acceptance.tau(3))
        speeds.append(one.speedups[3])
        said_tau.append(one.acceptance.error(3))
        said.append(one.errors[3])
    for values, errors in ((taus, said_tau), (speeds, said)):
        spread, mean = float(torch.tensor(values).std()), sum(errors) / len(errors)
        assert mean == pytest.approx(spread, rel=0.12)


def test_one_text_leaves_everything_open() -> None:
    one = forecast(calls(0.8, 1), costs())
    assert math.isinf(one.errors[2]) and math.isinf(one.acceptance.error(2)) and one.k == 0


def test_the_profile_is_that_of_the_expected_rounds() -> None:
    r = torch.full((3, 1000), 0.6, dtype=torch.float64)
    rates = acceptance(figures(r, torch.full((3,), 1000)), "token", K)
    found: Any = rates.by_depth
    assert found["conditional"] == pytest.approx([0.6] * K, abs=8e-3)
    assert found["prefix"] == pytest.approx([0.6**n for n in range(1, K + 1)], abs=8e-3)
    assert found["histogram"] == pytest.approx([0.4 * 0.6**n for n in range(K)] + [0.6**K], abs=8e-3)
    assert sum(found["histogram"]) == pytest.approx(1) and rates.alpha == pytest.approx(0.6)


def test_samples_of_rounds_have_the_expected_number() -> None:
    torch.manual_seed(1)
    lengths = torch.full((300,), 25)
    lengths[::3] = 11
    found = acceptance(figures(torch.rand(300, 25, dtype=torch.float64), lengths), "block", K)
    for k in range(1, K + 1):
        means, wanted = found.samples[k].double().mean(1), float(found.calls[k].mean())
        assert abs(float(means.mean()) - wanted) < 4 * float(means.std()) / 4
        assert float(found.samples[k].double().var(0).mean()) > 0.3  # they are runs, not copies of one


def test_a_batch_alone_pays_for_the_rows_that_are_left() -> None:
    """By hand: three rows that end after 2, 5 and 6 rounds with drafts, and after 8 without. Rounds of few rows cost
    less than rounds of all rows, but more per row."""
    ends = torch.tensor([[[8, 8, 8]], [[6, 2, 5]]])
    table = {1: (1.0, 1.5), 2: (1.2, 2.0), 3: (1.4, 2.5)}
    one = Acceptance(torch.tensor([[8.0, 8.0, 8.0], [6.0, 2.0, 5.0]]), torch.full((3,), 8.0), ends)
    assert alone(one, table, 3) == pytest.approx((1.0, 8 * 1.4 / (2 * 2.5 + 3 * 2.0 + 1.5)))
    assert alone(one, table, 1) == pytest.approx((1.0, 24 * 1.0 / (13 * 1.5)))
    assert alone(one, table, 4) == ()


def test_batches_of_texts_in_any_order() -> None:
    """Each sample has other batches: texts of two sorts, sorted, would otherwise only meet their own sort."""
    ends = torch.cat((torch.full((1, 16, 20), 10), torch.tensor([2] * 10 + [10] * 10).expand(1, 16, 20)))
    one = Acceptance(ends[:, 0].double(), torch.full((20,), 10.0), ends)
    mixed = alone(one, {1: (1.0, 1.0), 2: (1.0, 1.0)}, 2)[1]
    assert mixed == pytest.approx(10 / (10 * (1 - 9 / 38) + 2 * 9 / 38), rel=0.06)  # 9 / 38: both of the short sort


def test_the_best_length_lies_past_a_cliff_or_is_none() -> None:
    cliff = forecast(rates_of([1 + 0.9 * k for k in range(1, 5)]), Costs((1.0, 2.0, 2.0, 2.0, 2.0), 0.01, (0.0,) * 5))
    assert cliff.k == 4 and cliff.speedups[1] < 1  # a local rule stops there
    assert forecast(rates_of((1.2,)), Costs((1.0, 2.0), 0.5, (0.1, 0.1))).k == 0
