"""The choice of a draft length."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cotrain.planning import planner
from cotrain.planning.forecast import Forecast, acceptance
from cotrain.planning.planner import MeasuredCosts, plan_entries, plan_length
from inference.exactness.figures import Figures
from inference.measure.costs import Costs, RealRound
from tests.bench_stubs import chains_of, plan_of, rates_of
from tests.inference.measure.test_costs import TABLE
from tests.settings import resized


def test_plain_decoding_and_one_draft_are_considered_whatever_the_depths() -> None:
    sure, plan = rates_of((1.3, 1.32, 1.33, 1.33)), plan_of(bench=resized(plan_of().bench, depths=[3, 4]))
    rounds = {k: RealRound(0, 1, 0) for k in range(5)}

    def chosen(draft: float) -> Forecast:
        costs = Costs((1.0,) * 5, draft, (0.0,) * 5)
        return plan_length(plan, MeasuredCosts(costs, costs, rounds), sure)[0]

    assert chosen(0.2).k == 1 and plan_entries(chosen(0.2), "token")["plain_is_faster"] is False
    dear = chosen(0.6)
    assert dear.k == 1 and plan_entries(dear, "token")["plain_is_faster"] is True
    assert dear.speedups[0] == 1 > dear.speedups[1] > dear.speedups[3]
    assert plan_entries(chains_of(1, (1.0, 1.0)), "token")["plain_is_faster"]  # as fast, and simpler


def test_at_several_rows_the_rounds_of_rows_that_are_left_count(monkeypatch) -> None:
    """One of four rows takes twice the rounds of the others. A round of one row costs half of that of four when a draft
    is made, and a tenth of it without drafts."""
    lengths = torch.tensor([40, 40, 40, 80])
    r = torch.full((4, 80), 1.0, dtype=torch.float64)
    none, k = torch.zeros_like(r, dtype=torch.bool), torch.full((4, 80), 1)
    figures = Figures(torch.full_like(r, -0.1), torch.full_like(r, -0.1), r, none, none, k, lengths)
    plan = SimpleNamespace(bench=SimpleNamespace(rows=4), depths=[1], planned=None)
    table = Costs((0.95, 1.05), 0.1, (0.05, 0.05), 4)
    timed = MeasuredCosts(table, table, {1: RealRound(0.1, 1.05, 0.05)})
    rates = acceptance(figures, "token", 1)
    length, costs = plan_length(plan, timed, rates, one_row=(0.1, 0.6))  # type: ignore[arg-type]
    assert costs is timed  # rounds of this length were run before
    # plainly 40 rounds of four rows and 40 of one; with a draft half as many of each
    assert length.speedups == pytest.approx((1.0, (40 + 40 * 0.1) / (20 * 1.2 + 20 * 0.6))) and length.k == 1
    ran = []

    def rounds_of(plan, lengths, until):
        ran.extend(lengths)
        return {1: RealRound(0.1, 9.0, 0.05)}  # run, the draft is dear

    monkeypatch.setattr(planner, "rounds_of", rounds_of)
    plain = MeasuredCosts(table, table, {0: RealRound(0.0, 0.95, 0.05)})
    length, costs = plan_length(plan, plain, rates, one_row=(0.1, 0.6))  # type: ignore[arg-type]
    assert ran == [1] and length.speedup < 1 and costs is not plain


def test_the_tau_of_a_plan_is_that_of_its_draft_length(monkeypatch) -> None:
    """With several rows, it is chosen again for batches that are decoded alone, if the texts fill one."""
    costs, rates = MeasuredCosts(TABLE, TABLE, {}), rates_of((1.5, 1.8, 1.9))
    full, asked = chains_of(3, (1.0, 1.1, 1.2, 1.3), rates), []
    monkeypatch.setattr(planner, "measure_acceptance", lambda *given: rates)
    monkeypatch.setattr(planner, "plan_length", lambda *given: (replace(full, k=2) if given[4:] else full, costs))
    monkeypatch.setattr(planner, "measured_costs", lambda plan, until: asked.append(plan.bench.rows) or costs)
    monkeypatch.setattr(planner, "best_tree", lambda *given: None)
    for rows, k, tau in ((1, 3, 1.9), (4, 2, 1.8), (8, 3, 1.9)):
        plan, known, chosen = planner.plan_draft(plan_of(bench=resized(plan_of().bench, rows=rows)), costs, "texts")  # type: ignore[arg-type]
        assert (chosen.length, chosen.tau, chosen.speedup) == (k, pytest.approx(tau), full.speedups[k])
        assert known is costs and plan.tree is None
    assert asked == [1]
