"""The page's summary: how much faster, whether it accepts more than before training, whether it is exact."""

from collections.abc import Callable, Sequence
from math import nan
from typing import NamedTuple

from markupsafe import Markup

from cotrain.board import tags
from cotrain.page.loaded_run import LoadedRun, Number
from cotrain.page.rendering import Section, interval, joined, number, render, table
from inference.measure.costs import Costs
from inference.measure.timing import Interval


def headline(run: LoadedRun) -> Markup:
    """The run in one line of words."""
    if run.report is None:
        return _unmeasured(run)
    speed = _interval(run, "report", "speedup", "whole")
    regime = joined(Markup("<strong>{}</strong>").format(speed), f" at temperature {run.temperature:g}: ")
    value, low = run.get("report", "speedup", "whole", "value"), run.get("report", "speedup", "whole", "low")
    if value is None:
        return joined("no speed-up was measured")
    if run.get("report", "exactness", "passed") is False:
        return joined(regime, "not exact, do not serve it")
    high = run.get("report", "speedup", "whole", "high")
    faster = Interval(value, *(nan if end is None else end for end in (low, high))).faster  # as the report's advice
    if faster is False:
        return joined(regime, "plain decoding is faster; serve without this draft")
    if run.k is None and not run.tree:
        return joined(regime, "serve with this draft" if faster else "no speed-up is shown yet")
    shown = "serve" if faster else "no speed-up is shown yet; if you serve it, do so"
    return joined(regime, f"{shown} with ", _drafted(run))


def _drafted(run: LoadedRun) -> Markup:
    """What was timed and is to be served: a chain of k drafts or the planned tree."""
    if run.tree:
        return joined(f"its planned tree of {len(run.tree)} nodes")
    return joined("k = ", _length(run))


def _length(run: LoadedRun) -> Markup:
    planned = run.at("report", "extra", "planned_k")
    return number(planned if planned.value is not None else Number(float(run.k or 0), run.number), ".0f")


def _unmeasured(run: LoadedRun) -> Markup:
    loss = run.curves.get(tags.LOSS)
    steps = run.get("run", "settings", "trainer", "steps")
    if run.partial:
        return joined("not finished: ", f"step {loss[-1][0]}" if loss else "no step", f" of {steps}" if steps else "",
                      "; the same command resumes it")  # fmt: skip
    return joined("no speed was measured in this run (measure=false): acceptance alone")


def _interval(run: LoadedRun, *path: str, spec: str = ".2f", unit: str = "x") -> Markup:
    return interval([run.at(*path, end) for end in ("value", "low", "high")], spec, unit)


def alpha(run: LoadedRun) -> Number:
    """Acceptance on the held-out texts of the regime, of what is exported."""
    return run.at("report", "extra", "held_out", f"{run.alpha}_T{run.temperature:g}/all")


def share_of_costs(run: LoadedRun) -> Number:
    """The measured speed-up over the one that tau and the cost table allow, prefill left out: speedup / (tau round(0) /
    round(k))."""
    costs, tau = run.get("report", "extra", "costs"), run.get("report", "acceptance", "tau", "measured")
    speedup = run.get("report", "speedup", "decode", "value")
    if not costs or not tau or not speedup or run.k is None or run.k >= len(costs["target"]):
        return Number(None, run.number)
    parts = {**costs, "target": tuple(costs["target"]), "rest": tuple(costs["rest"])}
    table = Costs(**parts)
    return Number(speedup / (tau * table.round(0) / table.round(run.k)), run.number)


def floor(run: LoadedRun) -> Number:
    """The share of a measured round that the machine needs at least, from the matrix cell of the served regime."""
    for index, cell in enumerate(run.get("report", "extra", "matrix") or []):
        if cell["temperature"] == run.temperature and cell["rows"] == run.get("report", "settings", "rows"):
            return run.at("report", "extra", "matrix", index, "floor", "round_share")
    return run.at("report", "extra", "floor", "round_share")


def first_screen(runs: Sequence[LoadedRun]) -> Section:
    """Tiles if there is one run, and a table with a column a run."""
    tiles = _tiles(runs[0]) if len(runs) == 1 else []
    cells = {name: [part(run) for run in runs] for name, part in ROWS}
    rows = [[name, *[cell or DASH for cell in row]] for name, row in cells.items() if any(row)]
    figures = table(["", *[run.name for run in runs]], rows) if rows else None
    return Section("figures", "What was measured", render("figures.html", tiles=tiles, figures=figures))


