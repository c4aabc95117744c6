"""The page says what the report says, in safe markup, and says what it leaves out."""

import re
from pathlib import Path
from typing import Any

import pytest

from cotrain.cli import main
from cotrain.page import html_page
from cotrain.page.html_page import floor, run_headline, share_of_costs
from cotrain.page.loaded_run import load_runs
from cotrain.page.rendering import visible_controls
from cotrain.page.run_charts import crossing
from inference.drafts.weight_files import read_json
from inference.report.table import table
from tests.pages import HOSTILE, RESULTS, Parsed, folder, full_report, marker, record


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Without the 5 MB of the library, which would be parsed each time."""
    if "whole" not in request.keywords:
        monkeypatch.setattr(html_page, "_plotly", lambda: "var Plotly")


def parsed(*paths: str) -> Parsed:
    return Parsed(html_page.page(load_runs(paths)))


def value(document: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        document = document[int(key)] if isinstance(document, list) else document[key]
    return document


def expected(reports: list[dict[str, Any]], attributes: dict[str, str | None]) -> float:
    documents = {"report": reports[int(attributes["data-run"] or 0)]}
    over = attributes.get("data-over")
    factor = float(attributes.get("data-times") or 1)
    return float(value(documents, str(attributes["data-source"]))) * factor / (value(documents, over) if over else 1)


def shown(text: str) -> tuple[float, float]:
    """A number as it is written, and half of its last digit."""
    digits = len(text.rstrip("%").partition(".")[2])
    scale = 100 if text.endswith("%") else 1
    return float(text.rstrip("%")) / scale, 0.5001 * 10**-digits / scale


def test_every_number_is_that_of_the_report(tmp_path: Path) -> None:
    reports = [full_report(), read_json(RESULTS / "grid.json")]
    paths = [folder(tmp_path / str(i), report) for i, report in enumerate(reports)]
    page = parsed(*paths)
    sourced = [(text, attributes) for _, text, attributes in page.found if attributes.get("data-source")]
    assert len(sourced) > 500
    for text, attributes in sourced:
        true = expected(reports, attributes)
        assert float(str(attributes["value"])) == true
        number, near = shown(text)
        assert abs(number - true) <= near, (text, attributes)
    sources = {str(attributes["data-source"]).split("/")[2] for _, attributes in sourced}
    assert sources == {"arms", "speedup", "acceptance", "extra"}


def test_no_figure_of_the_first_table_stands_without_its_source(tmp_path: Path) -> None:
    page = parsed(folder(tmp_path / "run", full_report()))
    assert not [text for section, text in page.cells if section == "figures" and re.search(r"\d", text)]
    figures = [attributes for section, _, attributes in page.found if section == "figures"]
    derived = [attributes for attributes in figures if not attributes.get("data-source")]
    assert len(derived) == 1  # the share of what costs allow, which the page computes


def test_a_chart_draws_the_numbers_of_its_table(tmp_path: Path) -> None:
    runs = load_runs([folder(tmp_path / "run", full_report(), replay=record())])
    text = html_page.page(runs)
    figures = re.findall(r"<figure>.*?</figure>", text, re.DOTALL)
    assert len(figures) >= 10
    for figure in figures:
        one = Parsed(figure)
        (block,) = one.blocks.values()
        drawn = [y for trace in block["data"] for y in (sum(trace["z"], []) if "z" in trace else trace["y"])]
        ends = [
            trace["y"][i] + sign * away
            for trace in block["data"]
            if "error_y" in trace
            for sign, name in ((-1, "arrayminus"), (1, "array"))
            for i, away in enumerate(trace["error_y"][name])
        ]
        tabled = [float(str(attributes["value"])) for _, _, attributes in one.found]
        assert sorted(tabled) == pytest.approx(sorted([*drawn, *ends]))


def test_the_first_line_says_the_speed_and_what_to_serve(tmp_path: Path) -> None:
    report = full_report()

    def line(name: str) -> str:
        """Of the report as it now is."""
        return parsed(folder(tmp_path / name, report)).texts[""]

    assert "2.13x [1.87, 2.46] at temperature 1: serve with k = 8" in line("a")
    report["speedup"]["whole"] = {"value": 0.8, "low": 0.7, "high": 0.9}
    assert "0.80x [0.70, 0.90] at temperature 1: plain decoding is faster; serve without this draft" in line("b")
    report["speedup"]["whole"] = {"value": 1.2, "low": 0.9, "high": 1.5}
    assert "no speed-up is shown yet" in line("c")
    report["extra"]["plain_is_faster"] = True  # a prediction beside it does not make 1.2x slower
    assert "no speed-up is shown yet" in line("d")
    report["speedup"]["whole"] = {"value": 1.2, "low": 1.1, "high": 1.5}
    assert "1.20x [1.10, 1.50] at temperature 1: serve with k = 8" in line("e")
    report["exactness"]["passed"] = False
    assert "at temperature 1: the output is not exact; do not serve this draft" in line("f")


def test_the_floor_is_of_the_batch_that_was_timed(tmp_path: Path) -> None:
    report = full_report()
    cell = report["extra"]["matrix"][0]
    temperature, rows = report["settings"]["sampling"]["temperature"], report["settings"]["rows"]
    shares = {rows + 1: 0.25, rows: 0.5}
    report["extra"]["matrix"] = [
        cell | {"temperature": temperature, "rows": at, "floor": cell["floor"] | {"round_share": share}}
        for at, share in shares.items()
    ]
    (run,) = load_runs([folder(tmp_path / "run", report)])
    assert floor(run).value == 0.5


def test_what_a_run_lacks_is_left_out_with_a_word_why(tmp_path: Path) -> None:
    page = parsed(folder(tmp_path / "run", read_json(RESULTS / "demo.json")))
    for said in ("matrix.batches=", "matrix.targets=", "no TensorBoard event files", "no generation was recorded"):
        assert said in page.texts["left-out"]
    assert "Where drafts are accepted" not in page.texts["left-out"]
    whole = parsed(folder(tmp_path / "whole", full_report(), replay=record()))
    assert "Runs compared: one run" in whole.texts["left-out"]
    assert "Replay" not in whole.texts["left-out"] and "batch" not in whole.texts["left-out"]


def test_hostile_text_changes_no_markup_and_is_shown(tmp_path: Path) -> None:
    pages = []
    for place, word in (("plain", "ab"), ("hostile", HOSTILE)):
        named = tmp_path / place / (word.replace("/", "").replace("\0", "").replace("\ud800", "") or "run")
        where = folder(named, full_report(word), replay=record(word), run=marker("unfinished", **{word: word}))
        pages.append(parsed(where))
    plain, hostile = pages
    assert hostile.tags == plain.tags
    assert not [tag for tag in hostile.tags if any(name.startswith("on") for name in tag[1:])]
    assert (
        visible_controls(HOSTILE) in hostile.texts["differences"]
        and visible_controls(HOSTILE) in hostile.texts["origin"]
    )
    assert hostile.blocks["replay-0-data"]["rows"][0]["prompt"] == HOSTILE
    names = [trace["name"] for trace in hostile.blocks["domain-0-data"]["data"]]
    assert not [name for name in names if "<" in name]  # Plotly reads markup in names
    assert not re.search("[\x00\u202e\u2028]", visible_controls(HOSTILE)) and "\u2400" in visible_controls(HOSTILE)


@pytest.mark.whole
def test_the_file_is_whole_small_and_asks_for_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path / "run", full_report(), replay=record())
    assert main(["report", f"run={path}"]) == 0
    file = Path(path) / "report.html"
    assert f"page: {file}" in capsys.readouterr().out
    assert 3e6 < file.stat().st_size < 6e6
    text = file.read_text(encoding="utf-8")
    own = re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", text, flags=re.DOTALL)
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\(""", own)
    assert "default-src &#x27;none&#x27;" in own
    assert main(["report", f"run={path}"]) == 0  # over its own page


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (None, [], "name the folder of a run with run="),
        (None, ["run=nowhere"], "run=nowhere does not exist"),
        (lambda: Path("empty").mkdir(), ["run=empty"], "run=empty has no report.json, run.json or held_out.json"),
        (lambda: folder(Path("a"), full_report()), ["run=a", "run=a"], "run=a is named twice"),
        (lambda: folder(Path("b"), {"format": 1}), ["run=b"], "is no report of this version (report.environment"),
        (lambda: folder(Path("d"), full_report(), replay={"format": 9}), ["run=d"], "replay.json is no replay"),
        (lambda: folder(Path("e"), full_report()), ["run=e", "page=e"], "page=e is a folder"),
        (lambda: folder(Path("f"), full_report()), ["run=f", "page=f/report.json"], "did not write"),
        (lambda: (Path("g").mkdir(), Path("g/report.json").write_text("{")), ["run=g"], "cannot be read as JSON"),
    ],
)
def test_mistakes_are_errors_of_one_line(
    make: Any,
    settings: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if make:
        make()
    assert main(["report", *settings]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    paths = [folder(tmp_path / name, full_report()) for name in ("one, a", "two=[b]")]
    page = tmp_path / "both.html"
    assert main(["report", f"run={paths[0]}", f"page={page}", f"run={paths[1]}"]) == 0
    result = Parsed(page.read_text())
    assert "one, a" in result.texts["figures"] and "two=[b]" in result.texts["figures"]
    assert {"runs", "acceptance", "speed"} <= set(result.texts)


def test_the_share_of_what_costs_allow(tmp_path: Path) -> None:
    report = full_report()
    costs = {"target": [1.0, 2.0, 3.0], "draft": 0.5, "rest": [0.0, 0.0, 1.0], "first": 0.0}
    report["extra"] |= {"costs": report["extra"]["costs"] | costs, "planned_k": 2}
    report["acceptance"]["tau"]["measured"], report["speedup"]["decode"]["value"] = 2.5, 0.4
    (run,) = load_runs([folder(tmp_path / "run", report)])
    assert share_of_costs(run).value == pytest.approx(0.4 / (2.5 * 1 / 5))


def test_a_run_that_timed_trees_names_them(tmp_path: Path) -> None:
    report = full_report()
    (run,) = load_runs([folder(tmp_path / "chains", report)])
    assert "serve with k = " in str(run_headline(run)) and run.k and "Fixed(k=" in table(report)
    report["extra"] |= {"planned_shape": [-1, -1, 0]}
    (run,) = load_runs([folder(tmp_path / "trees", report)])
    assert "serve with its planned tree of 3 nodes" in str(run_headline(run))
    assert run.k is None and share_of_costs(run).value is None  # the table's k is of chains
    assert "trees of 3 nodes" in table(report) and "Fixed(k=" not in table(report)


def test_the_batch_size_where_drafting_stops_paying(tmp_path: Path) -> None:
    (run,) = load_runs([folder(tmp_path / "run", full_report())])
    cells = run.get("report", "extra", "matrix")
    for t, factor in ((0.0, 1.0), (1.0, 100.0)):
        lost = [
            cell["rows"]
            for cell in cells
            if cell["temperature"] == t and factor * cell["arms"][cell["speculative"]]["over_plain"]["high"] < 1
        ]
        for cell in cells:
            if cell["temperature"] == t:
                cell["arms"][cell["speculative"]]["over_plain"]["high"] *= factor
        said = crossing(run, t)
        assert (f"from {min(lost)} rows" if lost else "no slow-down is shown up to 32 rows") in said


def test_values_of_other_types_end_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each entry without a schema: the page shows it, leaves it out, or names the run."""
    report, ended = full_report(), set[int]()
    for group, keys in ((report["extra"], [*report["extra"]]), (report["settings"]["sampling"], ["temperature"])):
        for key in keys:
            whole = group[key]
            for odd in ([[]], "x"):
                group[key] = odd
                path = folder(tmp_path / f"{key} {odd}", report)
                ended.add(status := main(["report", f"run={path}"]))
                said = capsys.readouterr().err
                assert status == 0 or status == 1 and f"run={path}: a file in it has a value" in said, key
                assert said.count("\n") <= 2
            group[key] = whole
    assert ended == {0, 1}
