"""Every label of the page stands beside the number that it names: said here once more, as pointers into the report."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from cotrain.page import html_page
from cotrain.page.loaded_run import load_runs
from tests.cotrain.page.test_page import small as small  # a fixture
from tests.pages import Parsed, folder, full_report, marker

SPEED = "/report/speedup"
ENDS = ("value", "low", "high")
HELD = "/report/extra/held_out"
FIRST = {
    "speed-up over plain decoding": [f"{SPEED}/whole/{end}" for end in ENDS],
    "the same, prefill left out": [f"{SPEED}/decode/{end}" for end in ENDS],
    "tokens per second, speculative": ["/report/arms/speculative/speed"],
    "tokens per second, plain": ["/report/arms/plain/speed"],
    "tokens per second, transformers": ["/report/arms/transformers/speed"],
    "tokens per target call (tau), measured": ["/report/acceptance/tau/measured"],
    "tau, predicted on these texts": ["/report/acceptance/tau/predicted"],
    "tau measured on more tokens": ["/report/extra/parity/tau_measured"],
    "tau predicted on those": ["/report/extra/parity/tau_predicted"],
    "draft length planned, of chains": ["/report/extra/planned_k"],
    "speed-up at temperature 0": [f"/report/extra/greedy/speculative/speedup/{end}" for end in ENDS],
    "the same by n-gram look-up, without a draft": [f"/report/extra/greedy/ngram/speedup/{end}" for end in ENDS],
}
BY_DEPTH = {
    "accepted with all earlier, measured": "/report/acceptance/prefix/measured/0",
    "accepted with all earlier, predicted": f"{HELD}/prefix_T1~1all~11",
    "accepted given all earlier, measured": "/report/acceptance/conditional/measured/0",
    "accepted given all earlier, predicted": f"{HELD}/conditional_T1~1all~11",
}


def page(path: Path, report: dict[str, Any] | None, **files: Any) -> str:
    return html_page.page(load_runs([folder(path, report, **files)]))


def sources(text: str) -> list[str]:
    return re.findall(r' data-source="(.*?)"', text)


def table(text: str) -> dict[str, dict[str, list[str]]]:
    """The first table's pointers, by row and column."""
    (inner, *_) = re.findall(r"<table>(.*?)</table>", text, re.DOTALL)
    _, *head = re.findall(r'<th scope="col">(.*?)</th>', inner, re.DOTALL)
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', inner, re.DOTALL)
    return {
        name: dict(zip(head, map(sources, re.findall(r"<td>(.*?)</td>", cells, re.DOTALL)), strict=True))
        for name, cells in rows
    }


def chart(text: str, title: str) -> dict[str, dict[str, list[str]]]:
    """Pointers of a chart's numbers, by place on the x axis and name of the series."""
    result = [
        part
        for part in re.findall(r"<figure>.*?</figure>", text, re.DOTALL)
        if f"<figcaption>{title}</figcaption>" in part
    ]
    (figure,) = result
    return table(figure)


def section(text: str, name: str) -> str:
    (result,) = re.findall(rf'<section id="{name}".*?</section>', text, re.DOTALL)
    return str(result)


def test_the_first_table_and_the_tiles(tmp_path: Path) -> None:
    report = full_report()
    report["extra"]["checkpoints"] = [{"step": s, "speedup": 1.0 + s, "tau": 2.0 + s} for s in (0, 3, 6)]
    report["extra"]["exported_step"] = 3
    shown = section(page(tmp_path / "run", report), "figures")
    result = {name: cells["run"] for name, cells in table(shown).items()}
    assert {name: result[name] for name in FIRST} == FIRST
    assert result["acceptance rate on held-out texts"] == [f"{HELD}/alpha_T1~1all"]
    faster, tau, _ = re.findall(r'<div class="big">(.*?)</div>', shown, re.DOTALL)
    assert sources(faster) == FIRST["speed-up over plain decoding"]
    assert sources(tau) == FIRST["tokens per target call (tau), measured"]
    taus = [f"/report/extra/checkpoints/{place}/tau" for place in (0, 1)]
    assert result["tau expected on held-out text, before training → now"][: len(taus)] == taus


def test_the_regime_that_was_served_decides_what_is_shown(tmp_path: Path) -> None:
    report = full_report()
    report["settings"]["sampling"]["temperature"] = 0.0
    cells = report["extra"]["matrix"] = report["extra"]["matrix"][::-1]
    text = page(tmp_path / "run", report)
    assert "at temperature 0: " in Parsed(text).texts[""]
    first = table(section(text, "figures"))
    assert first["acceptance rate on held-out texts"]["run"] == [f"{HELD}/alpha_T0~1all"]
    (own,) = [i for i, cell in enumerate(cells) if (cell["temperature"], cell["rows"]) == (0.0, 1)]
    name = "share of a round that the machine cannot do without (floor)"
    assert first[name]["run"] == [f"/report/extra/matrix/{own}/floor/round_share"] and own > 0
    depth = chart(text, "Acceptance by depth")["1"]
    assert depth["accepted given all earlier, predicted"] == [f"{HELD}/conditional_T0~1all~11"]


