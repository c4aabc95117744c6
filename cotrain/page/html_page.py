"""The page as one file: it opens from disk, asks for nothing, and says what it leaves out."""

from collections.abc import Callable, Sequence
from pathlib import Path

from cotrain import __version__
from cotrain.errors import UserError
from cotrain.page.acceptance_charts import acceptance
from cotrain.page.compared_runs import comparison
from cotrain.page.first_screen import first_screen, headline
from cotrain.page.loaded_run import Run, load
from cotrain.page.markup import Html, tag
from cotrain.page.origin import exactness, origin
from cotrain.page.quantised_weights import quantisation
from cotrain.page.replay_scene import replay
from cotrain.page.section import Section
from cotrain.page.speed_charts import batches, costs, speed
from cotrain.page.training_charts import training
from cotrain.page.worst_contexts import differences
from inference.drafts.atomic import write_atomic

ASSETS = Path(__file__).resolve().parent / "assets"
GENERATOR, PAGE = "cotrain report", "report.html"
# no request leaves the page, whatever stands in it
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
SECTIONS: tuple[Callable[[Sequence[Run]], Section], ...] = (
    first_screen, comparison, acceptance, speed, batches, quantisation, costs, training, differences, replay, exactness,
    origin,
)  # fmt: skip


def page(runs: Sequence[Run]) -> str:
    """The whole document. Some of what it shows needs its scripts; every number stands in it as text."""
    sections = [make(runs) for make in SECTIONS]
    shown = [section for section in sections if section.body is not None]
    title = ", ".join(run.name for run in runs)
    head = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="generator", content=f"{GENERATOR} {__version__}"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title}: speculative decoding"), tag("style", _asset("page.css")),
    )  # fmt: skip
    links = [tag("a", section.title, href=f"#{section.name}") for section in shown]
    body = tag(
        "body", tag("a", "to the figures", href="#figures", class_="skip"), tag("header", *_heads(runs)),
        tag("nav", *links, aria_label="sections"),
        tag("main", *[section.html() for section in shown], _left_out(sections)),
        tag("footer", f"cotrain {__version__}"), tag("script", _plotly(), type="text/plain", id="plotly"),
        tag("script", _asset("page.js")),
        tag("script", _asset("replay.js")),
    )  # fmt: skip
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def write(runs: Sequence[Run], path: Path) -> None:
    """Write the page wholly or not at all. Raises UserError where another program's file stands."""
    refuse(path)
    write_atomic(path, page(runs).encode("utf-8", "replace").decode("utf-8"))


def written(folder: Path) -> Path:
    """The page of the run in `folder`, written there; its path."""
    path = folder / PAGE
    write(load([str(folder)]), path)
    return path


def refuse(path: Path) -> None:
    """Raise UserError, naming the key, for a place where something stands that is no page of ours."""
    if path.is_dir():
        raise UserError(f"page={path} is a folder: name a file, as in page={path / 'report.html'}")
    if path.is_file() and f'content="{GENERATOR}' not in path.read_text(encoding="utf-8", errors="replace")[:4000]:
        raise UserError(f"page={path} is a file that cotrain report did not write: name another")


def _heads(runs: Sequence[Run]) -> list[Html]:
    """A line of words a run, the run's name above it."""
    found = []
    for number, run in enumerate(runs):
        mark = tag("span", "partial", class_="mark", title="this run has not ended: figures may still change")
        name = tag("p", run.name, " ", mark if run.partial else None, class_="name")
        found += [name, tag("p" if number else "h1", headline(run), class_="headline")]
    return found


def _left_out(sections: Sequence[Section]) -> Html | None:
    rows = [tag("li", f"{section.title}: {section.lacking}") for section in sections if section.body is None]
    return tag("section", tag("h2", "Not on this page"), tag("ul", *rows), id="left-out") if rows else None


def _asset(name: str) -> Html:
    return Html((ASSETS / name).read_text(encoding="utf-8"))


def _plotly() -> Html:
    from plotly.offline import get_plotlyjs  # of some size: only where a page is written

    return Html(get_plotlyjs())
