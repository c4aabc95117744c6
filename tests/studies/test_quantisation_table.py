"""The table of quantised weights."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from studies import matrix, quantisation_table
from studies.quantisation_table import table
from tests.cotrain.bench.test_measurement import plan
from tests.cotrain.commands.test_train import BENCH
from tests.draft_folders import draft_folder
from tests.folders import network, target_folder
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
    asked = ["matrix.targets=[none,int8]", "matrix.drafts=[none]", "matrix.temperatures=[1]", "matrix.k=2"]
    paths = [f"target.path={target}", f"draft.path={draft}", f"output={tmp_path / 'bench'}"]
    matrix.main([*paths, *BENCH, *asked])
    cells = json.loads((tmp_path / "bench" / "report.json").read_text())["extra"]["bits"]
    assert [cell["target"] for cell in cells] == ["none", "int8"] and cells[0]["alpha"] != cells[1]["alpha"]
