"""The measured check of a plan (`measure=true`): the recommended draft length, its neighbours and the adaptive policy,
timed in turn with plain decoding."""

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cotrain.bench.plan import Plan
from cotrain.plan.forecast import Forecast
from inference.adaptive_policy import Adaptive
from inference.measure.adaptive import Wanted, until_known
from inference.measure.timing import engine_arm
from inference.report.table import aligned

PLAIN, ADAPTIVE = "plain", "adaptive"


def timed_cells(
    plan: Plan,
    forecasts: Mapping[tuple[float, int], Forecast],
    alone: Mapping[tuple[float, int], Sequence[float]],
    policy: Adaptive,
) -> list[dict[str, Any]]:
    """Time each cell (temperature, rows) on final prompts, for bench.minutes or until the interval is bench.interval
    wide. Return an entry per cell: arms with the measured speed-up over plain decoding (value, low, high) and tau, and
    the forecast of each draft length. Batches are decoded alone, so for more than one row the forecast is `alone`."""
    cells = []
    for (t, rows), cell in forecasts.items():
        print(f"plan: timing at temperature {t:g}, {rows} row{'s' * (rows > 1)}")
        bench = copy.copy(plan.bench)
        bench.rows = rows
        cells.append(_timed(replace(plan, bench=bench, sampling=replace(plan.sampling, temperature=t)), cell,
                            alone[t, rows] if rows > 1 else cell.speedups, policy))  # fmt: skip
    return cells


def _timed(plan: Plan, cell: Forecast, predicted: Sequence[float], policy: Adaptive) -> dict[str, Any]:
    size, best = plan.bench, cell.k or cell.fastest or 1
    lengths = [k for k in (best - 1, best, best + 1) if 0 < k < len(cell.seconds)]
    adaptive = plan.engine(best)
    adaptive.policy = policy
    engines = {PLAIN: plan.plain()} | {f"k = {k}": plan.engine(k) for k in lengths} | {ADAPTIVE: adaptive}
    arms = [engine_arm(name, engine, plan.sampling, size.new_tokens) for name, engine in engines.items()]
    batches, until = -(-size.prompts // size.rows), time.perf_counter() + 60 * size.minutes
    wanted = Wanted(batches, size.interval, until) if size.minutes else Wanted(batches)
    timing, reached = until_known(
        arms, plan.final(0, batches * size.rows), size.rows, (f"k = {best}", PLAIN), wanted, size.seed
    )
    figures: dict[str, Any] = {}
    for name in engines:
        stats = timing.stats(name)
        figures[name] = {"speedup": timing.ratio(name, PLAIN)._asdict(), "tau": stats.tau if stats else None}
    for k in lengths:
        figures[f"k = {k}"] |= {"predicted": predicted[k] if predicted else None, "predicted_tau": cell.calls.tau(k)}
    gain = timing.ratio(ADAPTIVE, f"k = {best}")._asdict()
    return {"temperature": plan.sampling.temperature, "rows": size.rows, "k": cell.k, "arms": figures,
            "adaptive_over_best": gain, "runs": reached.runs, "seconds": reached.seconds,
            "others": reached.others}  # fmt: skip


def measured_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the measured cells as a table."""
    rows = [["temperature", "rows", "drafts", "tau", "speed-up", "95 % interval", "forecast"]]
    for cell in cells:
        for name, arm in cell["arms"].items():
            if name != PLAIN:
                speedup, forecast = arm["speedup"], arm.get("predicted")
                rows.append([f"{cell['temperature']:g}", str(cell["rows"]), name, f"{arm['tau']:.3f}",
                             f"{speedup['value']:.2f}x", f"[{speedup['low']:.2f}, {speedup['high']:.2f}]",
                             "" if forecast is None else f"{forecast:.2f}x"])  # fmt: skip
    return aligned(rows, left=0)
