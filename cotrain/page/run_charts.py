"""The sections of the page that show each run by itself, as data: title, charts, texts, and the text to show without
figures. To add a chart, add one entry to SECTIONS, with a function that returns its series."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from cotrain.board import tags
from cotrain.page.loaded_run import LoadedRun, Number, thinned
from cotrain.page.rendering import Chart, Part, Rows, Series, drawn, interval, joined, number, numbered_series, render
from cotrain.page.run_details import differences_section, exactness, origin, replay

SeriesOf = Callable[[LoadedRun], Sequence[Series]]
KEY = re.compile(r"(?P<name>alpha|alpha_greedy_draft)_T(?P<t>[^/]+)/(?P<domain>.+)")
PHASES = ("draft", "target", "verify", "other")


def chart(series: SeriesOf, name: str, title: str, x: str, y: str, **look: Any) -> Part:
    """Return a function from a run to a chart. series: a function from a run to its series. name: the chart's HTML id.
    title: its title. x, y: titles of the axes. look: other fields of `Chart`."""
    return lambda run: Chart(f"{name}-{run.number}", title, x, y, series(run), **look)


def depth_chart(run: LoadedRun) -> list[Series]:
    """Return the series of prefix and conditional acceptance by depth, measured on the timed texts and predicted on
    held-out texts."""
    series = []
    for name, words in (("prefix", "accepted with all earlier"), ("conditional", "accepted given all earlier")):
        series += numbered_series(f"{words}, measured", run.all("report", "acceptance", name, "measured"))
        if not run.greedy:  # these figures are for drafts drawn from q
            series += numbered_series(f"{words}, predicted", figures_by_depth(run, f"{name}_T{run.temperature:g}/all"))
    return series


def figures_by_depth(run: LoadedRun, stem: str) -> list[Number]:
    """Return the held-out figures with the names `stem`/1, `stem`/2, ..., in this order; [] if there are none."""
    keys = [key for key in run.held_out if re.fullmatch(re.escape(stem) + r"/\d+", key)]
    return [run.judged(key) for key in sorted(keys, key=lambda key: int(key.rpartition("/")[2]))]


def domain_chart(run: LoadedRun) -> Chart:
    """Return a chart of acceptance by the target's temperature, with one bar per domain if there are several."""
    keys = map(KEY.fullmatch, run.held_out)
    figures = [(match["t"], match["domain"], match[0]) for match in keys if match and match["name"] == run.alpha]
    domains = [name for name in dict.fromkeys(domain for _, domain, _ in figures) if name != "worst"]
    domains = [name for name in domains if name != "all"] if len(domains) > 2 else ["all"]
    series = []
    for domain in domains:
        mine = {f"T {t}": run.judged(key) for t, one, key in figures if one == domain}
        series += [Series(domain, list(mine), list(mine.values()), mode="bar")] if mine else []
    measure = "p of the draft's likeliest token" if run.greedy else "alpha = Σ min(p, q)"
    title = "Acceptance by domain and temperature" if len(domains) > 1 else "Acceptance by temperature"
    note = f"{measure}, on held-out texts"
    return Chart(f"domain-{run.number}", title, "temperature of the target", "acceptance", series, note, range=(0, 1))


def profiles(words: str, name: str, kind: type[float] | type[str]) -> SeriesOf:
    """Return a function from a run to the series of its acceptance profile `name` ("by_draft_temperature" or
    "by_context"), one for each temperature of the target. words: the beginning of a series' name. kind: the type of the
    x values."""
    base = ("report", "extra", "profiles")
    return lambda run: [
        Series(f"{words} {t}", list(map(kind, profile[name])), run.all(*base, t, name))
        for t, profile in (run.get(*base) or {}).items()
    ]


def tau_by_length(run: LoadedRun) -> list[Series]:
    """Return the series of tau: predicted on held-out texts at each draft length, and measured at the timed length."""
    block = run.get("report", "settings", "verify") == "block"
    rules = ["tau_greedy_draft"] if run.greedy else [*(["tau_block"] if block else []), "tau"]
    predicted = (figures_by_depth(run, f"{rule}_T{run.temperature:g}/all") for rule in rules)
    measured = {
        "measured while timed": ("acceptance", "tau", "measured"),
        "measured on more tokens": ("extra", "parity", "tau_measured"),
        "predicted on those": ("extra", "parity", "tau_predicted"),
    }
    series = numbered_series("predicted on held-out texts", next(filter(None, predicted), []))
    for name, path in measured.items():
        if run.k and (tau := run.at("report", *path)).value:
            series.append(Series(name, [run.k], [tau], mode="markers"))
    return series


