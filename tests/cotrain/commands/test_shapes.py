"""Shapes without a draft: what is composed, timed and said."""

import json
from pathlib import Path
from typing import Any

import pytest

from cotrain.cli import main
from cotrain.commands.shapes import ACCEPTANCES, entry, shape_table
from cotrain.planning.forecast import at_acceptance, break_even
from inference.measure.costs import Costs
from tests.cotrain.students.test_initial_settings import target as target  # a fixture

SMALL = "bench.new_tokens=6 bench.depths=[1,2] bench.quick_prompts=1 bench.prompt_tokens=8 threads=1".split()
CHEAP = Costs((1.0, 1.1, 1.2), 0.1, (0.0,) * 3)
DEAR = Costs((1.0, 1.1, 1.2), 2.0, (0.0,) * 3, rows=8)


def plan(target: Path, *settings: str) -> int:
    return main(
        ["plan", f"target.path={target}", f"output={target.parent / 'plan'}", "overwrite=true", *SMALL, *settings]
    )


def test_shapes_of_several_kinds_are_timed(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.measure.costs.MOST", 1)
    assert plan(target, 'shapes=["draft=eagle", "init=target_layers init.layers=[0]"]', "batches=[1,2]") == 0
    found = json.loads((target.parent / "plan" / "plan.json").read_text())["shapes"]
    assert [shape["kind"] for shape in found] == ["eagle", "independent"]
    assert len({shape["parameters"] for shape in found}) == 2
    for shape in found:
        assert set(shape["rows"]) == {"1", "2"}
        for cell in shape["rows"].values():
            assert len(cell["seconds_per_round"]) == 3 and min(cell["seconds_per_round"]) > 0
            assert set(cell["by_acceptance"]) == {f"{a:g}" for a in ACCEPTANCES}
    said = capsys.readouterr().out
    assert "break-even" in said and "draft=eagle" in said


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (['shapes=["draft=nope"]'], "shapes: 'draft=nope': draft=nope: draft is one of block, "),
        (['shapes=["draft.layer=1"]'], "'draft.layer=1': no key 'draft.layer'; the nearest is 'draft.layers'"),
        (["shapes=[draft=eagle,init.layers=[0,1]]"], """: write 'shapes=["draft=eagle","init.layers=[0,1]"]'"""),
        (['shapes=["lr=1"]'], "shapes: 'lr=1': no key 'lr'; the setting is optimizer.lr="),
        (
            ['shapes=["draft.layers=1"]'],
            "draft.layers=1: the setting has no effect here: independent drafts read it only",
        ),
        (['shapes=["draft=eagle"]', "drafts=[some]"], "without a draft folder"),
        ([], "draft.path="),
        (['shapes=["draft=eagle"]', "measure=true"], "leave out"),
    ],
)
def test_wrong_shapes_are_named(
    target: Path, settings: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(target, *settings) != 0
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_the_break_even_acceptance_is_where_the_best_length_starts_to_pay() -> None:
    edge: Any = break_even(CHEAP.rounds)
    assert at_acceptance(CHEAP.rounds, edge + 1e-6)[0] > 1 and at_acceptance(CHEAP.rounds, edge - 1e-6) == (1.0, 0)
    assert break_even(DEAR.rounds) is None


def test_a_shape_that_cannot_pay_has_a_dash() -> None:
    lines = shape_table([entry("draft=x", "x", 2_000_000, {1: CHEAP, 8: DEAR})]).splitlines()
    assert "2.00 M" in lines[1] and "(k = 2)" in lines[1] and lines[2].split()[-6:] == ["-"] * 6
