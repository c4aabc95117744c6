"""Where drafts are accepted: by depth, domain, temperature and length of the context."""

import re
from collections.abc import Sequence

from cotrain.page.charts import Chart, Series, drawn
from cotrain.page.loaded_run import Number, Run
from cotrain.page.markup import Html, tag
from cotrain.page.section import Section, by_run

KEY = re.compile(r"(?P<name>alpha|alpha_greedy_draft)_T(?P<t>[^/]+)/(?P<domain>.+)")


def acceptance(runs: Sequence[Run]) -> Section:
    """A chart each that a run has figures for."""
    lacking = "no held-out figures and no counts by depth: cotrain train and cotrain bench make them"
    return Section("acceptance", "Where drafts are accepted", by_run(runs, _charts), lacking)


def _charts(run: Run) -> Html | None:
    found = [chart for part in (by_depth, by_domain, by_temperature, by_context) if (chart := part(run))]
    return tag("div", *map(drawn, found), class_="grid") if found else None


def by_depth(run: Run) -> Chart | None:
    """Prefix and conditional acceptance, as measured while it was timed and as predicted on the held-out texts."""
    series = []
    tag_ = f"T{run.temperature:g}/all"
    for name, words in (("prefix", "accepted with all before"), ("conditional", "accepted where all before were")):
        measured = run.all("report", "acceptance", name, "measured")
        predicted = [] if run.greedy else depths(run, f"{name}_{tag_}")  # of drafts drawn from q
        for side, found in (("measured", measured), ("predicted", predicted)):
            if found:
                series.append(Series(f"{words}, {side}", range(1, len(found) + 1), found))
    note = "Predicted: on the held-out texts, by the token rule. Measured: with the rule that was timed."
    return _chart(run, "depth", "Acceptance by depth", "depth of the draft", series, note)


def depths(run: Run, stem: str) -> list[Number]:
    """Held-out figures `stem`/1, `stem`/2, ..."""
    held = run.get("report", "extra", "held_out") or {}
    places = sorted(int(key.rpartition("/")[2]) for key in held if re.fullmatch(re.escape(stem) + r"/\d+", key))
    return [run.at("report", "extra", "held_out", f"{stem}/{depth}") for depth in places]


def by_domain(run: Run) -> Chart | None:
    """Bars by temperature, one a domain, where there are several domains."""
    keys = map(KEY.fullmatch, run.get("report", "extra", "held_out") or {})
    found = [(match["t"], match["domain"], match[0]) for match in keys if match and match["name"] == run.alpha]
    domains = [name for name in dict.fromkeys(domain for _, domain, _ in found) if name != "worst"]
    domains = [name for name in domains if name != "all"] if len(domains) > 2 else ["all"]
    series = []
    for domain in domains:
        mine = [(t, key) for t, one, key in found if one == domain]
        values = [run.at("report", "extra", "held_out", key) for _, key in mine]
        series.append(Series(domain, [f"T {t}" for t, _ in mine], values, mode="bar"))
    series = [one for one in series if one.y]
    measure = "p of the draft's likeliest token" if run.greedy else "alpha = Σ min(p, q)"
    title = "Acceptance by domain and temperature" if len(domains) > 1 else "Acceptance by temperature"
    return _chart(run, "domain", title, "temperature of the target", series, f"{measure}, on held-out texts")


def by_temperature(run: Run) -> Chart | None:
    """Over the draft's own temperature, a line a temperature of the target."""
    series = []
    for t, found in (run.get("report", "extra", "profiles") or {}).items():
        path = ("report", "extra", "profiles", t, "by_draft_temperature")
        series.append(Series(f"target at {t}", [float(x) for x in found["by_draft_temperature"]], run.all(*path)))
    note = "Verification is exact whatever the draft's temperature is; only acceptance depends on it."
    return _chart(run, "temperature", "Acceptance by the draft's temperature", "temperature of the draft", series, note)


def by_context(run: Run) -> Chart | None:
    """By tokens of context."""
    series = []
    for t, found in (run.get("report", "extra", "profiles") or {}).items():
        values = run.all("report", "extra", "profiles", t, "by_context")
        series.append(Series(f"temperature {t}", list(found["by_context"]), values))
    return _chart(run, "context", "Acceptance by length of the context", "tokens of context", series)


def _chart(run: Run, name: str, title: str, x: str, series: list[Series], note: str = "") -> Chart | None:
    return Chart(f"{name}-{run.number}", title, x, "acceptance", series, note, range=(0, 1)) if series else None