def speedups(run: LoadedRun, predicted: str, measured: str, **look: Any) -> list[Series]:
    """Return the series of the speed-up without prefill: predicted from costs and acceptance at each draft length, and
    measured at the timed length. predicted, measured: names of the series. look: other fields of the predicted series.
    """
    series = numbered_series(predicted, run.all("report", "extra", "predicted_speedups"), 0, **look)
    ends = run.ends("report", "speedup", "decode")
    if run.k is not None and ends[0].value is not None:
        value, low, high = ([end] for end in ends)
        series.append(Series(measured, [run.k], value, low, high, mode="markers", colour=look.get("colour")))
    return series


def speed_by_length(run: LoadedRun) -> list[Series]:
    """Return the series of the speed-up by draft length, or [] if none was predicted."""
    predicted = run.get("report", "extra", "predicted_speedups")
    return speedups(run, "predicted", "measured, prefill left out") if predicted else []


def paying_lengths(run: LoadedRun) -> Markup | None:
    """Return a sentence with the draft lengths at which a speed-up is predicted, or None if none was predicted."""
    predicted = run.all("report", "extra", "predicted_speedups")
    pays = [k for k, one in enumerate(predicted) if k and one.value and one.value > 1]
    if not predicted:
        return None
    if not pays:
        return Markup("<p>No draft length is predicted to be faster than plain decoding here.</p>")
    best = max(pays, key=lambda k: predicted[k].value or 0)
    ends = f"from k = {pays[0]} to {pays[-1]}" if len(pays) > 1 else f"at k = {pays[0]} alone"
    more = "" if pays[-1] < len(predicted) - 1 else ", the longest considered"
    sentence = f"Predicted to be faster than plain decoding {ends}{more}; best at k = {best}, "
    return Markup("<p>{}{}x.</p>").format(sentence, number(predicted[best], ".2f"))


def cells(run: LoadedRun) -> list[tuple[int, float, int]]:
    """Return (index in the report's matrix, temperature, rows) for each cell of the matrix; [] without one."""
    matrix = run.get("report", "extra", "matrix") or []
    return [(index, cell["temperature"], cell["rows"]) for index, cell in enumerate(matrix)]


def batches(run: LoadedRun) -> Markup | None:
    """Return charts and a table of the speed-up by batch size and temperature, with the batch size from which on plain
    decoding is faster. Return None if the run has no such figures."""
    temperatures = sorted({t for _, t, _ in cells(run)})
    if not temperatures:
        return None
    series = []
    for colour, temperature in enumerate(temperatures):
        mine = {rows: index for index, t, rows in cells(run) if t == temperature}
        value, low, high = zip(*(run.ends(*_arm(run, index), "over_plain") for index in mine.values()), strict=True)
        allowed = [run.at(*_arm(run, index), "allowed") for index in mine.values()]
        series.append(Series(f"T {temperature:g}, measured", list(mine), value, low, high, colour=colour))
        series.append(Series(f"T {temperature:g}, allowed", list(mine), allowed, mode="lines", colour=colour))
    note = "Allowed: what tau and the costs of a round's parts would give."
    axes = ("Speed-up by batch size", "rows decoded together", "speed-up")
    charts = drawn([Chart(f"batch-{run.number}", *axes, series, note, 1.0, log="x", spec=".2f")], wide=True)
    crossings = [(t, crossing(run, t)) for t in temperatures]
    head = ["", "tokens/s", "over plain", "tau", "of what costs allow", "floor's share"]
    return render("batches.html", charts=charts, crossings=crossings, head=head, rows=_arms(run))


def _arm(run: LoadedRun, index: int) -> tuple[str | int, ...]:
    base = ("report", "extra", "matrix", index)
    return (*base, "arms", run.get(*base, "speculative"))


