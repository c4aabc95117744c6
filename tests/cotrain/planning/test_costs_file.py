"""Costs of rounds from a file."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cotrain.errors import UserError
from cotrain.planning.costs_file import read_costs
from inference.drafts.atomic import write_json
from inference.measure.costs import Costs
from tests.broken import broken

ONE, EIGHT = (
    Costs((n, n + 0.5, n + 1.0), 0.25, (0.1, 0.2, 0.3), rows, 40, "t", "d", 0.125) for n, rows in ((1.0, 1), (3.0, 8))
)


def own() -> dict[str, Any]:
    return {"1": {"target": [1, 1.5, 2], "draft": 0.25, "rest": [0.1, 0.2, 0.3], "first": 0.125}}


def test_a_plan_of_another_machine_gives_its_costs(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    costs = {"a": {str(one.rows): asdict(one) for one in (ONE, EIGHT)}}
    write_json(file, {"cells": [], "costs": costs})
    found = read_costs(str(file), "another name there", [1, 8], 2)
    assert [found[rows].rounds for rows in (1, 8)] == [ONE.rounds, EIGHT.rounds]
    write_json(file, {"cells": [], "costs": costs | {"b": {"1": asdict(EIGHT)}}})
    assert read_costs(str(file), "b", [1], 2)[1].rounds == EIGHT.rounds
    with pytest.raises(UserError, match="it has costs of a, b, and none of c"):
        read_costs(str(file), "c", [1], 2)


def test_a_file_of_ones_own_has_the_seconds_of_each_part(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    write_json(file, own())
    assert read_costs(str(file), "d", [1], 2)[1].rounds == ONE.rounds


@pytest.mark.parametrize(
    ("rows", "longest", "change", "said"),
    [
        ([1, 8], 2, {}, "it has no entry '8': the file needs costs for 1, 8 rows"),
        ([1], 3, {}, "must have 4 numbers or more, for draft lengths 0 .. 3; they have 3 and 3"),
        ([1], 2, {"rest": [0.1]}, "they have 3 and 1"),
        ([1], 2, {"target": [0, 1, 2], "rest": [0, 0, 0]}, "rounds must take some seconds"),
        ([1], 2, {"rest": [1, 1, -9.0]}, "must be"),
        ([1], 2, {"draft": None}, "it must be a plan.json, or a JSON object"),
        ([1], 2, {"draft": "fast"}, "fast"),
    ],
    ids=["no rows", "too short", "unequal", "no time", "negative", "nothing", "a word"],
)
def test_wrong_files_are_named(rows: list[int], longest: int, change: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    write_json(file, {"1": own()["1"] | change})
    with pytest.raises(UserError) as caught:
        read_costs(str(file), "d", rows, longest)
    assert str(caught.value).startswith(f"costs={file}: ") and said in str(caught.value)


def test_other_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    for content in ("[1, 2]", "not json", '{"cells": [], "costs": []}', '{"1": 3}'):
        file.write_text(content)
        with pytest.raises(UserError, match=f"costs={file}: "):
            read_costs(str(file), "d", [1], 2)
    with pytest.raises(UserError, match="there is no such file"):
        read_costs(str(tmp_path / "missing"), "d", [1], 2)


def test_any_other_value_in_any_place_is_a_sentence_or_costs(tmp_path: Path) -> None:
    file, plan = tmp_path / "costs.json", {"cells": [], "costs": {"d": {"1": asdict(ONE)}}}
    for words, content in (*broken(own()), *broken(plan)):
        file.write_text(json.dumps(content))
        try:
            costs = read_costs(str(file), "d", [1], 2)[1]
        except UserError as error:
            assert str(error).startswith(f"costs={file}: ") and "\n" not in str(error), words
        else:
            assert all(0 < seconds < float("inf") for seconds in costs.rounds), words
            assert all(costs.drafting(k) >= 0 for k in range(3)), words
