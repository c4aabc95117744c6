"""The page of a plan: the recommendation, speed-up by draft length, and acceptance by depth."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from cotrain.page.html_page import document
from cotrain.page.loaded_run import Number
from cotrain.page.rendering import Chart, Section, Series, drawn, html_table, interval, joined, number
from cotrain.planning.forecast import SIGMAS
from cotrain.planning.timed import arms_of

GENERATOR, PAGE = "cotrain plan", "plan.html"


def plan_page(plan: Mapping[str, Any]) -> str:
    """Return the HTML page about a plan. plan: the content of plan.json."""
    cells, best = plan["cells"], plan["recommended"]
    names = _names([cell["draft"] for cell in cells])
    sections = [
        Section("recommended", "What is recommended", _recommended(cells, names)),
        Section("lengths", "Speed-up by draft length", drawn(_by_length(cells, names))),
        Section("depths", "Acceptance by depth", drawn(_by_depth(plan["acceptance"], names))),
        Section(
            "domains", "Acceptance by domain", _by_domain(plan["acceptance"], names), "the prompts have one domain"
        ),
        Section(
            "measured",
            "Measured beside forecast",
            _measured(plan.get("measured") or []),
            "nothing was timed: cotrain plan measure=true",
        ),
    ]
    return document([(names[best], False, _headline(cells, best))], sections, GENERATOR)


def _names(paths: Sequence[str]) -> dict[str, str]:
    """Return a short name for each draft, by path: the last part of the path that is not `draft`. If two names would be
    equal, the whole paths are used."""
    parts = {path: [part for part in Path(path).parts if part != "draft"] or [path] for path in paths}
    short = {path: some[-1] for path, some in parts.items()}
    return short if len(set(short.values())) == len(short) else {path: path for path in parts}


def _headline(cells: Sequence[Mapping[str, Any]], best: str) -> Markup:
    """Return the recommendation in one line: whether to serve with the draft `best` (its path), and how, at its first
    temperature and number of rows. cells: entries of plan.json."""
    cell = next(one for one in cells if one["draft"] == best)
    where = f"at temperature {cell['temperature']:g}, {cell['rows']} row{'s' * (cell['rows'] > 1)}"
    if cell["tree"] and cell["tree"]["recommended"]:
        gain = number(Number(cell["tree"]["speedup"]), ".2f")
        return joined(Markup("<strong>{}x</strong>").format(gain), f" expected {where}, with the tree of plan.json")
    if not cell["k"]:
        return joined(f"plain decoding is recommended {where}")
    return joined(
        Markup("<strong>{}</strong>").format(_speedup(cell, cell["k"])), f" expected {where}, with k = {cell['k']}"
    )


def _speedup(cell: Mapping[str, Any], k: int) -> Markup:
    value, error = cell["speedups"][k], SIGMAS * cell["errors"][k]
    return interval([Number(value), Number(value - error), Number(value + error)])


def _recommended(cells: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Markup:
    head = ["", "k", "tau", "speed-up", "batch alone", "tree", "", "break-even", "perfect draft"]
    rows: list[list[object]] = []
    for cell in cells:
        k, tree, alone = cell["k"], cell["tree"], cell["speedups_alone"]
        name = f"{names[cell['draft']]}, T {cell['temperature']:g}, {cell['rows']} rows"
        numbers = [alone[k] if alone else None, tree["speedup"] if tree else None, cell["break_even"], cell["perfect"]]
        shown: list[object] = [number(Number(value), ".2f") for value in numbers]
        shown.insert(2, "recommended" if tree and tree["recommended"] else "")
        rows.append([name, k, number(Number(cell["tau"][k])), _speedup(cell, k) if k else "-", *shown])
    note = (
        "Speed-ups over plain decoding on the machine whose rounds were timed, with the interval that the texts leave. "
        "Batch alone: no prompts wait for the slots of rows that have ended. Break-even: the acceptance above which "
        "some length pays."
    )
    return html_table(head, rows, note)


def _by_length(cells: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[Chart]:
    """Return a chart of the speed-up by draft length for each temperature, with one series for each draft and number of
    rows. cells: entries of plan.json. names: the drafts' short names, by path."""
    charts = []
    for t in dict.fromkeys(cell["temperature"] for cell in cells):
        series = []
        for cell in (one for one in cells if one["temperature"] == t):
            both = list(zip(cell["speedups"], cell["errors"], strict=True))
            y, low, high = (
                [Number(value + sigmas * error) for value, error in both] for sigmas in (0, -SIGMAS, SIGMAS)
            )
            name = f"{names[cell['draft']]}, {cell['rows']} rows"
            series.append(Series(name, range(len(y)), y, low, high))
        charts.append(
            Chart(f"lengths-{t:g}", f"Temperature {t:g}", "draft length k", "speed-up", series, at=1.0, spec=".2f")
        )
    return charts


def _by_depth(acceptance: Mapping[str, Any], names: Mapping[str, str]) -> list[Chart]:
    series = [
        Series(
            f"{names[draft]}, T {t}",
            range(1, len(one["conditional"]) + 1),
            [Number(value) for value in one["conditional"]],
        )
        for draft, profiles in acceptance.items()
        for t, one in profiles.items()
    ]
    note = "Of the rounds whose earlier drafts were all accepted."
    return [Chart("depths", "Accepted drafts", "depth", "share", series, note, range=(0, 1))]


def _by_domain(acceptance: Mapping[str, Any], names: Mapping[str, str]) -> Markup | None:
    rows: list[list[object]] = []
    for draft, profiles in acceptance.items():
        for t, profile in profiles.items():
            for domain, one in profile.get("domains", {}).items():
                depths = ", ".join("-" if value is None else f"{value:.2f}" for value in one["conditional"])
                rows.append([f"{names[draft]}, T {t}, {domain}", one["texts"], number(Number(one["alpha"])), depths])
    return html_table(["", "texts", "mean acceptance", "by depth"], rows) if rows else None


def _measured(cells: Sequence[Mapping[str, Any]]) -> Markup | None:
    rows: list[list[object]] = []
    for cell in cells:
        for name, arm in arms_of(cell).items():
            shown = [
                interval([Number(arm[part][end]) for end in ("value", "low", "high")]) for part in ("speedup", "decode")
            ]
            rows.append(
                [
                    f"T {cell['temperature']:g}, {cell['rows']} rows: {name}",
                    *shown,
                    number(Number(arm.get("predicted")), ".2f"),
                    number(Number(arm.get("tau"))),
                ]
            )
    return html_table(["", "speed-up", "decoding alone", "forecast", "tau"], rows) if rows else None