def crossing(run: LoadedRun, temperature: float) -> Markup:
    """Return a phrase with the batch size from which on plain decoding is faster at this temperature: the smallest one
    at which the whole interval of the speed-up is below 1. The phrase says so if there is none."""
    mine = sorted((rows, index) for index, t, rows in cells(run) if t == temperature)
    lost = [rows for rows, index in mine if (high := run.get(*_arm(run, index), "over_plain", "high")) and high < 1]
    if not lost:
        return joined(f"no slow-down is shown up to {mine[-1][0]} rows")
    won = [rows for rows, _ in mine if rows < lost[0]]
    before = f", faster or as fast up to {won[-1]}" if won else ""
    return joined(f"plain decoding is faster from {lost[0]} rows{before}")


def _arms(run: LoadedRun) -> Rows:
    """Return one table row for each temperature, number of rows and engine that were timed. Columns, as text: title,
    tokens per second, speed-up over plain decoding, tau, speed-up without prefill as a share of the allowed one, and
    the hardware's least time for a round (plain decoding: a step) as a share of the measured time."""
    rows: Rows = []
    for index, t, count in cells(run):
        base = ("report", "extra", "matrix", index)
        for name in run.get(*base, "arms"):
            arm = (*base, "arms", name)
            speed, tau, of_allowed = (run.at(*arm, key) for key in ("speed", "tau", "of_allowed"))
            drafts = run.get(*arm, "k")
            floor = run.at(*base, "floor", "round_share" if drafts else "plain_share")
            shown = number(floor, ".0%") if name == "plain" or drafts else ""
            over_plain, share = interval(run.ends(*arm, "over_plain")), number(of_allowed, ".0%")
            title = f"T {t:g}, {count} rows: {name}"
            rows.append([title, number(speed, ".0f"), over_plain, number(tau, ".2f"), share, shown])
    return rows


def phases(run: LoadedRun) -> list[Series]:
    """Return one bar series per phase of a round (`PHASES`): for each engine, the mean milliseconds of this phase per
    round. Return [] if phases were not timed."""
    base = ("report", "arms")
    arms = {name: (*base, name) for name in run.get(*base) or {} if run.get(*base, name, "phases")}
    series = []
    for phase in PHASES if arms else ():
        values = [run.at(*arm, "phases", phase, over=(*arm, "rounds"), times=1000.0) for arm in arms.values()]
        series.append(Series(phase, list(arms), values, mode="bar"))
    return series


def by_quantisation(*path: str) -> SeriesOf:
    """Return a function from a run to the series of the figure at `path`: one series for each pair of quantisations
    (target, draft), by temperature."""

    def series(run: LoadedRun) -> list[Series]:
        cells = run.get("report", "extra", "bits") or []
        at = {(cell["target"], cell["draft"], cell["temperature"]): index for index, cell in enumerate(cells)}
        temperatures = sorted({t for _, _, t in at})
        rows = []
        for target, draft in dict.fromkeys((target, draft) for target, draft, _ in at):
            indices = [at.get((target, draft, t), len(cells)) for t in temperatures]
            values = [run.at("report", "extra", "bits", index, *path) for index in indices]
            rows.append(Series(f"target {target}, draft {draft}", [f"T {t:g}" for t in temperatures], values))
        return rows

    return series


def curves(pattern: str) -> SeriesOf:
    """Return a function from a run to the training curves whose tags match the regular expression `pattern`. The group
    in the pattern is the name of the series."""

    def series(run: LoadedRun) -> list[Series]:
        lines = []
        for name, curve in run.curves.items():
            if curve and (match := re.fullmatch(pattern, name)):
                steps, values = zip(*thinned(curve), strict=True)
                few = "lines+markers" if len(steps) < 30 else "lines"
                lines.append(Series(match[1], steps, [Number(value, run.number) for value in values], mode=few))
        return lines

    return series


