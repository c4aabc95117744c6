"""The page as one file: it opens from disk, makes no request, and names what it leaves out."""

from collections.abc import Callable, Sequence
from pathlib import Path

from cotrain import __version__
from cotrain.errors import UserError
from cotrain.page.compared_runs import comparison
from cotrain.page.first_screen import first_screen, headline
from cotrain.page.loaded_run import LoadedRun, load
from cotrain.page.rendering import ASSETS, Section, render
from cotrain.page.run_charts import acceptance, batches, costs, quantisation, speed, training
from cotrain.page.run_details import differences, exactness, origin, replay
from inference.drafts.atomic import write_atomic

GENERATOR, PAGE = "cotrain report", "report.html"
# no request leaves the page, whatever it contains
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
SECTIONS: tuple[Callable[[Sequence[LoadedRun]], Section], ...] = (
    first_screen, comparison, acceptance, speed, batches, quantisation, costs, training, differences, replay, exactness,
    origin,
)  # fmt: skip


def page(runs: Sequence[LoadedRun]) -> str:
    """The whole document. Some of what it shows needs its scripts; every number is in it as text."""
    document = render(
        "page.html", runs=runs, headlines=[(run, headline(run)) for run in runs],
        sections=[make(runs) for make in SECTIONS], generator=GENERATOR, version=__version__,
        policy=POLICY, style=_asset("page.css"), scripts=[_asset("page.js"), _asset("replay.js")], plotly=_plotly(),
    )  # fmt: skip
    return str(document)


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs  # large: imported only to write a page

    library: str = get_plotlyjs()
    return library


def write(runs: Sequence[LoadedRun], path: Path) -> None:
    """Write the page wholly or not at all. Raises UserError if another program's file is there."""
    refuse(path)
    write_atomic(path, page(runs).encode("utf-8", "replace").decode("utf-8"))


def written(folder: Path) -> Path:
    """The page of the run in `folder`, written there; its path."""
    path = folder / PAGE
    write(load([str(folder)]), path)
    return path


def refuse(path: Path) -> None:
    """Raise UserError, naming the key, for a path that is a folder or a file other than a page of ours."""
    if path.is_dir():
        raise UserError(f"page={path} is a folder: name a file, as in page={path / 'report.html'}")
    if path.is_file() and f'content="{GENERATOR}' not in path.read_text(encoding="utf-8", errors="replace")[:4000]:
        raise UserError(f"page={path} is a file that cotrain report did not write: name another")
