"""Comparison of several runs on the page: acceptance, tau and predicted speed, and paired gains if the held-out texts
are the same."""

import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from cotrain.evaluation.comparison import Gain, compare, left_out
from cotrain.page.loaded_run import LoadedRun, Number
from cotrain.page.rendering import (
    Chart,
    Rows,
    Section,
    Series,
    drawn,
    html_table,
    interval,
    joined,
    number,
    numbered_series,
)
from cotrain.page.run_charts import SeriesOf, figures_by_depth, speedups


def comparison_section(runs: Sequence[LoadedRun]) -> Section:
    """Return the section that compares the runs: charts, a table of settings, and the gains over the first run. With
    fewer than two runs it has no body."""
    if len(runs) < 2:
        return Section("runs", "Runs compared", None, "one run: name more with run=<folder> run=<folder>")
    charts = [
        Chart(f"runs-{name}", *axes, [one for run in runs for one in series(run)], **look)
        for series, name, axes, look in CHARTS
    ]
    return Section("runs", "Runs compared", joined(drawn(charts), _settings(runs), _gains(runs)))


def _temperatures(run: LoadedRun) -> list[Series]:
    keys = {key[len("alpha_T") : -len("/all")]: key for key in run.held_out if re.fullmatch("alpha_T.*/all", key)}
    values = {t: run.judged(key) for t, key in keys.items()}
    if not values:  # of a run that measured no speed
        values = {t: run.at("held_out", "texts", t, "alpha") for t in run.get("held_out", "texts") or {}}
    bars = Series(run.name, [f"T {t}" for t in values], list(values.values()), mode="bar", colour=run.number)
    return [bars] if values else []


def _depths(run: LoadedRun) -> list[Series]:
    values = run.all("report", "acceptance", "conditional", "measured")
    return numbered_series(
        run.name, values or figures_by_depth(run, f"conditional_T{run.temperature:g}/all"), colour=run.number
    )


def _speeds(run: LoadedRun) -> list[Series]:
    return speedups(run, f"{run.name}, predicted", f"{run.name}, measured", mode="lines", colour=run.number)


# (series of a run, name, title and axes, other fields)
CHARTS: tuple[tuple[SeriesOf, str, tuple[str, str, str], dict[str, Any]], ...] = (
    (
        _temperatures,
        "alpha",
        ("Acceptance", "temperature", "acceptance"),
        {
            "note": "alpha = Σ min(p, q) on each run's own held-out texts; paired gains are over texts that all runs "
            "have.",
            "range": (0, 1),
        },
    ),
    (
        _depths,
        "depth",
        ("Acceptance by depth, given that all earlier drafts were accepted", "depth", "acceptance"),
        {"range": (0, 1)},
    ),
    (_speeds, "speed", ("Speed-up", "draft length k", "speed-up"), {"note": "Prefill left out.", "at": 1.0}),
)


def _settings(runs: Sequence[LoadedRun]) -> Markup | None:
    """Return a table of the settings in which runs usually differ, read from each run's files; None if no run has
    any."""
    rows: Rows = []
    for name, paths in SETTINGS:
        cells = [next((value for path in paths if (value := run.get(*path)) is not None), None) for run in runs]
        if any(cell is not None for cell in cells):
            rows.append([name, *[_words(cell) for cell in cells]])
    return html_table(["", *[run.name for run in runs]], rows, "how they were made") if rows else None


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "–" if value is None else str(value)


SETTINGS = (
    ("kind", (("run", "settings", "draft", "kind"), ("report", "settings", "proposer"))),
    ("loss at first", (("report", "extra", "training", "loss", "first"), ("run", "settings", "loss", "first"))),
    ("loss then", (("report", "extra", "training", "loss", "then"), ("run", "settings", "loss", "then"))),
    ("starts from", (("report", "extra", "training", "init", "kind"), ("run", "settings", "init", "kind"))),
    ("layers", (("report", "extra", "training", "init", "layers"), ("run", "settings", "init", "layers"))),
    ("steps", (("report", "extra", "training", "steps"), ("held_out", "steps"))),
    ("verification", (("report", "settings", "verify"),)),
    ("seed", (("held_out", "seed"),)),
    ("label", (("held_out", "label"),)),
)


def _gains(runs: Sequence[LoadedRun]) -> Markup:
    """Return a table of the gains in tau over the first run, paired by text, with a note for each run that is left
    out."""
    judged = [run for run in runs if run.documents["held_out"]]
    if len(judged) < 2:
        return Markup('<p class="note">No paired gains: fewer than two runs stored held-out figures by text.</p>')
    labels = {f"{run.name} ({run.number + 1})": [run.documents["held_out"]] for run in judged}
    baseline = next(iter(labels))
    gains, absent = compare(labels, baseline), left_out(labels, baseline)
    notes = (Markup('<p class="note">No paired gains of {}: {}.</p>').format(*one) for one in absent.items())
    rows = [_row(gain) for gain in gains if gain.label != baseline]
    head = ["", "tau", "gain", "acceptance", "KL (nats)", "calibration error"]
    return html_table(head, rows, f"tau over {baseline}, paired by text, 95 % intervals") + Markup("").join(notes)


def _row(gain: Gain) -> list[object]:
    """Return the cells of a table row with one gain, formatted as `cotrain compare` prints it."""
    values = [Number(value) for value in (gain.gain, gain.low, gain.high)]
    tau, *rest = (number(Number(value)) for value in (gain.tau, gain.alpha, gain.kl, gain.calibration))
    return [f"{gain.label}, T {gain.temperature}, k = {gain.k}", tau, interval(values, "+.1%", ""), *rest]
