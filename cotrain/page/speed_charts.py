"""Predicted beside measured, over draft lengths and batch sizes, and what a round's time goes to."""

from collections.abc import Sequence

from cotrain.page.acceptance_charts import depths
from cotrain.page.charts import Chart, Series, drawn, interval, number
from cotrain.page.loaded_run import Number, Run
from cotrain.page.markup import Html, joined, table, tag
from cotrain.page.section import Section, by_run

PHASES = ("draft", "target", "verify", "other")


def speed(runs: Sequence[Run]) -> Section:
    """tau and speed-up over k, and over batch sizes where a matrix was measured."""
    lacking = "no costs were measured: cotrain bench draft.path=<its draft> measures them"
    return Section("speed", "Predicted beside measured", by_run(runs, _lengths), lacking)


def batches(runs: Sequence[Run]) -> Section:
    """The speed-up by batch size, a line a temperature, and where drafting stops paying."""
    lacking = "one batch size was measured: cotrain bench matrix.temperatures=[0,1] matrix.batches=[1,4,8,32] adds more"
    return Section("batch", "Speed by batch size", by_run(runs, _batches), lacking)


def costs(runs: Sequence[Run]) -> Section:
    """Milliseconds of a round by phase."""
    return Section("costs", "What a round costs", by_run(runs, _phases), "no phases were timed")


def _lengths(run: Run) -> Html | None:
    found = [chart for part in (tau_by_length, speed_by_length) if (chart := part(run))]
    crossed = _crossover(run)
    if not found:
        return None
    return joined(tag("div", *map(drawn, found), class_="grid"), tag("p", crossed) if crossed else None)


def tau_by_length(run: Run) -> Chart | None:
    """Predicted on held-out texts at every k, beside what was measured at the draft length timed."""
    block = run.get("report", "settings", "verify") == "block"
    stem = f"T{run.temperature:g}/all"
    rules = ["tau_greedy_draft"] if run.greedy else [*(["tau_block"] if block else []), "tau"]
    predicted: list[Number] = next(filter(None, (depths(run, f"{rule}_{stem}") for rule in rules)), [])
    measured = [("measured while timed", run.at("report", "acceptance", "tau", "measured")),
                ("measured on more tokens", run.at("report", "extra", "parity", "tau_measured")),
                ("predicted on those", run.at("report", "extra", "parity", "tau_predicted"))]  # fmt: skip
    series = [Series("predicted on held-out texts", range(1, len(predicted) + 1), predicted)] if predicted else []
    series += [Series(name, [run.k], [one], mode="markers") for name, one in measured if one.value and run.k]
    note = "Held-out texts are other texts than those timed; on the timed ones see tau in the table above."
    if not series:
        return None
    return Chart(f"tau-{run.number}", "Tokens per target call", "draft length k", "tau", series, note)


def speed_by_length(run: Run) -> Chart | None:
    """The prediction from the costs of the parts and the acceptance, beside the measured speed-up."""
    predicted = run.all("report", "extra", "predicted_speedups")
    if not predicted:
        return None
    series = [Series("predicted", range(len(predicted)), predicted)]
    ends = [run.at("report", "speedup", "decode", end) for end in ("value", "low", "high")]
    if run.k is not None and ends[0].value is not None:
        series.append(Series("measured, prefill left out", [run.k], ends[:1], ends[1:2], ends[2:], mode="markers"))
    return Chart(f"length-{run.number}", "Speed-up by draft length", "draft length k", "speed-up", series, at=1.0)


def _crossover(run: Run) -> Html | None:
    """From which k to which drafting is predicted to pay."""
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


def cells(run: Run) -> list[tuple[int, float, int]]:
    """(place, temperature, rows) of the matrix."""
    found = run.get("report", "extra", "matrix") or []
    return [(place, cell["temperature"], cell["rows"]) for place, cell in enumerate(found)]


def _batches(run: Run) -> Html | None:
    found = cells(run)
    if not found:
        return None
    series = [one for i, t in enumerate(sorted({t for _, t, _ in found})) for one in _of_temperature(run, t, i)]
    chart = Chart(f"batch-{run.number}", "Speed-up by batch size", "rows decoded together", "speed-up", series,
                  "Allowed: what tau and the costs of a round's parts would give.", 1.0, log="x",
                  spec=".2f")  # fmt: skip
    said = [tag("li", joined(f"temperature {t:g}: ", crossing(run, t))) for t in sorted({t for _, t, _ in found})]
    return joined(tag("div", drawn(chart), class_="grid wide"), tag("ul", *said), _matrix(run))


def _at(run: Run, place: int, *path: str) -> Number:
    name = run.get("report", "extra", "matrix", place, "speculative")
    return run.at("report", "extra", "matrix", place, "arms", name, *path)


def _of_temperature(run: Run, temperature: float, colour: int) -> list[Series]:
    mine = [(rows, place) for place, t, rows in cells(run) if t == temperature]
    x = [rows for rows, _ in mine]
    value, low, high = ([_at(run, place, "over_plain", end) for _, place in mine] for end in ("value", "low", "high"))
    allowed = [_at(run, place, "allowed") for _, place in mine]
    return [Series(f"T {temperature:g}, measured", x, value, low, high, colour=colour),
            Series(f"T {temperature:g}, allowed", x, allowed, mode="lines", colour=colour)]  # fmt: skip


def crossing(run: Run, temperature: float) -> Html:
    """The batch size at which drafting stops paying, by the intervals."""
    mine = sorted((rows, place) for place, t, rows in cells(run) if t == temperature)
    lost = [rows for rows, place in mine if (high := _at(run, place, "over_plain", "high").value) and high < 1]
    if not lost:
        return joined(f"no slow-down is shown up to {mine[-1][0]} rows")
    kept = [rows for rows, _ in mine if rows < lost[0]]
    before = f", faster or as fast up to {kept[-1]}" if kept else ""
    return joined(f"plain decoding is faster from {lost[0]} rows{before}")


def _matrix(run: Run) -> Html:
    """Every arm of every cell."""
    rows: list[list[object]] = []
    for place, t, count in cells(run):
        base = ("report", "extra", "matrix", place)
        for name in run.get(*base, "arms"):
            arm = (*base, "arms", name)
            ends = [run.at(*arm, "over_plain", end) for end in ("value", "low", "high")]
            floor = run.at(*base, "floor", "round_share" if run.get(*arm, "k") else "plain_share")
            shown = number(floor, ".0%") if name == "plain" or run.get(*arm, "k") else ""
            rows.append([f"T {t:g}, {count} rows: {name}", number(run.at(*arm, "speed"), ".0f"), interval(ends),
                         number(run.at(*arm, "tau"), ".2f"), number(run.at(*arm, "of_allowed"), ".0%"),
                         shown])  # fmt: skip
    head: list[object] = ["", "tokens/s", "over plain", "tau", "of what costs allow", "floor's share"]
    return tag("details", tag("summary", "all arms"), table(head, rows))


def _phases(run: Run) -> Html | None:
    arms = [name for name in run.get("report", "arms") or {} if run.get("report", "arms", name, "phases")]
    if not arms:
        return None
    series = []
    for phase in PHASES:
        values = [run.at("report", "arms", name, "phases", phase, over=("report", "arms", name, "rounds"), times=1000.0)
                  for name in arms]  # fmt: skip
        series.append(Series(phase, arms, values, mode="bar"))
    note = "Of all rows of a round together; prefill is in no round. Verify: distributions, draws and the rule."
    chart = Chart(f"phases-{run.number}", "Milliseconds of a round", "", "milliseconds", series, note, stacked=True)
    return tag("div", drawn(chart), class_="grid")
