"""The matrix of arms over temperatures and batch sizes, with real engines."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotrain.bench import matrix
from cotrain.bench.plan import Plan
from cotrain.bench.planner import taus
from inference import Sampling
from inference.measure.floor import Machine
from tests.folders import network, tokenizer
from tests.kinds import medusa


def plan_of(verify: str = "token", kind: str = "independent") -> Plan:
    target = network()
    draft: Any = medusa(target) if kind == "medusa" else network(layers=1, seed=0)
    for model in (target, draft)[: 1 if kind == "medusa" else 2]:
        model.generation_config.eos_token_id = None
    size = SimpleNamespace(
        prompts=2, quick_prompts=1, prompt_tokens=8, new_tokens=8, parity_tokens=10, rows=1, depths=[2, 3], minutes=0,
        interval=0.1,
        draft_dtype="bfloat16", draft_int8=True, compile=False, seed=0,
    )  # fmt: skip
    return Plan(target, tokenizer(), draft, Sampling(), verify, size, ("t", "d"), kind=kind)  # type: ignore[arg-type]


def test_the_length_is_planned_for_the_rule_that_verifies() -> None:
    token, block = (taus(plan_of(verify=rule)) for rule in ("token", "block"))
    assert token[1] == pytest.approx(block[1]) and all(token[k] < block[k] for k in (2, 3))


def test_every_cell_is_timed_beside_what_its_costs_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.measure.costs.MOST", 1)
    monkeypatch.setattr("cotrain.bench.planner.SHAPE", 1)
    monkeypatch.setattr(matrix, "measure_machine", lambda *_: Machine(1e9, 1e9))
    monkeypatch.setattr(matrix, "QUEUE", 1)
    plan = plan_of()
    said: list[str] = []
    cells = matrix.matrix(plan, matrix.Grid([0.0, 1.0], [1, 2], 2, None, tmp_path), said.append)
    assert [(cell["temperature"], cell["rows"]) for cell in cells] == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert plan.bench.rows == 1  # the plan that was given is left alone
    for cell in cells:
        assisted = {"transformers assisted", "transformers matched"}
        assert (assisted <= set(cell["arms"])) == (cell["rows"] == 1)
        costs = cell["costs"]
        assert cell["prompts"] >= 3 * cell["rows"] and costs["draft_dtype"] == "int8"
        arms = cell["arms"]
        assert arms["plain"]["over_plain"]["value"] == 1 and arms["plain"]["tau"] == 1
        chosen = arms["speculative"]
        plain, whole = (
            k * costs["draft"] + bool(k) * costs["first"] + costs["target"][k] + costs["rest"][k]
            for k in (0, chosen["k"])
        )
        assert chosen["allowed"] == pytest.approx(chosen["tau"] * plain / whole)
    assert any("of what costs allow" in text for text in said)


def test_heads_have_no_assistant_and_no_more_drafts_than_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.measure.costs.MOST", 1)
    monkeypatch.setattr("cotrain.bench.planner.SHAPE", 1)
    machine = Machine(1e9, 1e9)
    plan, grid = plan_of(kind="medusa"), matrix.Grid([1.0], [1], 4, None, tmp_path)
    plan.bench.depths = [2, 3, 8]  # of three heads
    cell = matrix._cell(plan, grid, {}, machine)
    assert set(cell["arms"]) == {"speculative", "speculative k=3", "plain", "ngram", "transformers"}
    assert cell["arms"]["speculative k=3"]["of_allowed"] > 0 and len(cell["costs"]["target"]) == 4
    (plain, whole) = (cell["floor"][f"{name}_bytes"] for name in ("plain", "round"))
    assert 0 < whole - plain < 0.1 * plain  # the target's pass over more ids, and nothing of the heads


def test_a_matrix_keeps_the_other_settings_of_the_regime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    met: list[Sampling] = []
    monkeypatch.setattr(matrix, "measure_machine", lambda *_: None)
    monkeypatch.setattr(matrix, "_cell", lambda plan, *_: met.append(plan.sampling))
    monkeypatch.setattr(matrix, "line", lambda _: "")
    cut = replace(plan_of(), sampling=Sampling(1.0, top_k=9, top_p=0.9))
    matrix.matrix(cut, matrix.Grid([0.5, 1.0], [1], 2, None, tmp_path), lambda _: None)
    assert met == [Sampling(0.5, top_k=9, top_p=0.9), Sampling(1.0, top_k=9, top_p=0.9)]