class Tile(NamedTuple):
    """An answer in large type."""

    title: str
    answer: Markup
    note: str
    bad: bool = False


def _tiles(run: LoadedRun) -> list[Tile]:
    """Three answers."""
    faster = _interval(run, "report", "speedup", "whole") if run.report else joined("not measured")
    before = run.at("report", "extra", "checkpoints", 0, "tau")
    after = _exported_tau(run)
    more = joined(number(before, ".2f"), " → ", number(after, ".2f")) if after.value is not None else _alphas(run)
    passed = run.get("report", "exactness", "passed")
    exact = {True: "yes, checked", False: "no: see exactness"}.get(passed, "not checked")
    length = run.get("run", "settings", "policy", "k")  # that ranks checkpoints, not the planned one
    at = f" with k = {length}" if length else ""
    what = f"tokens per target call{at}, before training → now" if after.value is not None else "acceptance"
    return [
        Tile("faster", faster, "over plain decoding, with its 95 % interval"),
        Tile("accepts more", more, what),
        Tile("exact", joined(exact), "the text has the target's distribution", bad=passed is False),
    ]


def _exported_tau(run: LoadedRun) -> Number:
    step = run.get("report", "extra", "exported_step")
    for index, checkpoint in enumerate(run.get("report", "extra", "checkpoints") or []):
        if checkpoint["step"] == step and index:
            return run.at("report", "extra", "checkpoints", index, "tau")
    return Number(None, run.number)


def _alphas(run: LoadedRun) -> Markup:
    own = alpha(run)
    curve = run.curves.get(tags.at("acceptance", run.temperature))
    if own.value is None and curve:
        first, last = (Number(value, run.number) for _, value in (curve[0], curve[-1]))
        return joined(number(first), " → ", number(last))
    return number(own)


def _some(part: Callable[[LoadedRun], Markup], *path: str) -> Callable[[LoadedRun], Markup | None]:
    return lambda run: part(run) if run.get(*path) is not None else None


def _plain(*path: str, spec: str = ".3f") -> Callable[[LoadedRun], Markup | None]:
    return _some(lambda run: number(run.at(*path), spec), *path)


def _ranged(*path: str) -> Callable[[LoadedRun], Markup | None]:
    return _some(lambda run: _interval(run, *path), *path, "value")


def _share(part: Callable[[LoadedRun], Number]) -> Callable[[LoadedRun], Markup | None]:
    return lambda run: joined(number(share, ".0%")) if (share := part(run)).value is not None else None


def _exact(run: LoadedRun) -> Markup | None:
    passed = run.get("report", "exactness", "passed")
    return None if passed is None else joined("passed" if passed else "FAILED")


ROWS: list[tuple[str, Callable[[LoadedRun], Markup | None]]] = [
    ("speed-up over plain decoding", _ranged("report", "speedup", "whole")),
    ("the same, prefill left out", _ranged("report", "speedup", "decode")),
    ("share of what the costs of its parts allow", _share(share_of_costs)),
    ("share of a round that the machine cannot do without (floor)", _share(floor)),
    ("tokens per second, speculative", _plain("report", "arms", "speculative", "speed", spec=".0f")),
    ("tokens per second, plain", _plain("report", "arms", "plain", "speed", spec=".0f")),
    ("tokens per second, transformers", _plain("report", "arms", "transformers", "speed", spec=".0f")),
    ("tokens per target call (tau), measured", _plain("report", "acceptance", "tau", "measured")),
    ("tau, predicted on these texts", _plain("report", "acceptance", "tau", "predicted")),
    ("tau measured on more tokens", _plain("report", "extra", "parity", "tau_measured")),
    ("tau predicted on those", _plain("report", "extra", "parity", "tau_predicted")),
    ("acceptance rate on held-out texts", lambda run: number(alpha(run)) if alpha(run).value is not None else None),
    ("draft length planned, of chains", _plain("report", "extra", "planned_k", spec=".0f")),
    ("speed-up at temperature 0", _ranged("report", "extra", "greedy", "speculative", "speedup")),
    ("the same by n-gram look-up, without a draft", _ranged("report", "extra", "greedy", "ngram", "speedup")),
    ("exactness", _exact),
]
DASH = number(Number(None))
