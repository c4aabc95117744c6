"""Sections of charts on the page. They show acceptance, predicted and measured speed, quantisation, costs of a round,
and training curves."""

import re
from collections.abc import Sequence

from markupsafe import Markup

from cotrain.board import tags
from cotrain.page.loaded_run import LoadedRun, Number, thinned
from cotrain.page.rendering import Chart, Section, Series, by_run, drawn, interval, joined, number, render

KEY = re.compile(r"(?P<name>alpha|alpha_greedy_draft)_T(?P<t>[^/]+)/(?P<domain>.+)")
PHASES = ("draft", "target", "verify", "other")
HEAT_MAPS = (("speedup", ("speedup", "value"), "Speed-up", ".2f"), ("alpha", ("alpha",), "Acceptance", ".3f"))
# (title, title of the y axis, pattern of the tags; its group is the name of the series)
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


# --- acceptance


def acceptance(runs: Sequence[LoadedRun]) -> Section:
    """Return the section of acceptance by depth, domain, temperature and context."""
    lacking = "no held-out figures and no counts by depth were stored: cotrain train and cotrain bench write them"
    return Section("acceptance", "Where drafts are accepted", by_run(runs, _acceptance), lacking)


def _acceptance(run: LoadedRun) -> Markup | None:
    charts = [chart for part in (by_depth, by_domain, by_temperature, by_context) if (chart := part(run))]
    return drawn(charts) if charts else None


def by_depth(run: LoadedRun) -> Chart | None:
    """Return a chart of prefix and conditional acceptance by depth, measured on the timed texts and predicted on
    held-out texts."""
    series = []
    regime = f"T{run.temperature:g}/all"
    for name, words in (("prefix", "accepted with all earlier"), ("conditional", "accepted given all earlier")):
        measured = run.all("report", "acceptance", name, "measured")
        predicted = [] if run.greedy else depths(run, f"{name}_{regime}")  # these figures are for drafts drawn from q
        for side, values in (("measured", measured), ("predicted", predicted)):
            if values:
                series.append(Series(f"{words}, {side}", range(1, len(values) + 1), values))
    note = "Predicted: on the held-out texts, by the token rule. Measured: with the rule that was timed."
    return _acceptance_chart(run, "depth", "Acceptance by depth", "depth of the draft", series, note)


def depths(run: LoadedRun, stem: str) -> list[Number]:
    """Return the held-out figures with the keys `stem`/1, `stem`/2, ..."""
    held = run.get("report", "extra", "held_out") or {}
    numbers = sorted(int(key.rpartition("/")[2]) for key in held if re.fullmatch(re.escape(stem) + r"/\d+", key))
    return [run.at("report", "extra", "held_out", f"{stem}/{depth}") for depth in numbers]


def by_domain(run: LoadedRun) -> Chart | None:
    """Return a chart of acceptance by the target's temperature, with a bar for each domain if there are several."""
    keys = map(KEY.fullmatch, run.get("report", "extra", "held_out") or {})
    figures = [(match["t"], match["domain"], match[0]) for match in keys if match and match["name"] == run.alpha]
    domains = [name for name in dict.fromkeys(domain for _, domain, _ in figures) if name != "worst"]
    domains = [name for name in domains if name != "all"] if len(domains) > 2 else ["all"]
    series = []
    for domain in domains:
        mine = [(t, key) for t, one, key in figures if one == domain]
        values = [run.at("report", "extra", "held_out", key) for _, key in mine]
        series.append(Series(domain, [f"T {t}" for t, _ in mine], values, mode="bar"))
    series = [one for one in series if one.y]
    measure = "p of the draft's likeliest token" if run.greedy else "alpha = Σ min(p, q)"
    title = "Acceptance by domain and temperature" if len(domains) > 1 else "Acceptance by temperature"
    return _acceptance_chart(run, "domain", title, "temperature of the target", series, f"{measure}, on held-out texts")


