"""Charts as data: one description gives the drawing (a Plotly figure) and the table of its numbers beneath it.

Nothing here is coloured: a trace names the place of its colour in the palette, which the page's script takes from the
style sheet, for light and for dark.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cotrain.page.loaded_run import Number
from cotrain.page.markup import Html, data_block, escaped, joined, table, tag, visible

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
PATTERNS = ("", "/", ".", "x", "-", "+")


@dataclass(frozen=True)
class Series:
    """A named row of numbers over `x`. low, high: ends of intervals; mode: lines, markers, lines+markers or bar."""

    name: str
    x: Sequence[float | str]
    y: Sequence[Number]
    low: Sequence[Number] = ()
    high: Sequence[Number] = ()
    mode: str = "lines+markers"
    colour: int | None = None  # None: its place in the chart


@dataclass(frozen=True)
class Chart:
    """name: its id on the page; x, y: what the axes say; at: a value of y that all is compared with; heat: series are
    the rows of a heat map; stacked: bars on each other; log: axes that are logarithmic; tabled: whether its numbers
    stand in a table too."""

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
    range: Sequence[float] = field(default=())


def number(value: Number, spec: str = ".3f") -> Html:
    """As it is shown, with where it comes from; a dash where it is not known."""
    if value.value is None:
        return tag("span", "–", title="not measured in this run")
    return tag("data", format(value.value, spec), value=repr(float(value.value)), data_run=value.run,
               data_source=value.source or None, data_over=value.over or None,
               data_times=None if value.times == 1 else repr(value.times))  # fmt: skip


def interval(ends: Sequence[Number], spec: str = ".2f", unit: str = "x") -> Html:
    """`2.05x [1.70, 2.40]` of value, low and high; without an interval the value alone."""
    value, low, high = ends
    whole = joined(number(value, spec), unit if value.value is not None else "")
    if value.value is None or low.value is None or high.value is None:
        return whole
    return joined(whole, " [", number(low, spec), ", ", number(high, spec), "]")


def drawn(chart: Chart) -> Html:
    """The element of a chart: title, drawing, what is to be said of it, its numbers."""
    parts: list[object] = [tag("figcaption", chart.title)]
    size = "chart tall" if chart.heat else "chart"
    parts.append(tag("div", class_=size, id=chart.name, data_chart=f"{chart.name}-data", role="img",
                     aria_label=f"{chart.title}: its numbers are in the table below"))  # fmt: skip
    if chart.note:
        parts.append(tag("p", chart.note, class_="note"))
    if chart.tabled:
        parts.append(tag("details", tag("summary", "numbers"), numbers(chart)))
    return tag("figure", *parts, data_block(f"{chart.name}-data", plotly(chart)))


def numbers(chart: Chart) -> Html:
    """Every number of a chart: a row a place of x, a column a series."""
    places = list(dict.fromkeys(x for one in chart.series for x in one.x))
    columns = [dict(zip(one.x, range(len(one.x)), strict=True)) for one in chart.series]
    rows: list[list[object]] = []
    for x in places:
        cells = [_cell(one, at.get(x), chart.spec) for one, at in zip(chart.series, columns, strict=True)]
        rows.append([x, *cells])
    return table([chart.x, *[one.name for one in chart.series]], rows)


def _cell(series: Series, at: int | None, spec: str) -> Html:
    if at is None:
        return escaped("")
    if series.low:
        return interval((series.y[at], series.low[at], series.high[at]), spec, "")
    return number(series.y[at], spec)


def plotly(chart: Chart) -> dict[str, Any]:
    """Data and layout of a Plotly figure; colours are places in the palette (`meta.colour`)."""
    traces = [_heat(chart)] if chart.heat else [_trace(chart, one, i) for i, one in enumerate(chart.series)]
    axes = {axis: {"title": {"text": plain(text)}, "automargin": True,
                   **({"type": "log"} if axis[0] in chart.log else {})}
            for axis, text in (("xaxis", chart.x), ("yaxis", chart.y))}  # fmt: skip
    if chart.heat or any(isinstance(x, str) for one in chart.series for x in one.x):
        axes["xaxis"]["type"] = "category"
    elif "x" not in chart.log and all(isinstance(x, int) and x <= 20 for one in chart.series for x in one.x):
        axes["xaxis"]["dtick"] = 1
    if chart.range:
        axes["yaxis"]["range"] = list(chart.range)
    layout: dict[str, Any] = {**axes, "barmode": "stack" if chart.stacked else "group", "showlegend": not chart.heat}
    if chart.at is not None:
        layout["shapes"] = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": chart.at, "y1": chart.at,
                             "line": {"width": 1, "dash": "dot"}}]  # fmt: skip
    return {"data": traces, "layout": layout}


def _trace(chart: Chart, series: Series, place: int) -> dict[str, Any]:
    colour = place if series.colour is None else series.colour
    trace: dict[str, Any] = {
        "name": plain(series.name),
        "x": [plain(x) if isinstance(x, str) else x for x in series.x],
        "y": [one.value for one in series.y],
        "meta": {"colour": colour},
        "hovertemplate": f"%{{x}}: %{{y:{chart.spec}}}",
    }
    if series.low:
        ends = list(zip(series.y, series.low, series.high, strict=True))
        trace["error_y"] = {"type": "data", "symmetric": False,
                            "array": [_apart(high, y) for y, _, high in ends],
                            "arrayminus": [_apart(y, low) for y, low, _ in ends]}  # fmt: skip
    if series.mode == "bar":
        return trace | {"type": "bar", "marker": {"pattern": {"shape": PATTERNS[colour % len(PATTERNS)]}}}
    shape = {"symbol": SYMBOLS[colour % len(SYMBOLS)], "size": 7 if "markers" in series.mode else 1}
    return trace | {"type": "scatter", "mode": series.mode, "marker": shape,
                    "line": {"dash": DASHES[colour % len(DASHES)], "width": 2}}  # fmt: skip


def _apart(high: Number, low: Number) -> float | None:
    return None if high.value is None or low.value is None else high.value - low.value


def _heat(chart: Chart) -> dict[str, Any]:
    z = [[one.value for one in series.y] for series in chart.series]
    texts = [["" if value is None else format(value, chart.spec) for value in row] for row in z]
    return {"type": "heatmap", "z": z, "x": [str(x) for x in chart.series[0].x], "texttemplate": "%{text}",
            "y": [plain(one.name) for one in chart.series], "text": texts, "colorscale": "Cividis",
            "hovertemplate": "%{y}, %{x}: %{z}<extra></extra>", "meta": {"colour": 0}}  # fmt: skip


def plain(text: str) -> str:
    """Text that Plotly shows as it is: it reads some markup (`<b>`, `<a href>`) in names, ticks and labels."""
    return visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
