"""The table of quantised weights."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from studies import matrix, quantisation_table
from studies.quantisation_table import table
from tests.bench_stubs import RANKING, REGIME, Timed, met, plan_of  # noqa: F401
from tests.cotrain.bench.test_measurement import plan
from tests.cotrain.commands.test_train import SIZES
from tests.draft_folders import draft_folder
from tests.folders import network, target_folder
from tests.inference.test_drafting import calls  # noqa: F401 - a fixture
from tests.studies.test_matrix import real_plan


def test_acceptance_in_the_table_of_weights_is_of_one_draft() -> None:
    """Of a draft with a distribution a depth, not the sum over its depths."""
    one_plan = plan("parallel")
    one_plan = replace(one_plan, draft=one_plan.target)
    one_plan.draft.config.pard_depths = 3
    held = quantisation_table._with(one_plan, "none")
    assert quantisation_table._cell(held, quantisation_table._texts(held), 3)["alpha"] == pytest.approx(1, abs=1e-4)


def test_the_table_has_each_target_temperature_and_draft() -> None:
    plan = real_plan()
    target, other = plan.target, network(seed=2)
    plan = replace(plan, draft=target, bench=SimpleNamespace(**vars(plan.bench) | {"draft_dtype": "auto"}))
    loaded: list[str] = []

    def load(kind: str) -> torch.nn.Module:
        loaded.append(kind)
        return target if kind == "none" else other

    lines: list[str] = []
    cells = table(plan, load, ["none", "int8"], ["none", "nf4"], [0.0, 1.0], 2, lines.append)
    assert loaded == ["none", "int8"] and len(cells) == len(lines) == 8
    by_cell = {(cell["target"], cell["temperature"], cell["draft"]): cell for cell in cells}
    same = by_cell["none", 1.0, "none"]
    assert same["alpha"] > 0.999 and 2.5 < same["tau"] <= 3  # a draft that is the target
    assert by_cell["none", 1.0, "nf4"]["alpha"] < 0.99 and by_cell["int8", 1.0, "none"]["alpha"] < 0.7
    assert all(cell["speedup"]["value"] > 0 and cell["tokens"] > 0 for cell in cells)


def test_the_command_adds_the_table_to_the_report(tmp_path: Path) -> None:
    target = target_folder(tmp_path / "target")
    draft = draft_folder(tmp_path / "draft", target, "independent")
    sizes = [setting for setting in SIZES if setting.startswith("bench.")]
    asked = ["matrix.targets=[none,int8]", "matrix.drafts=[none]", "matrix.temperatures=[1]", "matrix.k=2"]
    paths = [f"target.path={target}", f"draft.path={draft}", f"output={tmp_path / 'bench'}"]
    matrix.main([*paths, *sizes, *asked])
    cells = json.loads((tmp_path / "bench" / "report.json").read_text())["extra"]["bits"]
    assert [cell["target"] for cell in cells] == ["none", "int8"] and cells[0]["alpha"] != cells[1]["alpha"]


def test_a_cell_of_weights_is_of_the_draft_as_it_is_held(
    met: list[Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafted = torch.tensor([[1, 2, 0], [2, 0, 0]])
    alpha = torch.tensor([[0.5, 0.25, 9], [0.75, 9, 9]])
    figures = SimpleNamespace(lengths=torch.tensor([3, 2]), k=drafted, alpha=alpha)
    figures.first = lambda one: one
    asked, seen = list[Any](), list[Any]()
    monkeypatch.setattr(quantisation_table, "pair_figures", lambda *given: asked.append(given) or figures)
    rates = lambda figures, verify, k: SimpleNamespace(tau=lambda k: (verify, k))  # noqa: E731
    monkeypatch.setattr(quantisation_table, "acceptance", rates)
    monkeypatch.setattr(quantisation_table, "rounded", lambda draft, kind: seen.append((draft, kind)) or draft)
    monkeypatch.setattr(quantisation_table, "line", lambda cell: "")
    plan = plan_of(objective="greedy", bench=replace(plan_of().bench, draft_dtype="float32"))

    class Named(str):
        config = SimpleNamespace(is_encoder_decoder=False)

    held: Any = lambda kind: Named(f"target {kind}")  # noqa: E731
    cells = quantisation_table.table(plan, held, ["none", "nf4"], ["none", "int8"], [0.0, 0.5], 2)
    wanted = [(t, at, d) for t in ("none", "nf4") for at in (0.0, 0.5) for d in ("none", "int8")]
    assert [(cell["target"], cell["temperature"], cell["draft"]) for cell in cells] == wanted
    assert {kind for _, kind in seen} == {"none", "int8"} and {draft.dtype for draft, _ in seen} == {torch.float32}
    texts = [round for round in met if list(round["arms"]) == ["plain"]]
    timed = [round for round in met if "speculative" in round["arms"]]
    assert len(texts) == 4 and len(timed) == len(asked) == 8
    for round, (target, at, _) in zip(texts, wanted[::2], strict=True):
        assert round["prompts"] == plan.ranking(2, 64) and (round["rows"], round["seed"]) == (32, 17)
        arm = round["arms"]["plain"]
        assert (arm.engine.target, arm.sampling) == (f"target {target}", replace(REGIME, temperature=at))
    for round, given, cell, (target, at, draft) in zip(timed, asked, cells, wanted, strict=True):
        fast, slow = (round["arms"][name] for name in ("speculative", "plain"))
        assert round["prompts"] == RANKING[:2] and (round["rows"], round["seed"]) == (3, 17)
        assert {fast.engine.target, slow.engine.target, given[0].target} == {f"target {target}"}
        assert {fast.sampling.temperature, slow.sampling.temperature, given[3].temperature} == {at}
        assert given[1].greedy and given[0].rows == 32 and fast.engine.rows == slow.engine.rows == 3
        assert (given[2].prompts, given[4:]) == ([["plain"]], (6, 0.0)) and fast.engine.policy.k == 2
        figures_of = {"alpha": pytest.approx(0.5), "tau": ("block", 2), "tokens": 5, "plain": 20.0, "k": 2,
                      "speedup": Timed([], [], 0, 0).ratio("speculative", "plain")._asdict()}  # fmt: skip
        assert cell == figures_of | {"target": target, "temperature": at, "draft": draft}
    assert plan.bench.draft_int8 is False