def by_temperature(run: LoadedRun) -> Chart | None:
    """Return a chart of acceptance by the draft's temperature, with a line for each temperature of the target."""
    series = []
    for t, profile in (run.get("report", "extra", "profiles") or {}).items():
        path = ("report", "extra", "profiles", t, "by_draft_temperature")
        series.append(Series(f"target at {t}", [float(x) for x in profile["by_draft_temperature"]], run.all(*path)))
    note = "Verification is exact whatever the draft's temperature is; only acceptance depends on it."
    return _acceptance_chart(
        run, "temperature", "Acceptance by the draft's temperature", "temperature of the draft", series, note
    )


def by_context(run: LoadedRun) -> Chart | None:
    """Return a chart of acceptance by the number of tokens in the context."""
    series = []
    for t, profile in (run.get("report", "extra", "profiles") or {}).items():
        values = run.all("report", "extra", "profiles", t, "by_context")
        series.append(Series(f"temperature {t}", list(profile["by_context"]), values))
    return _acceptance_chart(run, "context", "Acceptance by length of the context", "tokens of context", series)


def _acceptance_chart(
    run: LoadedRun, name: str, title: str, x: str, series: list[Series], note: str = ""
) -> Chart | None:
    return Chart(f"{name}-{run.number}", title, x, "acceptance", series, note, range=(0, 1)) if series else None


# --- speed


def speed(runs: Sequence[LoadedRun]) -> Section:
    """Return the section of tau and speed-up by draft length, predicted and measured."""
    lacking = "no costs were measured: cotrain bench draft.path=<its draft> measures them"
    return Section("speed", "Predicted beside measured", by_run(runs, _lengths), lacking)


def batches(runs: Sequence[LoadedRun]) -> Section:
    """Return the section of speed-up by batch size and temperature. It says from which batch size on plain decoding is
    faster."""
    lacking = "one batch size was measured: python -m studies.matrix matrix.batches=[1,4,8,32] adds more"
    return Section("batch", "Speed by batch size", by_run(runs, _batches), lacking)


def costs(runs: Sequence[LoadedRun]) -> Section:
    """Return the section with the milliseconds of a round by phase."""
    return Section("costs", "What a round costs", by_run(runs, _phases), "no phases were timed")


def _lengths(run: LoadedRun) -> Markup | None:
    charts = [chart for part in (tau_by_length, speed_by_length) if (chart := part(run))]
    sentence = paying_lengths(run)
    if not charts:
        return None
    return joined(drawn(charts), Markup("<p>{}</p>").format(sentence) if sentence else None)


def tau_by_length(run: LoadedRun) -> Chart | None:
    """Return a chart of tau. It is predicted on held-out texts at each draft length, and measured at the timed one."""
    block = run.get("report", "settings", "verify") == "block"
    stem = f"T{run.temperature:g}/all"
    rules = ["tau_greedy_draft"] if run.greedy else [*(["tau_block"] if block else []), "tau"]
    predicted: list[Number] = next(filter(None, (depths(run, f"{rule}_{stem}") for rule in rules)), [])
    measured = [("measured while timed", run.at("report", "acceptance", "tau", "measured")),
                ("measured on more tokens", run.at("report", "extra", "parity", "tau_measured")),
                ("predicted on those", run.at("report", "extra", "parity", "tau_predicted"))]  # fmt: skip
    series = [Series("predicted on held-out texts", range(1, len(predicted) + 1), predicted)] if predicted else []
    series += [Series(name, [run.k], [one], mode="markers") for name, one in measured if one.value and run.k]
    note = "Held-out texts are not the timed texts; for those see tau in the table above."
    if not series:
        return None
    return Chart(f"tau-{run.number}", "Tokens per target call", "draft length k", "tau", series, note)


