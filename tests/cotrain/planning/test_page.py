"""The page of a plan shows the numbers of plan.json."""

from typing import Any

import pytest

from cotrain.planning.page import plan_page


def plan(*drafts: str, k: int = 2, **more: Any) -> dict[str, Any]:
    cells = [
        {
            "draft": draft,
            "temperature": t,
            "rows": rows,
            "k": k,
            "tau": [1.0, 1.61234, 2.01234],
            "speedups": [1.0, 1.2222, 1.4444],
            "errors": [0.0, 0.01, 0.02],
            "speedups_alone": [1.0, 1.1111, 1.3333],
            "tree": None,
            "break_even": 0.34567,
            "perfect": 2.7777,
        }
        for draft in drafts
        for t in (0.7, 1.0)
        for rows in (1, 8)
    ]
    profile = {"conditional": [0.61234, 0.51234], "prefix": [0.61, 0.4]}
    acceptance = {draft: {"0.7": profile, "1": profile} for draft in drafts}
    return {"cells": cells, "recommended": drafts[0], "acceptance": acceptance, **more}


def test_a_page_has_every_number_as_text() -> None:
    said = plan_page(plan("runs/a/draft", "runs/b/draft"))
    for value in ("1.4444", "2.01234", "1.3333", "0.34567", "2.7777", "0.51234", repr(1.4444 - 1.96 * 0.02)):
        assert f'value="{value}"' in said
    assert "Temperature 0.7" in said and "b, T 1, 8 rows" in said and "expected at temperature 0.7, 1 row" in said
    assert "nothing was timed" in said and "<title>a: speculative decoding" in said


def test_domains_are_shown_where_there_are_several() -> None:
    given = plan("a")
    assert "the prompts have one domain" in plan_page(given)
    code = {"texts": 7, "alpha": 0.71234, "conditional": [0.7, 0.65], "tau": [1.0, 1.7, 2.2]}
    given["acceptance"]["a"]["1"] = given["acceptance"]["a"]["1"] | {"domains": {"code": code}}
    said = plan_page(given)
    assert "a, T 1, code" in said and 'value="0.71234"' in said and "0.70, 0.65" in said
    assert "the prompts have one domain" not in said
    code["conditional"] = [0.7, None]  # no round tried the second depth
    assert "0.70, -" in plan_page(given)


def test_drafts_of_one_name_are_told_apart_by_their_paths() -> None:
    assert "one/same, T 0.7, 1 rows" in plan_page(plan("one/same", "two/same"))


def test_plain_decoding_may_be_recommended() -> None:
    assert "plain decoding is recommended at temperature 0.7, 1 row" in plan_page(plan("a", k=0))


def test_measured_cells_are_beside_their_forecast() -> None:
    ends = {"value": 1.39, "low": 1.3, "high": 1.5}
    arm = {"speedup": ends, "decode": ends | {"value": 1.40123}, "tau": 1.98765, "predicted": 1.44445}
    measured = [{"temperature": 1.0, "rows": 8, "arms": {"k = 2": arm}}]
    said = plan_page(plan("a", measured=measured))
    assert (
        'value="1.40123"' in said
        and 'value="1.44445"' in said
        and 'value="1.98765"' in said
        and "T 1, 8 rows: k = 2" in said
    )


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a\u202eb"])
def test_names_are_escaped(name: str) -> None:
    said = plan_page(plan(name))
    assert name not in said


def test_the_headline_has_the_interval_of_95_percent() -> None:
    said = plan_page(plan("a"))
    header, rest = said.split("</header>")
    low = f'value="{1.4444 - 1.96 * 0.02!r}"'
    assert low in header and low in rest.split('id="lengths"')[0]


def test_a_tree_that_is_recommended_is_what_the_page_recommends() -> None:
    given = plan("a", k=0)
    for cell in given["cells"]:
        cell["tree"] = {"speedup": 1.54321, "recommended": True}
    said = plan_page(given).split("</header>")
    assert 'value="1.54321"' in said[0] and "with the tree" in said[0] and "plain decoding is" not in said[0]
    assert "<td>recommended</td>" in said[1]
    for cell in given["cells"]:
        cell["tree"]["recommended"] = False
    assert "plain decoding is recommended" in plan_page(given)


def test_depths_that_no_round_tries_are_left_open() -> None:
    given = plan("a")
    given["acceptance"]["a"]["1"] = {"conditional": [0.61234, None], "prefix": [0.6, None]}
    assert "not measured in this run" in plan_page(given)
