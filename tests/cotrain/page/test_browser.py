"""The page in headless Chromium, from disk: no request, no error, and it answers keys and the pointer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cotrain.page.html_page import written
from tests.browser import Browser
from tests.pages import HOSTILE, folder, full_report, record

pytestmark = pytest.mark.browser
PLAYER = "document.querySelector('[data-replay]')"
DRAWN = "[...document.querySelectorAll('[data-chart]')].every(chart => chart.querySelector('.main-svg'))"
LINE = "document.querySelector('[data-chart] .scatterlayer .js-line').style.stroke"
SCROLL = """(async () => { for (const chart of document.querySelectorAll('[data-chart]')) {
    chart.scrollIntoView(); await new Promise(next => setTimeout(next, 60)); } return true })()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as result:
        yield result


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a full report; every text of models and corpora in it is hostile."""
    place = tmp_path_factory.mktemp("runs") / "run"
    return written(Path(folder(place, full_report(HOSTILE), replay=record(HOSTILE))))


def shown(browser: Browser) -> tuple[str, str]:
    """What the replay says, and what it draws."""
    said = browser.run(f"{PLAYER}.querySelector('.said').textContent")
    return said, browser.run(f"{PLAYER}.querySelector('svg').innerHTML")


def test_it_opens_without_a_request_or_an_error_light_and_dark_wide_and_narrow(browser: Browser, page: Path) -> None:
    browser.look(1200, 900)
    browser.requests.clear()
    browser.messages.clear()
    seconds = browser.open(page)
    assert seconds < 10  # a second where nothing else runs
    browser.run(SCROLL)
    browser.until(DRAWN, 30)
    assert browser.run("document.querySelectorAll('[data-chart]').length") >= 10
    light = browser.run(LINE)
    for width, dark in ((1200, True), (360, True), (360, False)):
        browser.look(width, 900, dark)
        browser.until(f"({LINE} !== '{light}') === {str(dark).lower()}")  # drawn again in its colours
        browser.until(f"document.documentElement.scrollWidth <= {width}")  # nothing is wider than the window
    assert browser.requests == [page.as_uri()] and browser.messages == []


def cells(browser: Browser) -> list[list[str]]:
    """Of the table beneath the scene: draft, token, what it hangs on, q, p, p / q, u, state."""
    rows = f"{PLAYER}.querySelectorAll('.drafts tbody tr')"
    return list(browser.run(f"[...{rows}].map(row => [...row.cells].map(cell => cell.textContent))"))


def go(browser: Browser, frame: int, row: int) -> str:
    """At a step of all, with one row or all (-1): the text beneath the scene."""
    browser.run(f"{PLAYER}.player.chosen(Object.assign({PLAYER}.player.control('row'), {{value: {row}}}))")
    browser.run(f"{PLAYER}.player.go({frame})")
    return str(browser.run(f"{PLAYER}.querySelector('.text').textContent"))


def test_keys_and_buttons_move_the_replay(browser: Browser, page: Path) -> None:
    browser.look(1200, 900)
    browser.open(page)
    browser.run(f"{PLAYER}.scrollIntoView()")
    browser.run(f"{PLAYER}.querySelector('.scene').focus()")
    seen = [shown(browser)]
    assert seen[0][0].startswith("Round 1 of 2, judged. 1 of 3 accepted")
    assert cells(browser)[1][3:] == ["0.500", "0.100", "0.200", "0.900", "refused"]
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        browser.press(key)
        seen.append(shown(browser))
        assert seen[-1] != seen[-2], key
    assert "Round 2 of 2, drafted" in seen[2][0]
    browser.press("ArrowRight", shift=True)
    assert shown(browser)[0] == seen[-1][0] and shown(browser)[1] != seen[-1][1]  # the scene alone is turned
    browser.run(f"{PLAYER}.querySelector('[data-do=forward]').click()")
    assert shown(browser)[0] != seen[-1][0]
    browser.run(f"{PLAYER}.querySelector('[data-do=play]').click()")
    browser.until(f"{PLAYER}.player.frame === {PLAYER}.player.last", 20)
    browser.press(" ")
    browser.until(f"{PLAYER}.player.timer === null")


def test_the_pointer_tells_p_q_u_and_the_ratio(browser: Browser, page: Path) -> None:
    browser.look(1200, 900)
    browser.open(page)
    browser.run(f"{PLAYER}.scrollIntoView()")
    place = f"{PLAYER}.querySelector('.node.refused').getBoundingClientRect()"
    x, y = browser.run(f"[{place}.x + {place}.width / 2, {place}.y + {place}.height / 2]")
    browser.move(x, y)
    browser.until(f"!{PLAYER}.querySelector('.tip').hidden")
    said = browser.run(f"{PLAYER}.querySelector('.tip').textContent")
    assert "q 0.500\np 0.100\np / q 0.200\nu 0.900\nrefused" in said


def test_rows_stand_alone_or_together_and_trees_as_trees(browser: Browser, page: Path) -> None:
    browser.look(1200, 900)
    browser.open(page)
    nodes = f"{PLAYER}.querySelectorAll('.node:not(.old):not(.cell)').length"
    browser.run(f"{PLAYER}.player.chosen(Object.assign({PLAYER}.player.control('row'), {{value: -1}}))")
    assert browser.run(nodes) == 3 + 1 + 2 + 1  # drafts and last tokens of both rows
    browser.run(f"{PLAYER}.player.go(6)")
    lines = "document.querySelectorAll('.scene line')"
    ends = browser.run(f"[...{lines}].map(line => [line.getAttribute('x1'), line.getAttribute('stroke')])")
    assert len(ends) == 8 and len({x for x, _ in ends[:4]}) >= 3  # two hang on the text, two on nodes of their own


def test_every_step_shows_what_is_known_by_then(browser: Browser, page: Path) -> None:
    browser.look(1200, 900)
    browser.open(page)
    before = go(browser, 0, 1)
    assert cells(browser)[0][4:] == ["–", "–", "–", ""]
    assert go(browser, 1, 1) == before and cells(browser)[0][4:] == ["0.400", "0.800", "–", ""]
    tips = "[...document.querySelectorAll('.scene .cell')].map(one => one.dataset.said || '')"
    assert [tip for tip in browser.run(tips) if "p / q 0.800" in tip]
    assert not [tip for tip in browser.run(tips) if "u " in tip or "accepted" in tip]
    assert go(browser, 2, 1) == before and cells(browser)[0][6:] == ["0.250", "accepted"]
    after = go(browser, 3, 1)
    assert after.startswith(before.rstrip("\n")) and after.rstrip("\n").endswith("b") and len(after) > len(before)
    assert go(browser, 4, 1) == after  # the next round begins behind it


def test_rows_have_headers_with_their_name(browser: Browser, tmp_path: Path) -> None:
    attributes = record()
    attributes["rounds"][1] = attributes["rounds"][1][1:]  # the first row has ended
    browser.look(1200, 900)
    browser.open(written(Path(folder(tmp_path / "run", full_report(), replay=attributes))))
    go(browser, 6, 1)
    said = f"{PLAYER}.querySelector('.said').textContent"
    assert browser.run(said) == "Round 2 of 2, judged. 0 of 0 accepted; bonus: “p”."
    go(browser, 6, 0)
    assert "Row 1 is not decoded in this round" in browser.run(said)
    go(browser, 2, -1)
    names = "[...document.querySelectorAll('.drafts caption')].map(one => one.textContent)"
    assert browser.run(names) == ["row 1", "row 2"]


def test_it_prints_without_controls(browser: Browser, page: Path) -> None:
    browser.look(800, 900, dark=True, media="print")
    browser.open(page)
    hidden = [
        browser.run(f"getComputedStyle(document.querySelector('{name}')).display") for name in ("nav", ".controls")
    ]
    assert hidden == ["none", "none"]
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.look(1200, 900)
