"""Comparison of several runs on the page. It shows acceptance, tau and predicted speed, and paired gains if the
held-out texts are the same."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from cotrain.errors import UserError
from cotrain.evaluation.comparison import Gain, compare
from cotrain.page.loaded_run import LoadedRun, Number
from cotrain.page.rendering import Chart, Section, Series, drawn, escaped, interval, joined, number, table
from cotrain.page.run_charts import depths


def comparison(runs: Sequence[LoadedRun]) -> Section:
    """Return the section that compares the runs: charts, a table of settings, and the gains over the first run."""
    lacking = "one run: name more with run=<folder> run=<folder>"
    if len(runs) < 2:
        return Section("runs", "Runs compared", None, lacking)
    charts = [chart for chart in (_temperatures(runs), _depths(runs), _speeds(runs)) if chart]
    return Section("runs", "Runs compared", joined(drawn(charts), _settings(runs), _gains(runs)))


def _temperatures(runs: Sequence[LoadedRun]) -> Chart | None:
    series = []
    for run in runs:
        held = run.get("report", "extra", "held_out") or {}
        keys = [key for key in held if key.startswith("alpha_T") and key.endswith("/all")]
        values = [run.at("report", "extra", "held_out", key) for key in keys] or _judged(run)[1]
        temperatures = [key[len("alpha_T") : -len("/all")] for key in keys] or _judged(run)[0]
        if values:
            series.append(Series(run.name, [f"T {t}" for t in temperatures], values, mode="bar", colour=run.number))
    note = "alpha = Σ min(p, q) on each run's own held-out texts; paired gains are over texts that all runs have."
    if not series:
        return None
    return Chart("runs-alpha", "Acceptance", "temperature", "acceptance", series, note, range=(0, 1))


def _judged(run: LoadedRun) -> tuple[list[str], list[Number]]:
    """Return temperatures and acceptance from held_out.json, for a run that measured no speed."""
    texts = run.get("held_out", "texts") or {}
    return list(texts), [run.at("held_out", "texts", t, "alpha") for t in texts]


def _depths(runs: Sequence[LoadedRun]) -> Chart | None:
    series = []
    for run in runs:
        values = run.all("report", "acceptance", "conditional", "measured")
        values = values or depths(run, f"conditional_T{run.temperature:g}/all")
        if values:
            series.append(Series(run.name, range(1, len(values) + 1), values, colour=run.number))
    title = "Acceptance by depth, given that all earlier drafts were accepted"
    return Chart("runs-depth", title, "depth", "acceptance", series, range=(0, 1)) if series else None


def _speeds(runs: Sequence[LoadedRun]) -> Chart | None:
    series = []
    for run in runs:
        values = run.all("report", "extra", "predicted_speedups")
        ends = [run.at("report", "speedup", "decode", end) for end in ("value", "low", "high")]
        if values:
            series.append(Series(f"{run.name}, predicted", range(len(values)), values, mode="lines", colour=run.number))
        if run.k is not None and ends[0].value is not None:
            parts = (ends[:1], ends[1:2], ends[2:])
            series.append(Series(f"{run.name}, measured", [run.k], *parts, mode="markers", colour=run.number))
    note = "Prefill left out."
    return Chart("runs-speed", "Speed-up", "draft length k", "speed-up", series, note, at=1.0) if series else None


def _settings(runs: Sequence[LoadedRun]) -> Markup | None:
    """Return a table of the settings in which runs usually differ, from the files of each run."""
    rows: list[list[object]] = []
    for name, paths in SETTINGS:
        cells = [next((value for path in paths if (value := run.get(*path)) is not None), None) for run in runs]
        if any(cell is not None for cell in cells):
            rows.append([name, *[_words(cell) for cell in cells]])
    return table(["", *[run.name for run in runs]], rows, "how they were made") if rows else None


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
    """Return a table of the gains in tau over the first run, paired by text."""
    judged = [run for run in runs if run.documents["held_out"]]
    if len(judged) < 2:
        return Markup('<p class="note">No paired gains: fewer than two runs stored held-out figures by text.</p>')
    labels = defaultdict(list)
    for run in judged:
        labels[f"{run.name} ({run.number + 1})"].append(run.documents["held_out"])
    baseline = next(iter(labels))
    try:
        gains = compare(dict(labels), baseline)
    except (UserError, KeyError) as error:
        return Markup('<p class="note">No paired gains: {}.</p>').format(escaped(error))
    rows: list[list[object]] = [_row(gain) for gain in gains if gain.label != baseline]
    head: list[object] = ["", "tau", "gain", "acceptance", "KL (nats)", "calibration error"]
    return table(head, rows, f"tau over {baseline}, paired by text, 95 % intervals")


def _row(gain: Gain) -> list[object]:
    """Return one row of the table of gains, with the figures of `cotrain compare`."""
    values = [Number(value) for value in (gain.gain, gain.low, gain.high)]
    return [f"{gain.label}, T {gain.temperature}, k = {gain.k}", number(Number(gain.tau)),
            interval(values, "+.1%", ""), number(Number(gain.alpha)), number(Number(gain.kl)),
            number(Number(gain.calibration))]  # fmt: skip