def test_what_charts_of_acceptance_name(tmp_path: Path) -> None:
    report = full_report()
    report["extra"]["profiles"]["0"] = report["extra"]["profiles"]["1"]
    text = page(tmp_path / "run", report)
    result = chart(text, "Acceptance by depth")["1"]
    assert result == {name: [pointer] for name, pointer in BY_DEPTH.items()}
    at = "/report/extra/profiles"
    assert chart(text, "Acceptance by length of the context")["1-1"] == {
        f"temperature {t}": [f"{at}/{t}/by_context/1-1"] for t in "10"
    }
    assert chart(text, "Acceptance by the draft&#x27;s temperature")["0.0"] == {
        f"target at {t}": [f"{at}/{t}/by_draft_temperature/0"] for t in "10"
    }
    assert chart(text, "Acceptance by domain and temperature")["T 0"]["code"] == [f"{HELD}/alpha_T0~1code"]


@pytest.mark.parametrize(("rule", "stem"), [("block", "tau_block"), ("token", "tau")])
def test_what_charts_of_speed_name(rule: str, stem: str, tmp_path: Path) -> None:
    report = full_report()
    report["settings"]["verify"] = rule
    report["extra"]["planned_k"], report["extra"]["predicted_speedups"] = 2, [1.0, 0.9, 1.5, 1.2]
    report["extra"]["held_out"] |= {f"tau{block}_T1/all/{k}": 2.0 for block in ("", "_block") for k in (1, 2)}
    text = page(tmp_path / "run", report)
    assert chart(text, "Tokens per target call")["2"] == {
        "predicted on held-out texts": [f"{HELD}/{stem}_T1~1all~12"],
        "measured while timed": ["/report/acceptance/tau/measured"],
        "measured on more tokens": ["/report/extra/parity/tau_measured"],
        "predicted on those": ["/report/extra/parity/tau_predicted"],
    }
    assert chart(text, "Speed-up by draft length")["2"] == {
        "predicted": ["/report/extra/predicted_speedups/2"],
        "measured, prefill left out": [f"{SPEED}/decode/{end}" for end in ENDS],
    }
    said = Parsed(text).texts["speed"]
    assert "from k = 2 to 3, the longest considered; best at k = 2, 1.50x." in said


def test_a_greedy_draft_is_shown_as_it_drafts(tmp_path: Path) -> None:
    """Its likeliest tokens are accepted with p(argmax q), not with the sum of min(p, q)."""
    report = full_report()
    held = report["extra"]["held_out"]
    held |= {f"tau_greedy_draft_T1/all/{k}": 1.5 for k in (1, 2)} | {"alpha_greedy_draft_T1/all": 0.25}
    text = page(tmp_path / "run", report, run=marker("finished", objective="greedy_draft"))
    assert chart(text, "Tokens per target call")["2"]["predicted on held-out texts"] == [
        f"{HELD}/tau_greedy_draft_T1~1all~12"
    ]
    assert [f"{HELD}/alpha_greedy_draft_T1~1all"] in table(text)["acceptance rate on held-out texts"].values()
    assert not [source for source in sources(text) if re.search(f"{HELD}/(alpha|prefix|conditional)_T", source)]


def test_what_a_round_costs_is_of_its_own_arm(tmp_path: Path) -> None:
    text = page(tmp_path / "run", full_report())
    for arm, result in chart(text, "Milliseconds of a round").items():
        assert result["draft"] == [f"/report/arms/{arm}/phases/draft"]
    attributes = re.findall(r'data-source="/report/arms/(\w+)/phases/\w+" data-over="(.*?)" data-times="(.*?)"', text)
    assert {arm for arm, *_ in attributes} == {"speculative", "plain"}
    assert all((over, times) == (f"/report/arms/{arm}/rounds", "1000.0") for arm, over, times in attributes)


def test_a_heat_map_names_its_rows_and_leaves_out_what_was_not_measured(tmp_path: Path) -> None:
    report = full_report()
    cell = {"target": "int8", "draft": "none", "temperature": 1.0, "alpha": 0.5, "speedup": dict.fromkeys(ENDS, 2.0)}
    other = {**cell, "target": "none", "draft": "int8", "temperature": 0.0}
    report["extra"]["bits"] = [cell, other]
    text = page(tmp_path / "run", report)
    for title, path in (("Speed-up", "speedup/value"), ("Acceptance", "alpha")):
        at = "/report/extra/bits"
        assert chart(section(text, "quantisation"), title) == {
            "T 0": {"target int8, draft none": [], "target none, draft int8": [f"{at}/1/{path}"]},
            "T 1": {"target int8, draft none": [f"{at}/0/{path}"], "target none, draft int8": []},
        }


def test_where_distributions_differ(tmp_path: Path) -> None:
    report = full_report()
    report["extra"]["divergence"]["lorenz"] = [0.0, 0.3, 0.55, 0.7, 0.8, 0.87, 0.92, 0.96, 0.98, 0.99, 1.0]
    text = Parsed(page(tmp_path / "run", report)).texts["differences"]
    assert "The fifth of the positions that differ most holds 55% of what is lost" in text
    assert "is 0.250 on average over 4 positions" in text
    assert "total variation 0.875" in text and "p 0.750, q 0.125" in text


def test_text_is_escaped_once(tmp_path: Path) -> None:
    word = "a<b>&c"
    report = full_report(word)
    report["extra"]["profiles"]["1"]["by_context"] = {word: 0.5}
    text = page(tmp_path / "run", report)
    for wrong in ("&amp;lt;", "&amp;amp;", word):
        assert wrong not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert word in chart(unescape(text), "Acceptance by domain and temperature")["T 1"]
    assert list(chart(unescape(text), "Acceptance by length of the context")) == [word]


def test_a_run_that_goes_on_is_partial_though_it_was_measured_once(tmp_path: Path) -> None:
    text = Parsed(page(tmp_path / "run", full_report(), run=marker("unfinished"))).texts[""]
    assert "partial" in text and "2.13x" in text
