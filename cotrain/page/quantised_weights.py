"""Weight quantisation x temperature as heat maps."""

from collections.abc import Sequence

from cotrain.page.charts import Chart, Series, drawn
from cotrain.page.loaded_run import Run
from cotrain.page.markup import Html, tag
from cotrain.page.section import Section, by_run

SHOWN = (("speedup", ("speedup", "value"), "Speed-up", ".2f"), ("alpha", ("alpha",), "Acceptance", ".3f"))


def quantisation(runs: Sequence[Run]) -> Section:
    """Speed-up and acceptance of each pair of quantisations at each temperature."""
    lacking = "one quantisation was measured: cotrain bench matrix.targets=[none,int8] matrix.temperatures=[0,1]"
    return Section("quantisation", "Quantisation and temperature", by_run(runs, _maps), lacking)


def _maps(run: Run) -> Html | None:
    cells = run.get("report", "extra", "bits")
    if not cells:
        return None
    at = {(cell["target"], cell["draft"], cell["temperature"]): place for place, cell in enumerate(cells)}
    pairs = list(dict.fromkeys((target, draft) for target, draft, _ in at))
    temperatures = sorted({t for _, _, t in at})
    charts = []
    for name, path, title, spec in SHOWN:
        series = []
        for target, draft in pairs:
            places = [at.get((target, draft, t), len(cells)) for t in temperatures]
            values = [run.at("report", "extra", "bits", place, *path) for place in places]
            series.append(Series(f"target {target}, draft {draft}", [f"T {t:g}" for t in temperatures], values))
        note = "Each over plain decoding of the same quantised target, on few prompts." if name == "speedup" else ""
        charts.append(Chart(f"{name}-{run.number}", title, "", "", series, note, heat=True, spec=spec))
    return tag("div", *map(drawn, charts), class_="grid")