def speed_by_length(run: LoadedRun) -> Chart | None:
    """Return a chart of the speed-up. It is predicted from costs and acceptance at each draft length, and measured at
    the timed one."""
    predicted = run.all("report", "extra", "predicted_speedups")
    if not predicted:
        return None
    series = [Series("predicted", range(len(predicted)), predicted)]
    ends = [run.at("report", "speedup", "decode", end) for end in ("value", "low", "high")]
    if run.k is not None and ends[0].value is not None:
        series.append(Series("measured, prefill left out", [run.k], ends[:1], ends[1:2], ends[2:], mode="markers"))
    return Chart(f"length-{run.number}", "Speed-up by draft length", "draft length k", "speed-up", series, at=1.0)


def paying_lengths(run: LoadedRun) -> Markup | None:
    """Return a sentence that says at which draft lengths a speed-up is predicted."""
    predicted = run.all("report", "extra", "predicted_speedups")
    pays = [k for k, one in enumerate(predicted) if k and one.value and one.value > 1]
    if not predicted:
        return None
    if not pays:
        return joined("No draft length is predicted to be faster than plain decoding here.")
    best = max(pays, key=lambda k: predicted[k].value or 0)
    ends = f"from k = {pays[0]} to {pays[-1]}" if len(pays) > 1 else f"at k = {pays[0]} alone"
    more = "" if pays[-1] < len(predicted) - 1 else ", the longest considered"
    return joined(f"Predicted to be faster than plain decoding {ends}{more}; best at k = {best}, ",
                  number(predicted[best], ".2f"), "x.")  # fmt: skip


def cells(run: LoadedRun) -> list[tuple[int, float, int]]:
    """Return (index, temperature, rows) of each cell of the matrix."""
    matrix = run.get("report", "extra", "matrix") or []
    return [(index, cell["temperature"], cell["rows"]) for index, cell in enumerate(matrix)]


def _batches(run: LoadedRun) -> Markup | None:
    temperatures = sorted({t for _, t, _ in cells(run)})
    if not temperatures:
        return None
    series = [one for i, t in enumerate(temperatures) for one in _of_temperature(run, t, i)]
    chart = Chart(f"batch-{run.number}", "Speed-up by batch size", "rows decoded together", "speed-up", series,
                  "Allowed: what tau and the costs of a round's parts would give.", 1.0, log="x",
                  spec=".2f")  # fmt: skip
    crossings = [(t, crossing(run, t)) for t in temperatures]
    head = ["", "tokens/s", "over plain", "tau", "of what costs allow", "floor's share"]
    return render("batches.html", charts=drawn([chart], wide=True), crossings=crossings, head=head, rows=_arms(run))


def _at(run: LoadedRun, index: int, *path: str) -> Number:
    name = run.get("report", "extra", "matrix", index, "speculative")
    return run.at("report", "extra", "matrix", index, "arms", name, *path)


def _of_temperature(run: LoadedRun, temperature: float, colour: int) -> list[Series]:
    mine = [(rows, index) for index, t, rows in cells(run) if t == temperature]
    x = [rows for rows, _ in mine]
    value, low, high = ([_at(run, index, "over_plain", end) for _, index in mine] for end in ("value", "low", "high"))
    allowed = [_at(run, index, "allowed") for _, index in mine]
    return [Series(f"T {temperature:g}, measured", x, value, low, high, colour=colour),
            Series(f"T {temperature:g}, allowed", x, allowed, mode="lines", colour=colour)]  # fmt: skip


def crossing(run: LoadedRun, temperature: float) -> Markup:
    """Return a phrase that says from which batch size on plain decoding is faster. This means that the interval is
    below 1."""
    mine = sorted((rows, index) for index, t, rows in cells(run) if t == temperature)
    lost = [rows for rows, index in mine if (high := _at(run, index, "over_plain", "high").value) and high < 1]
    if not lost:
        return joined(f"no slow-down is shown up to {mine[-1][0]} rows")
    won = [rows for rows, _ in mine if rows < lost[0]]
    before = f", faster or as fast up to {won[-1]}" if won else ""
    return joined(f"plain decoding is faster from {lost[0]} rows{before}")


