"""The page for one or several runs as a single HTML file, which needs no network.

It begins with a summary (speed-up, acceptance, exactness). A section without figures tells how to produce them.
"""

from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from cotrain import __version__
from cotrain.board import tags
from cotrain.errors import UserError
from cotrain.page.compared_runs import comparison_section
from cotrain.page.loaded_run import LoadedRun, Number, load_runs
from cotrain.page.rendering import ASSETS, Section, by_run, html_table, interval, joined, number, render
from cotrain.page.run_charts import SECTIONS
from inference.drafts.atomic import write_atomic
from inference.measure.costs import Costs
from inference.measure.timing import Interval

GENERATOR, PAGE = "cotrain report", "report.html"
# forbids all requests, also those that texts on the page might cause
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def page(runs: Sequence[LoadedRun]) -> str:
    """Return the HTML document about one or several runs."""
    sections = [Section(name, title, by_run(runs, parts), lacking) for name, title, lacking, parts in SECTIONS]
    sections = [first_screen(runs), comparison_section(runs), *sections]
    return document([(run.name, run.partial, run_headline(run)) for run in runs], sections, GENERATOR)


def document(headlines: Sequence[tuple[str, bool, object]], sections: Sequence[Section], generator: str) -> str:
    """Return an HTML document. Charts need its scripts, but all numbers are also in the document as text. headlines:
    the name of each run or plan, whether its figures may still change, and its result in one line. sections: in order.
    generator: the command that writes the page, for the HTML head."""
    return str(
        render(
            "page.html",
            headlines=headlines,
            sections=sections,
            generator=generator,
            version=__version__,
            policy=POLICY,
            style=_asset("page.css"),
            scripts=[_asset("page.js"), _asset("replay.js")],
            plotly=_plotly(),
        )
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs  # large: imported only to write a page

    return get_plotlyjs()


def write_page(runs: Sequence[LoadedRun], path: Path) -> None:
    """Write the page about `runs` to the file `path`, atomically. Raises UserError if `path` is a folder, or a file of
    another program."""
    refuse_path(path)
    write_atomic(path, page(runs).encode(errors="replace").decode())


def written(folder: Path) -> Path:
    """Write the page about the run in `folder` to this folder, and return the page's path."""
    path = folder / PAGE
    write_page(load_runs([str(folder)]), path)
    return path


def refuse_path(path: Path) -> None:
    """Raise UserError, which names page=, if `path` is a folder, or a file that cotrain report did not write."""
    if path.is_dir():
        raise UserError(f"page={path} is a folder: name a file, as in page={path / 'report.html'}")
    if path.is_file() and f'content="{GENERATOR}' not in path.read_text(encoding="utf-8", errors="replace")[:4000]:
        raise UserError(f"page={path} is a file that cotrain report did not write: name another file")


def run_headline(run: LoadedRun) -> Markup:
    """Return the run's result in one line: whether to serve with the draft, and at which draft length or with which
    tree."""
    if run.report is None:
        return _unmeasured(run)
    ends = run.ends("report", "speedup", "whole")
    regime = joined(Markup("<strong>{}</strong>").format(interval(ends)), f" at temperature {run.temperature:g}: ")
    value, low, high = (end.value for end in ends)
    if value is None:
        return joined("no speed-up was measured")
    if run.get("report", "exactness", "passed") is False:
        return joined(regime, "the output is not exact; do not serve this draft")
    faster = Interval(value, *(nan if end is None else end for end in (low, high))).faster  # as the report's advice
    if faster is False:
        return joined(regime, "plain decoding is faster; serve without this draft")
    if run.k is None and not run.tree:
        return joined(regime, "serve with this draft" if faster else "no speed-up is shown yet")
    shown = "serve" if faster else "no speed-up is shown yet; if you serve it, do so"
    if run.tree:
        return joined(regime, f"{shown} with its planned tree of {len(run.tree)} nodes")
    planned = run.at("report", "extra", "planned_k")
    length = planned if planned.value is not None else Number(float(run.k or 0), run.number)
    return joined(regime, f"{shown} with k = ", number(length, ".0f"))


def _unmeasured(run: LoadedRun) -> Markup:
    loss = run.curves.get(tags.LOSS)
    limited = run.get("run", "settings", "minutes") or run.get("run", "settings", "trainer", "minutes")
    steps = None if limited else run.get("run", "settings", "trainer", "steps")
    if run.partial:
        return joined(
            "not finished: ",
            f"step {loss[-1][0]}" if loss else "no step",
            f" of {steps}" if steps else "",
            "; the same command resumes it",
        )
    return joined("no speed was measured in this run (measure=false): acceptance alone")


def held_out_alpha(run: LoadedRun) -> Number:
    """Return the exported draft's acceptance on all held-out texts, in the regime: p(argmax q) if it drafts its most
    probable tokens, otherwise alpha."""
    return run.judged(f"{run.alpha}_T{run.temperature:g}/all")


def share_of_costs(run: LoadedRun) -> Number:
    """Return the measured speed-up without prefill, divided by the speed-up that tau and the costs of a round allow:
    speedup * round(k) / (tau * round(0)), with round(k) the seconds of a round that drafts k tokens. The number's value
    is None if one of these figures is missing."""
    costs, tau = run.get("report", "extra", "costs"), run.get("report", "acceptance", "tau", "measured")
    speedup = run.get("report", "speedup", "decode", "value")
    if not costs or not tau or not speedup or run.k is None or run.k >= len(costs["target"]):
        return Number(None, run.number)
    table = Costs(**costs)
    return Number(speedup / (tau * table.round(0) / table.round(run.k)), run.number)


def floor(run: LoadedRun) -> Number:
    """Return the least time that the machine needs for a round, as a share of the measured time of a round. It is read
    from the cell of the report's matrix with the run's temperature and rows or, without such a cell, from the report
    itself."""
    for index, cell in enumerate(run.get("report", "extra", "matrix") or []):
        if cell["temperature"] == run.temperature and cell["rows"] == run.get("report", "settings", "rows"):
            return run.at("report", "extra", "matrix", index, "floor", "round_share")
    return run.at("report", "extra", "floor", "round_share")


def first_screen(runs: Sequence[LoadedRun]) -> Section:
    """Return the first section: a table with one column per run, and tiles if there is only one run."""
    tiles = _tiles(runs[0]) if len(runs) == 1 else []
    cells = {name: [part(run) for run in runs] for name, part in ROWS}
    rows = [[name, *[cell or DASH for cell in row]] for name, row in cells.items() if any(row)]
    figures = html_table(["", *[run.name for run in runs]], rows) if rows else None
    return Section("figures", "What was measured", render("figures.html", tiles=tiles, figures=figures))


class Tile(NamedTuple):
    """A main result, shown in large type. bad: whether it is shown as a failure."""

    title: str
    answer: Markup
    note: str
    bad: bool = False


def _tiles(run: LoadedRun) -> list[Tile]:
    """Return three tiles with the main results: speed-up, acceptance, exactness."""
    faster = interval(run.ends("report", "speedup", "whole")) if run.report else joined("not measured")
    passed = run.get("report", "exactness", "passed")
    exact = {True: "yes, checked", False: "no: see exactness"}.get(passed, "not checked")
    return [
        Tile("speed-up", faster, "over plain decoding, with its 95 % interval"),
        _acceptance(run),
        Tile("exact", joined(exact), "the text has the target's distribution", bad=passed is False),
    ]


def _acceptance(run: LoadedRun) -> Tile:
    """Return a tile with the measured tau or, if nothing was timed, with the acceptance rate on held-out texts."""
    measured = run.at("report", "acceptance", "tau", "measured")
    if measured.value is not None:
        return Tile("tau", number(measured, ".2f"), "tokens per target call, measured")
    return Tile("acceptance", _alphas(run), "acceptance rate on held-out texts")


def _expected_taus(run: LoadedRun) -> Markup | None:
    """Return a line with the tau predicted on held-out texts, before training and for the exported draft. Return None
    if the exported draft has no such tau."""
    before, after = run.at("report", "extra", "checkpoints", 0, "tau"), _exported_tau(run)
    if after.value is None:
        return None
    length = run.at("run", "settings", "policy", "k")  # tau of checkpoints is at this draft length, not the planned one
    at = [" with k = ", number(length, ".0f")] if length.value else []
    return joined(number(before, ".2f"), " → ", number(after, ".2f"), *at)


def _exported_tau(run: LoadedRun) -> Number:
    step = run.get("report", "extra", "exported_step")
    for index, checkpoint in enumerate(run.get("report", "extra", "checkpoints") or []):
        if checkpoint["step"] == step and index:
            return run.at("report", "extra", "checkpoints", index, "tau")
    return Number(None, run.number)


def _alphas(run: LoadedRun) -> Markup:
    own = held_out_alpha(run)
    curve = run.curves.get(tags.at("acceptance", run.temperature))
    if own.value is None and curve:
        first, last = (Number(value, run.number) for _, value in (curve[0], curve[-1]))
        return joined(number(first), " → ", number(last))
    return number(own)


def _figure(source: Callable[[LoadedRun], Number], spec: str = ".3f") -> Callable[[LoadedRun], Markup | None]:
    return lambda run: number(figure, spec) if (figure := source(run)).value is not None else None


def _plain(*path: str, spec: str = ".3f") -> Callable[[LoadedRun], Markup | None]:
    return _figure(lambda run: run.at(*path), spec)


def _ranged(*path: str) -> Callable[[LoadedRun], Markup | None]:
    return lambda run: interval(ends) if (ends := run.ends(*path))[0].value is not None else None


def _exact(run: LoadedRun) -> Markup | None:
    passed = run.get("report", "exactness", "passed")
    return None if passed is None else joined("passed" if passed else "FAILED")


ROWS: list[tuple[str, Callable[[LoadedRun], Markup | None]]] = [
    ("speed-up over plain decoding", _ranged("report", "speedup", "whole")),
    ("the same, prefill left out", _ranged("report", "speedup", "decode")),
    ("share of what the costs of its parts allow", _figure(share_of_costs, ".0%")),
    ("share of a round that the machine cannot do without (floor)", _figure(floor, ".0%")),
    ("tokens per second, speculative", _plain("report", "arms", "speculative", "speed", spec=".0f")),
    ("tokens per second, plain", _plain("report", "arms", "plain", "speed", spec=".0f")),
    ("tokens per second, transformers", _plain("report", "arms", "transformers", "speed", spec=".0f")),
    ("tokens per target call (tau), measured", _plain("report", "acceptance", "tau", "measured")),
    ("tau, predicted on these texts", _plain("report", "acceptance", "tau", "predicted")),
    ("tau measured on more tokens", _plain("report", "extra", "parity", "tau_measured")),
    ("tau predicted on those", _plain("report", "extra", "parity", "tau_predicted")),
    ("tau expected on held-out text, before training → now", _expected_taus),
    ("acceptance rate on held-out texts", _figure(held_out_alpha)),
    ("draft length planned, of chains", _plain("report", "extra", "planned_k", spec=".0f")),
    ("speed-up at temperature 0", _ranged("report", "extra", "greedy", "speculative", "speedup")),
    ("the same by n-gram look-up, without a draft", _ranged("report", "extra", "greedy", "ngram", "speedup")),
    ("exactness", _exact),
]
DASH = number(Number(None))
