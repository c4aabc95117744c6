"""Forecasts of costs on a GPU, on figures by hand; the parts of a day on one that need no model."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cotrain.planning.costs_file import speedups_of
from studies import gpu_costs, gpu_day
from studies.floor import Machine

CHIP = Machine(1e12, 1e15)


def test_a_pass_takes_its_bytes_or_its_operations() -> None:
    model = gpu_costs.Model(1e9, 1000, 100)
    assert model.seconds(CHIP, 2, 3, 50) == pytest.approx((2e9 + 2 * 1000 * 53 + 8 * 2 * 3 * 100) / 1e12)
    assert model.seconds(CHIP, 2, 3000, 50) == pytest.approx(2 * 6000 * 1e9 / 1e15)


def test_costs_of_rounds_are_those_of_their_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        gpu_costs, "overhead", lambda kind, rows: {"plain": 0.001, "eagle": 0.002, "block": 0.003}[kind]
    )
    target = gpu_costs.Model(1e9, 0, 0)
    draft = SimpleNamespace(fc=torch.nn.Linear(1000, 100), config=SimpleNamespace(draft_vocab_size=0))
    draft.parameters = lambda: [*draft.fc.parameters(), torch.zeros(900, 1000)]
    eagle, block = (gpu_costs.forecast(target, kind, draft, CHIP, 1, 2) for kind in ("eagle", "block"))
    assert eagle.target == block.target == pytest.approx((0.002, 0.002, 0.002))
    assert eagle.rest == pytest.approx((0.001, 0.002, 0.002)) and block.rest == pytest.approx((0.001, 0.003, 0.003))
    fc = 2 * 100_100 / 1e12
    assert (eagle.first, eagle.draft) == pytest.approx((fc, 2 * 900_000 / 1e12))
    assert (block.first, block.draft) == pytest.approx((fc + 2 * 900_000 / 1e12, 0))
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"costs": {"e": {"1": asdict(eagle)}, "b": {"1": asdict(block)}}}))
    found = speedups_of(str(file), [1], 2)
    assert [one["draft"] for one in found] == ["e", "b"]
    speedup, k = found[0]["speedups"]["0.5"]
    assert k == 2 and speedup == pytest.approx(1.75 * 0.003 / eagle.round(2))


def test_a_step_past_the_deadline_is_said_and_an_error_ends_no_part(tmp_path: Path) -> None:
    day = gpu_day.Day(gpu_day.Asked("d", tmp_path / "out", scratch=tmp_path))
    day.step("broken", lambda: 1 / 0)
    day.step("one", lambda number: number + 1, 1)
    day.until = 0.0
    day.step("late", lambda: 1 / 0)
    steps = json.loads((tmp_path / "out" / "d.json").read_text())["steps"]
    assert steps["one"]["result"] == 2 and steps["late"]["not_run"] == gpu_day.OVER
    assert steps["broken"]["error"].startswith("ZeroDivisionError")