# (title, title of the y axis, pattern of the tags)
CURVES = (
    ("Loss", "loss", rf"{tags.TRAINING}/(loss\w*)"),
    ("Acceptance on the training texts", "acceptance", rf"{tags.TRAINING}/(acceptance\w*)"),
    ("Acceptance on a part of the held-out texts", "acceptance", rf"{tags.SERVING}/(acceptance)"),
    ("Acceptance on all held-out texts", "acceptance", rf"{tags.HELD_OUT}/acceptance_(T[\d.]+)"),
    ("Acceptance by depth, given the drafts before", "acceptance", rf"{tags.DEPTH}/acceptance_(\d+)"),
    ("Tokens per target call, predicted on held-out texts", "tau", rf"{tags.SERVING}/(tau)"),
    ("Tokens per target call, timed at checkpoints", "tau", rf"{tags.TIMED}/(tau)"),
    ("Speed-up, timed at checkpoints on few prompts", "speed-up", rf"{tags.SERVING}/(speedup\w*)"),
    ("Learning rate", "rate", rf"{tags.TRAINING}/(learning_rate)"),
    ("Gradient norm", "norm", rf"{tags.TRAINING}/(gradient_norm)"),
)
# (anchor, title, what is said if no run has figures, parts)
SECTIONS: tuple[tuple[str, str, str, Sequence[Part]], ...] = (
    (
        "acceptance",
        "Where drafts are accepted",
        "no held-out figures and no counts by depth were stored: cotrain train and cotrain bench write them",
        [
            chart(
                depth_chart,
                "depth",
                "Acceptance by depth",
                "depth of the draft",
                "acceptance",
                note="Predicted: on the held-out texts, by the token rule. Measured: with the rule that was timed.",
                range=(0, 1),
            ),
            domain_chart,
            chart(
                profiles("target at", "by_draft_temperature", float),
                "temperature",
                "Acceptance by the draft's temperature",
                "temperature of the draft",
                "acceptance",
                note="Verification is exact whatever the draft's temperature is; only acceptance depends on it.",
                range=(0, 1),
            ),
            chart(
                profiles("temperature", "by_context", str),
                "context",
                "Acceptance by length of the context",
                "tokens of context",
                "acceptance",
                range=(0, 1),
            ),
        ],
    ),
    (
        "speed",
        "Predicted beside measured",
        "no costs were measured: cotrain bench draft.path=<its draft> measures them",
        [
            chart(
                tau_by_length,
                "tau",
                "Tokens per target call",
                "draft length k",
                "tau",
                note="Held-out texts are not the timed texts; for those see tau in the table above.",
            ),
            chart(speed_by_length, "length", "Speed-up by draft length", "draft length k", "speed-up", at=1.0),
            paying_lengths,
        ],
    ),
    (
        "batch",
        "Speed by batch size",
        "one batch size was measured: python -m studies.matrix matrix.batches=[1,4,8,32] adds more",
        [batches],
    ),
    (
        "quantisation",
        "Quantisation and temperature",
        "one quantisation was measured: python -m studies.matrix matrix.targets=[none,int8] adds more",
        [
            chart(
                by_quantisation("speedup", "value"),
                "speedup",
                "Speed-up",
                "",
                "",
                note="Each over plain decoding of the same quantised target, on few prompts.",
                heat=True,
                spec=".2f",
            ),
            chart(by_quantisation("alpha"), "alpha", "Acceptance", "", "", heat=True),
        ],
    ),
    (
        "costs",
        "What a round costs",
        "no phases were timed",
        [
            chart(
                phases,
                "phases",
                "Milliseconds of a round",
                "",
                "milliseconds",
                note="A round has all rows together, and prefill is in no round. Verify: distributions, draws and the "
                "rule.",
                stacked=True,
            ),
        ],
    ),
    (
        "training",
        "Training",
        "no TensorBoard event files of this version were written: cotrain train writes them next to its draft",
        [
            chart(curves(pattern), f"curve{i}", title, "step", y, at=1.0 if y == "speed-up" else None, tabled=False)
            for i, (title, y, pattern) in enumerate(CURVES)
        ],
    ),
    (
        "differences",
        "Positions at which target and draft differ",
        "no figures by position were stored: cotrain train of this version writes them",
        [differences_section],
    ),
    (
        "replay",
        "Replay of a generation",
        "no generation was recorded: cotrain train and bench of this version record one, as Engine(record=) does",
        [replay],
    ),
    ("exactness", "Exactness", "exactness was not checked in this run: cotrain bench checks it", [exactness]),
    ("origin", "Origin of the figures", "the machine was not recorded", [origin]),
)
