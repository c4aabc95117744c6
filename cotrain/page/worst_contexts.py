"""Where target and draft differ: how few positions hold most of it, and the worst of them."""

from collections.abc import Sequence
from typing import Any

from cotrain.page.charts import Chart, Series, drawn, number
from cotrain.page.loaded_run import Number, Run
from cotrain.page.markup import Html, joined, tag
from cotrain.page.section import Section, by_run


def differences(runs: Sequence[Run]) -> Section:
    """The curve of total variation over positions, and the contexts that lose most."""
    lacking = "no figures by position: cotrain train of this version keeps them"
    return Section("differences", "Where target and draft differ", by_run(runs, _differences), lacking)


def _differences(run: Run) -> Html | None:
    found = run.get("report", "extra", "divergence")
    if not found or not found["positions"]:
        return None
    values = run.all("report", "extra", "divergence", "lorenz")
    shares = [i / (len(values) - 1) for i in range(len(values))]
    alike = [Number(share, run.number) for share in shares]
    even = Series("if all positions differed alike", shares, alike, mode="lines")
    measured = Series("measured", shares, values)
    chart = Chart(f"lorenz-{run.number}", "Total variation by position", "share of positions, the worst first",
                  "share of all that is lost", [measured, even], range=(0, 1))  # fmt: skip
    fifth = values[len(values) // 5]
    said = ("The fifth of the positions that differ most holds ", number(fifth, ".0%"), " of what is lost. "
            "Total variation, which is 1 - acceptance, is ", number(run.at("report", "extra", "divergence", "mean")),
            " on average over ", number(run.at("report", "extra", "divergence", "positions"), ".0f"),
            " positions.")  # fmt: skip
    worst = [_context(run, place, one) for place, one in enumerate(found["worst"])]
    return joined(tag("p", *said), tag("div", drawn(chart), class_="grid"),
                  tag("h3", "The worst place of each of the worst texts"),
                  tag("ol", *worst, class_="contexts"))  # fmt: skip


def _context(run: Run, place: int, one: dict[str, Any]) -> Html:
    base = ("report", "extra", "divergence", "worst", place)
    head = tag("p", "total variation ", number(run.at(*base, "tv")), f", {one['domain']}")
    text = tag("pre", tag("span", one["before"], class_="before"), tag("mark", one["next"]), class_="context")
    sides = [tag("div", tag("b", f"{side}'s likeliest"), _tokens(run, base, side, one[side])) for side in
             ("target", "draft")]  # fmt: skip
    return tag("li", head, text, tag("div", *sides, class_="sides"))


def _tokens(run: Run, base: tuple[str | int, ...], side: str, tokens: list[dict[str, Any]]) -> Html:
    rows = [tag("li", tag("code", quoted(token["text"])), " p ", number(run.at(*base, side, i, "p")), ", q ",
                number(run.at(*base, side, i, "q"))) for i, token in enumerate(tokens)]  # fmt: skip
    return tag("ul", *rows)


def quoted(token: str) -> str:
    """A token with its ends and its line ends visible."""
    return "“" + token.replace("\n", "⏎").replace("\t", "⇥") + "”"
