"""HTML from the templates in assets/, and descriptions of charts.

Texts from models and corpora may contain markup, control characters and marks that change the direction of writing. So
all text is escaped, and invisible characters are made visible. Line breaks and indentation in templates are removed. A
`Chart` gives both the drawing (a Plotly figure) and the table of its numbers. Colours are indices into a palette, which
the page's script reads from the style sheet, for light and dark mode.
"""

import html
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.ext import Extension
from markupsafe import Markup

from cotrain.page.loaded_run import LoadedRun, Number

ASSETS = Path(__file__).resolve().parent / "assets"
Rows = list[list[object]]  # cells of a table
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def visible_controls(text: str) -> str:
    """Return text with control characters replaced by visible ones (U+2400 and following), and with direction marks and
    lone surrogates replaced by their code points."""

    def shown(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"

    return _CONTROL.sub(shown, text)


def escaped(value: object) -> Markup:
    """Return a value as escaped text. None becomes empty text, and markup stays unchanged."""
    if isinstance(value, Markup):
        return value
    return Markup("" if value is None else html.escape(visible_controls(str(value))))


def as_json(value: Any) -> Markup:
    """Return JSON for the page's scripts. `<`, `>` and `&` in it are escaped, so that no text can close the script
    element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: surrogates and U+2028 are \\u....
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


class _Compact(Extension):
    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return re.sub(r"\s*\n\s*", "", source)


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(ASSETS), autoescape=True, finalize=escaped, undefined=StrictUndefined, extensions=[_Compact]
)
_ENVIRONMENT.filters |= {"json": as_json, "formatted": format, "exact": repr}
_PARTS: Any = _ENVIRONMENT.get_template("parts.html").module  # macros, which return markup


def render(template: str, **values: Any) -> Markup:
    """Return the template `template` of assets/, rendered with these values."""
    return Markup(_ENVIRONMENT.get_template(template).render(values))


def joined(*parts: object) -> Markup:
    """Return markup and texts, joined. Texts are escaped."""
    return Markup("").join(map(escaped, parts))


def number(value: Number, spec: str = ".3f") -> Markup:
    """Return a number as text that refers to its source, or a dash if its value is None. spec: Python's format
    specification."""
    return _PARTS.number(value, spec)


def interval(ends: Sequence[Number], spec: str = ".2f", unit: str = "x") -> Markup:
    """Return text such as `2.05x [1.70, 2.40]`. ends: value, low and high. If low and high are not known, the text has
    only the value. spec: Python's format specification. unit: the text after the value."""
    return _PARTS.interval(*ends, spec, unit)


def html_table(head: Sequence[object], rows: Sequence[Sequence[object]], caption: object = None) -> Markup:
    """Return a table. head: the titles of the columns. rows: lists of cells; the first cell is the row's name. caption:
    a text above the table, or None. In a narrow window the table scrolls, not the page."""
    return _PARTS.table(head, rows, caption)


@dataclass(frozen=True)
class Section:
    """A section of the page. name: its anchor (HTML id). body: None if no run has the figures. lacking: the text to
    show without a body: why there are no figures, and how to produce them."""

    name: str
    title: str
    body: Markup | None
    lacking: str = ""


DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
PATTERNS = ("", "/", ".", "x", "-", "+")


@dataclass(frozen=True)
class Series:
    """A named series of numbers y at the points x. low, high: the ends of y's intervals; () without intervals. mode:
    lines, markers, lines+markers or bar."""

    name: str
    x: Sequence[float | str]
    y: Sequence[Number]
    low: Sequence[Number] = ()
    high: Sequence[Number] = ()
    mode: str = "lines+markers"
    colour: int | None = None  # index in the palette; None: the series' index in the chart


@dataclass(frozen=True)
class Chart:
    """A chart on the page.

    Args:
        name: its HTML id.
        x, y: titles of the axes.
        at: the height of a horizontal line for comparison; None for no line.
        heat: whether it is a heat map; each series is then a row.
        stacked: whether bars are stacked.
        log: which axes are logarithmic, as "x" or "xy".
        tabled: whether a table of the numbers is added.
        spec: Python's format specification for the numbers.
        range: lowest and highest value of the y axis; () for automatic.
    """

    name: str
    title: str
    x: str
    y: str
    series: Sequence[Series]
    note: str = ""
    at: float | None = None
    heat: bool = False
    stacked: bool = False
    log: str = ""
    tabled: bool = True
    spec: str = ".3f"
    range: Sequence[float] = ()

    def rows(self) -> tuple[list[object], Rows]:
        """Return the head and the rows of the table of all numbers, with a row for each x and a column for each
        series."""
        columns = [{x: i for i, x in enumerate(one.x)} for one in self.series]
        rows: Rows = [
            [x, *(_cell(one, at.get(x), self.spec) for one, at in zip(self.series, columns, strict=True))]
            for x in dict.fromkeys(x for one in self.series for x in one.x)
        ]
        return [self.x, *[one.name for one in self.series]], rows

    def plotly(self) -> dict[str, Any]:
        """Return the data and the layout for Plotly. `meta.colour` is an index into the palette."""
        traces = [_heat(self)] if self.heat else [_trace(self, one, i) for i, one in enumerate(self.series)]
        axes = {
            axis: {
                "title": {"text": escaped_label(text)},
                "automargin": True,
                **({"type": "log"} if axis[0] in self.log else {}),
            }
            for axis, text in (("xaxis", self.x), ("yaxis", self.y))
        }
        if self.heat or any(isinstance(x, str) for one in self.series for x in one.x):
            axes["xaxis"]["type"] = "category"
        elif "x" not in self.log and all(isinstance(x, int) and x <= 20 for one in self.series for x in one.x):
            axes["xaxis"]["dtick"] = 1
        if self.range:
            axes["yaxis"]["range"] = list(self.range)
        layout: dict[str, Any] = {**axes, "barmode": "stack" if self.stacked else "group", "showlegend": not self.heat}
        if self.at is not None:
            layout["shapes"] = [
                {
                    "type": "line",
                    "xref": "paper",
                    "x0": 0,
                    "x1": 1,
                    "y0": self.at,
                    "y1": self.at,
                    "line": {"width": 1, "dash": "dot"},
                }
            ]
        return {"data": traces, "layout": layout}


Part = Callable[[LoadedRun], Chart | Markup | None]  # of a section, for one run


def drawn(charts: Sequence[Chart], wide: bool = False) -> Markup | None:
    """Return the charts that have series as a grid, each with title, drawing, note and table. Return None if no chart
    has any."""
    full = [chart for chart in charts if chart.series]
    return render("charts.html", charts=full, wide=wide) if full else None


def by_run(runs: Sequence[LoadedRun], parts: Sequence[Part]) -> Markup | None:
    """Return the parts of each run: first its charts in one grid, then its texts. parts: functions from a run to a
    chart, a text or None. If there are several runs, each has its name above. Return None if no run has any of the
    parts."""
    bodies = []
    for run in runs:
        content = [part(run) for part in parts]
        grid = drawn([one for one in content if isinstance(one, Chart)])
        if body := joined(grid, *(one for one in content if isinstance(one, Markup))):
            bodies.append((run.name if len(runs) > 1 else None, body))
    return _PARTS.by_run(bodies) if bodies else None


def numbered_series(name: str, values: Sequence[Number], first: int = 1, **look: Any) -> list[Series]:
    """Return a list with one series `name`, whose points are (first, values[0]), (first + 1, values[1]), ...; [] if
    there are no values. look: other fields of `Series`."""
    return [Series(name, range(first, first + len(values)), values, **look)] if values else []


def _cell(series: Series, at: int | None, spec: str) -> Markup:
    if at is None:
        return Markup("")
    if series.low:
        return interval((series.y[at], series.low[at], series.high[at]), spec, "")
    return number(series.y[at], spec)


def _trace(chart: Chart, series: Series, index: int) -> dict[str, Any]:
    colour = index if series.colour is None else series.colour
    trace: dict[str, Any] = {
        "name": escaped_label(series.name),
        "x": [escaped_label(x) if isinstance(x, str) else x for x in series.x],
        "y": [one.value for one in series.y],
        "meta": {"colour": colour},
        "hovertemplate": f"%{{x}}: %{{y:{chart.spec}}}",
    }
    if series.low:
        ends = list(zip(series.y, series.low, series.high, strict=True))
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [_apart(high, y) for y, _, high in ends],
            "arrayminus": [_apart(y, low) for y, low, _ in ends],
        }
    if series.mode == "bar":
        return trace | {"type": "bar", "marker": {"pattern": {"shape": PATTERNS[colour % len(PATTERNS)]}}}
    return trace | {
        "type": "scatter",
        "mode": series.mode,
        "marker": {"symbol": SYMBOLS[colour % len(SYMBOLS)], "size": 7 if "markers" in series.mode else 1},
        "line": {"dash": DASHES[colour % len(DASHES)], "width": 2},
    }


def _apart(high: Number, low: Number) -> float | None:
    return None if high.value is None or low.value is None else high.value - low.value


def _heat(chart: Chart) -> dict[str, Any]:
    z = [[one.value for one in series.y] for series in chart.series]
    return {
        "type": "heatmap",
        "z": z,
        "x": [str(x) for x in chart.series[0].x],
        "texttemplate": "%{text}",
        "y": [escaped_label(one.name) for one in chart.series],
        "text": [["" if value is None else format(value, chart.spec) for value in row] for row in z],
        "colorscale": "Cividis",
        "hovertemplate": "%{y}, %{x}: %{z}<extra></extra>",
        "meta": {"colour": 0},
    }


def escaped_label(text: str) -> str:
    """Return text for names, ticks and labels, escaped because Plotly interprets some markup in them (`<b>`, `<a
    href>`)."""
    return html.escape(visible_controls(text), quote=False)
