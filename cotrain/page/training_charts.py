"""How training went: loss and its parts, acceptance, tau and speed-up by step, from the run's event files."""

import re
from collections.abc import Sequence

from cotrain.board import tags
from cotrain.page.charts import Chart, Series, drawn
from cotrain.page.event_curves import thinned
from cotrain.page.loaded_run import Number, Run
from cotrain.page.markup import Html, tag
from cotrain.page.section import Section, by_run

# title, what the y axis says, the tags' pattern with the series' name in it
GROUPS = (
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


def training(runs: Sequence[Run]) -> Section:
    """Charts of the curves that a run has."""
    lacking = "no TensorBoard event files of this version: cotrain train writes them, beside its draft"
    return Section("training", "Training", by_run(runs, _charts), lacking)


def _charts(run: Run) -> Html | None:
    found = [chart for place, group in enumerate(GROUPS) if (chart := _chart(run, place, *group))]
    return tag("div", *map(drawn, found), class_="grid") if found else None


def _chart(run: Run, place: int, title: str, y: str, pattern: str) -> Chart | None:
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
    return Chart(f"curve{place}-{run.number}", title, "step", y, series, at=at, tabled=False)
