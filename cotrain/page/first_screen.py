"""The page's summary: how much faster, whether it accepts more than before training, whether it is exact."""

from collections.abc import Callable, Sequence
from math import nan

from cotrain.board import tags
from cotrain.page.charts import interval, number
from cotrain.page.loaded_run import Number, Run
from cotrain.page.markup import Html, joined, table, tag
from cotrain.page.section import Section
from inference.measure.costs import Costs
from inference.measure.timing import Interval


def headline(run: Run) -> Html:
    """The run in one line of words."""
    if run.report is None:
        return _unmeasured(run)
    speed = _interval(run, "report", "speedup", "whole")
    said = [tag("strong", speed), f" at temperature {run.temperature:g}: "]
    value, low = run.get("report", "speedup", "whole", "value"), run.get("report", "speedup", "whole", "low")
    if value is None:
        return joined("no speed-up was measured")
    if run.get("report", "exactness", "passed") is False:
        return joined(*said, "not exact, do not serve it")
    high = run.get("report", "speedup", "whole", "high")
    faster = Interval(value, *(nan if end is None else end for end in (low, high))).faster  # as the report's advice
    if faster is False:
        return joined(*said, "plain decoding is faster; serve without this draft")
    if run.k is None and not run.tree:
        return joined(*said, "serve with this draft" if faster else "no speed-up is shown yet")
    shown = "serve" if faster else "no speed-up is shown yet; if you serve it, do so"
    return joined(*said, f"{shown} with ", _drafted(run))


def _drafted(run: Run) -> Html:
    """What was timed, and is to be served: a chain of k drafts or the planned tree."""
    if run.tree:
        return joined(f"its planned tree of {len(run.tree)} nodes")
    return joined("k = ", _length(run))


def _length(run: Run) -> Html:
    planned = run.at("report", "extra", "planned_k")
    return number(planned if planned.value is not None else Number(float(run.k or 0), run.number), ".0f")


def _unmeasured(run: Run) -> Html:
    loss = run.curves.get(tags.LOSS)
    steps = run.get("run", "settings", "trainer", "steps")
    if run.partial:
        return joined("not finished: ", f"step {loss[-1][0]}" if loss else "no step", f" of {steps}" if steps else "",
                      "; the same command resumes it")  # fmt: skip
    return joined("no speed was measured in this run (measure=false): acceptance alone")


def _interval(run: Run, *path: str, spec: str = ".2f", unit: str = "x") -> Html:
    return interval([run.at(*path, end) for end in ("value", "low", "high")], spec, unit)


def alpha(run: Run) -> Number:
    """Acceptance on the held-out texts of the regime, of what is exported."""
    return run.at("report", "extra", "held_out", f"{run.alpha}_T{run.temperature:g}/all")


def share_of_costs(run: Run) -> Number:
    """What of the speed-up that tau and the cost table allow was measured, prefill left out: speedup / (tau round(0) /
    round(k))."""
    costs, tau = run.get("report", "extra", "costs"), run.get("report", "acceptance", "tau", "measured")
    speedup = run.get("report", "speedup", "decode", "value")
    if not costs or not tau or not speedup or run.k is None or run.k >= len(costs["target"]):
        return Number(None, run.number)
    parts = {**costs, "target": tuple(costs["target"]), "rest": tuple(costs["rest"])}
    found = Costs(**parts)
    return Number(speedup / (tau * found.round(0) / found.round(run.k)), run.number)


def floor(run: Run) -> Number:
    """What of a measured round the machine could not do without, from the matrix cell of the served regime."""
    for place, cell in enumerate(run.get("report", "extra", "matrix") or []):
        if cell["temperature"] == run.temperature and cell["rows"] == run.get("report", "settings", "rows"):
            return run.at("report", "extra", "matrix", place, "floor", "round_share")
    return run.at("report", "extra", "floor", "round_share")


def first_screen(runs: Sequence[Run]) -> Section:
    """Tiles of one run, and a table with a column a run."""
    tiles = tag("div", *_tiles(runs[0]), class_="tiles") if len(runs) == 1 else None
    head: list[object] = ["", *[run.name for run in runs]]
    cells = {name: [part(run) for run in runs] for name, part in ROWS}
    rows = [[name, *[cell or DASH for cell in found]] for name, found in cells.items() if any(found)]
    made = table(head, rows) if rows else None
    return Section("figures", "What was measured", joined(tiles, made, tag("p", WORDS, class_="note")))


def _tiles(run: Run) -> list[Html]:
    """Three answers."""
    faster = _interval(run, "report", "speedup", "whole") if run.report else joined("not measured")
    before = run.at("report", "extra", "checkpoints", 0, "tau")
    after = _exported_tau(run)
    more = joined(number(before, ".2f"), " → ", number(after, ".2f")) if after.value is not None else _alphas(run)
    passed = run.get("report", "exactness", "passed")
    exact = {True: "yes, checked", False: "no: see exactness"}.get(passed, "not checked")
    length = run.get("run", "settings", "policy", "k")  # at which checkpoints are ranked, not the one that was planned
    at = f" with k = {length}" if length else ""
    what = f"tokens per target call{at}, before training → now" if after.value is not None else "acceptance"
    return [
        _tile("faster", faster, "over plain decoding, with its 95 % interval"),
        _tile("accepts more", more, what),
        _tile("exact", joined(exact), "the text has the target's distribution", bad=passed is False),
    ]


def _tile(title: str, shown: Html, note: str, bad: bool = False) -> Html:
    parts = tag("div", title, class_="what"), tag("div", shown, class_="big"), tag("div", note, class_="note")
    return tag("div", *parts, class_="tile bad" if bad else "tile")


def _exported_tau(run: Run) -> Number:
    step = run.get("report", "extra", "exported_step")
    for place, kept in enumerate(run.get("report", "extra", "checkpoints") or []):
        if kept["step"] == step and place:
            return run.at("report", "extra", "checkpoints", place, "tau")
    return Number(None, run.number)


def _alphas(run: Run) -> Html:
    own = alpha(run)
    curve = run.curves.get(tags.at("acceptance", run.temperature))
    if own.value is None and curve:
        first, last = (Number(value, run.number) for _, value in (curve[0], curve[-1]))
        return joined(number(first), " → ", number(last))
    return number(own)


def _some(part: Callable[[Run], Html], *path: str) -> Callable[[Run], Html | None]:
    return lambda run: part(run) if run.get(*path) is not None else None


def _plain(*path: str, spec: str = ".3f") -> Callable[[Run], Html | None]:
    return _some(lambda run: number(run.at(*path), spec), *path)


def _ranged(*path: str) -> Callable[[Run], Html | None]:
    return _some(lambda run: _interval(run, *path), *path, "value")


def _share(part: Callable[[Run], Number]) -> Callable[[Run], Html | None]:
    return lambda run: joined(number(found, ".0%")) if (found := part(run)).value is not None else None


def _exact(run: Run) -> Html | None:
    passed = run.get("report", "exactness", "passed")
    return None if passed is None else joined("passed" if passed else "FAILED")


ROWS: list[tuple[str, Callable[[Run], Html | None]]] = [
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
DASH = tag("span", "–", title="not measured in this run")
WORDS = ("Speed-up: tokens per wall second of both sides on the same engine, prompts and machine, in turns; in "
         "brackets its 95 % bootstrap interval over batches. tau: sum of new tokens / sum of target calls, "
         "the one after the accepted ones included. A dash: not measured.")  # fmt: skip
