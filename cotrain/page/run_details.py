"""Parts of the page that are no charts: worst contexts, replay of a generation, exactness, origin of the figures."""

from typing import Any

from markupsafe import Markup

from cotrain.config.settings import flat
from cotrain.page.loaded_run import LoadedRun, Number
from cotrain.page.rendering import Chart, Rows, Series, drawn, escaped, render

KEYS = (
    "Keys: space plays and pauses, ← → step, ↑ ↓ change the row, - and + the speed, shift with an arrow turns the "
    "scene; drag turns it too."
)
RULES = {
    "tree": "Siblings are tried in turn: p / q is that of the first sibling, and is lower after each rejection. ",
    "traversal": "The traversal rule tests from the leaves up, and does not compare u with p / q. ",
    "block": "The block rule tests drafts together, and does not compare u with p / q. ",
    "match": "The match rule draws the target's token at u, and accepts a draft that equals it. ",
    "coupled": "The coupled rule draws target and draft with the same noise, and accepts a draft if both agree. ",
}
PARTS = (
    ("what was timed", ("report", "settings")),
    ("how the draft was made", ("report", "extra", "training")),
    ("settings of the run", ("run", "settings")),
)


def differences_section(run: LoadedRun) -> Markup | None:
    """Return how the total variation is distributed over positions, and the contexts in which it is largest. Return
    None if the report has no such figures."""
    base = ("report", "extra", "divergence")
    divergence = run.get(*base)
    if not divergence or not divergence["positions"]:
        return None
    values = run.all(*base, "lorenz")
    shares = [i / (len(values) - 1) for i in range(len(values))]
    alike = [Number(share, run.number) for share in shares]
    even = Series("if all positions differed alike", shares, alike, mode="lines")
    measured = Series("measured", shares, values)
    chart = Chart(
        f"lorenz-{run.number}",
        "Total variation by position",
        "share of positions, the worst first",
        "share of all that is lost",
        [measured, even],
        range=(0, 1),
    )
    worst = [_context(run, (*base, "worst", index), one) for index, one in enumerate(divergence["worst"])]
    return render(
        "differences.html",
        charts=drawn([chart]),
        fifth=values[len(values) // 5],
        mean=run.at(*base, "mean"),
        positions=run.at(*base, "positions"),
        worst=worst,
    )


def _context(run: LoadedRun, base: tuple[str | int, ...], one: dict[str, Any]) -> dict[str, Any]:
    """Return a context as values for the template, with the most probable tokens of target and draft as (text, p, q).
    base: the path of the context in the run's documents. one: the context's entry in the report."""
    sides = [
        (
            side,
            [
                (quoted(token["text"]), run.at(*base, side, i, "p"), run.at(*base, side, i, "q"))
                for i, token in enumerate(one[side])
            ],
        )
        for side in ("target", "draft")
    ]
    return {
        "tv": run.at(*base, "tv"),
        "domain": one["domain"],
        "before": one["before"],
        "next": one["next"],
        "sides": sides,
    }


def quoted(token: str) -> str:
    """Return a token in quotation marks, with line ends and tabs made visible."""
    return "“" + token.replace("\n", "⏎").replace("\t", "⇥") + "”"


def replay(run: LoadedRun) -> Markup | None:
    """Return a player for the recorded generation, which assets/replay.js draws. Return None if none was recorded."""
    record = run.documents["replay"]
    if not record or not record["rounds"]:
        return None
    return render("replay.html", name=f"replay-{run.number}", record=record, rule=RULES.get(record["rule"]), keys=KEYS)


def exactness(run: LoadedRun) -> Markup | None:
    """Return the verdict on exactness as it was printed, or None if exactness was not checked."""
    lines = run.get("report", "exactness", "lines")
    if not lines:
        return None
    parity = run.get("report", "extra", "parity", "line")
    more = [f"on more tokens: {parity}"] if parity else []
    return Markup("<pre>{}</pre>").format(escaped("\n".join([*lines, *more])))


def origin(run: LoadedRun) -> Markup | None:
    """Return machine, versions, date, commit, command and settings of the run, as far as they are known."""
    environment = run.get("report", "environment") or run.get("held_out", "environment") or {}
    machine: Rows = [["folder", str(run.path)], *_rows(environment)]
    if weights := run.get("report", "extra", "target_quantisation"):
        machine.append(["the target's weight quantisation", weights])
    parts = [(name, _rows(values)) for name, path in PARTS if (values := run.get(*path))]
    return render("origin.html", machine=machine, remarks=run.get("report", "extra", "said") or [], parts=parts)


def _rows(values: dict[str, Any]) -> Rows:
    return [[key, "–" if value is None else str(value)] for key, value in flat(values) if not isinstance(value, dict)]
