"""The floor of a round on the page."""

from pathlib import Path

from cotrain.page.html_page import floor
from cotrain.page.loaded_run import load_runs
from tests import pages


def test_the_floor_is_of_the_batch_that_was_timed(tmp_path: Path) -> None:
    report = pages.full_report()
    cell = report["extra"]["matrix"][0]
    temperature, rows = report["settings"]["sampling"]["temperature"], report["settings"]["rows"]
    shares = {rows + 1: 0.25, rows: 0.5}
    report["extra"]["matrix"] = [
        cell | {"temperature": temperature, "rows": at, "floor": cell["floor"] | {"round_share": share}}
        for at, share in shares.items()
    ]
    (run,) = load_runs([pages.folder(tmp_path / "run", report)])
    assert floor(run).value == 0.5