def _arms(run: LoadedRun) -> list[list[object]]:
    """Return table rows, one for each arm of each cell of the matrix."""
    rows: list[list[object]] = []
    for index, t, count in cells(run):
        base = ("report", "extra", "matrix", index)
        for name in run.get(*base, "arms"):
            arm = (*base, "arms", name)
            ends = [run.at(*arm, "over_plain", end) for end in ("value", "low", "high")]
            floor = run.at(*base, "floor", "round_share" if run.get(*arm, "k") else "plain_share")
            shown = number(floor, ".0%") if name == "plain" or run.get(*arm, "k") else ""
            rows.append([f"T {t:g}, {count} rows: {name}", number(run.at(*arm, "speed"), ".0f"), interval(ends),
                         number(run.at(*arm, "tau"), ".2f"), number(run.at(*arm, "of_allowed"), ".0%"),
                         shown])  # fmt: skip
    return rows


def _phases(run: LoadedRun) -> Markup | None:
    arms = [name for name in run.get("report", "arms") or {} if run.get("report", "arms", name, "phases")]
    if not arms:
        return None
    series = []
    for phase in PHASES:
        values = [run.at("report", "arms", name, "phases", phase, over=("report", "arms", name, "rounds"), times=1000.0)
                  for name in arms]  # fmt: skip
        series.append(Series(phase, arms, values, mode="bar"))
    note = "A round has all rows together, and prefill is in no round. Verify: distributions, draws and the rule."
    chart = Chart(f"phases-{run.number}", "Milliseconds of a round", "", "milliseconds", series, note, stacked=True)
    return drawn([chart])


# --- quantisation


def quantisation(runs: Sequence[LoadedRun]) -> Section:
    """Return the section of speed-up and acceptance by the quantisations of target and draft, and by temperature."""
    lacking = "one quantisation was measured: python -m studies.matrix matrix.targets=[none,int8] adds more"
    return Section("quantisation", "Quantisation and temperature", by_run(runs, _maps), lacking)


def _maps(run: LoadedRun) -> Markup | None:
    cells = run.get("report", "extra", "bits")
    if not cells:
        return None
    at = {(cell["target"], cell["draft"], cell["temperature"]): index for index, cell in enumerate(cells)}
    pairs = list(dict.fromkeys((target, draft) for target, draft, _ in at))
    temperatures = sorted({t for _, _, t in at})
    charts = []
    for name, path, title, spec in HEAT_MAPS:
        series = []
        for target, draft in pairs:
            indices = [at.get((target, draft, t), len(cells)) for t in temperatures]
            values = [run.at("report", "extra", "bits", index, *path) for index in indices]
            series.append(Series(f"target {target}, draft {draft}", [f"T {t:g}" for t in temperatures], values))
        note = "Each over plain decoding of the same quantised target, on few prompts." if name == "speedup" else ""
        charts.append(Chart(f"{name}-{run.number}", title, "", "", series, note, heat=True, spec=spec))
    return drawn(charts)


# --- training


def training(runs: Sequence[LoadedRun]) -> Section:
    """Return the section with the curves of the training."""
    lacking = "no TensorBoard event files of this version were written: cotrain train writes them next to its draft"
    return Section("training", "Training", by_run(runs, _curves), lacking)


def _curves(run: LoadedRun) -> Markup | None:
    charts = [chart for index, group in enumerate(CURVES) if (chart := _curve(run, index, *group))]
    return drawn(charts) if charts else None


def _curve(run: LoadedRun, index: int, title: str, y: str, pattern: str) -> Chart | None:
    series = []
    for name, curve in run.curves.items():
        match = re.fullmatch(pattern, name)
        if match and curve:
            points = thinned(curve)
            few = "lines+markers" if len(points) < 30 else "lines"
            values = [Number(value, run.number) for _, value in points]
            series.append(Series(match[1], [step for step, _ in points], values, mode=few))
    at = 1.0 if y == "speed-up" else None
    if not series:
        return None
    return Chart(f"curve{index}-{run.number}", title, "step", y, series, at=at, tabled=False)
