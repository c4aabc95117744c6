"""The measured check of a plan (`measure=true`): the recommended draft length, its neighbours and the adaptive policy,
timed in turn with plain decoding."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cotrain.config.groups import Bench
from cotrain.planning.forecast import Forecast
from cotrain.planning.plan import Plan
from inference import Engine
from inference.adaptive_policy import Adaptive
from inference.measure.adaptive import FEWEST, Wanted, until_known
from inference.measure.timing import Timing
from inference.report.table import aligned

QUEUE = 6  # prompts per row of a run whose rows are replaced, so that its end matters little
PLAIN, ADAPTIVE, TREE = "plain", "adaptive", "tree"


def timed_cells(plan: Plan, cells: Mapping[tuple[float, int], Forecast], policy: Adaptive) -> list[dict[str, Any]]:
    """Return one entry for each forecast, timed on final prompts for bench.minutes or until the interval is as narrow
    as bench.interval.

    plan: the draft with its target. cells: forecasts, keyed by (temperature, rows). policy: the adaptive policy.

    An entry has, for each arm (a draft length, the adaptive policy or the recommended tree), the measured speed-up over
    plain decoding (value, low, high), tau, and the forecast. Batches are decoded without waiting prompts, and the
    forecast of a length is for such batches; the forecast of a tree is for full batches. For several rows, the
    recommended length is also timed with waiting prompts (`full_batches`).
    """
    measured = []
    for (t, rows), cell in cells.items():
        print(f"plan: timing at temperature {t:g}, {rows} row{'s' * (rows > 1)}")
        here = plan.batched(rows)
        measured.append(_timed(replace(here, sampling=replace(plan.sampling, temperature=t)), cell, policy))
    return measured


def _timed(plan: Plan, cell: Forecast, policy: Adaptive) -> dict[str, Any]:
    size, tree = plan.bench, cell.served
    best = cell.k or cell.fastest or 1
    lengths = [k for k in (best - 1, best, best + 1) if 0 < k < len(cell.seconds)]
    adaptive = plan.engine(best)
    adaptive.policy = policy
    engines = {PLAIN: plan.plain()} | {f"k = {k}": plan.engine(k) for k in lengths} | {ADAPTIVE: adaptive}
    if tree:
        engines[TREE] = replace(plan, tree=tree.tree).engine(tree.tree.depth)
    arms = plan.arms(engines)
    batches, wanted = _wanted(size, -(-size.prompts // size.rows), 2 / 3 if size.rows > 1 else 1.0)
    timing, reached = until_known(
        arms, plan.final(0, batches * size.rows), size.rows, (f"k = {best}", PLAIN), wanted, size.seed
    )
    figures: dict[str, Any] = {}
    for name in engines:
        stats = timing.stats(name)
        figures[name] = _ratios(timing, name) | {"tau": stats.tau if stats else None}
    predicted = cell.alone if size.rows > 1 else cell.speedups
    for k in lengths:
        figures[f"k = {k}"] |= {
            "predicted": predicted[k] if predicted else None,
            "predicted_tau": cell.acceptance.tau(k),
        }
    if tree:
        figures[TREE] |= {"predicted": tree.speedup, "predicted_tau": tree.tau}
    return {
        "temperature": plan.sampling.temperature,
        "rows": size.rows,
        "k": cell.k,
        "arms": figures,
        "adaptive_over_best": timing.ratio(ADAPTIVE, f"k = {best}")._asdict(),
        "full_batches": _full(plan, cell, best, engines) if size.rows > 1 else None,
        "runs": reached.runs,
        "seconds": reached.seconds,
        "others": reached.others,
    }


def _full(plan: Plan, cell: Forecast, best: int, engines: Mapping[str, Engine]) -> dict[str, Any]:
    """Return the measured and the forecast speed-up of the draft length `best` in full batches: there are `QUEUE`
    prompts per row, so a waiting prompt takes the place of each row that ends. engines: by name."""
    size, name, queue = plan.bench, f"k = {best}", QUEUE * plan.bench.rows
    arms = plan.arms({one: engines[one] for one in (PLAIN, name)})
    runs, wanted = _wanted(size, -(-size.prompts // queue), 1 / 3)
    timing, _ = until_known(arms, plan.final(0, runs * queue), queue, (name, PLAIN), wanted, size.seed)
    return {"k": best, "predicted": cell.speedups[best]} | _ratios(timing, name)


def _ratios(timing: Timing, name: str) -> dict[str, Any]:
    """Return the speed of the arm `name` over plain decoding's, each as value, low and high: `speedup` includes the
    time to read prompts, `decode` does not. The forecast is for `decode`."""
    return {"speedup": timing.ratio(name, PLAIN)._asdict(), "decode": timing.ratio(name, PLAIN, decode=True)._asdict()}


def _wanted(size: Bench, batches: int, share: float) -> tuple[int, Wanted]:
    """Return the number of different batches to time, and when to stop: at an interval of bench.interval, or after the
    share `share` of bench.minutes. With bench.minutes=0 timing stops after `batches` batches. There are at least FEWEST
    batches, since fewer give no interval."""
    batches = max(batches, FEWEST)
    until = time.perf_counter() + 60 * share * size.minutes
    return batches, Wanted(batches, size.interval, until) if size.minutes else Wanted(batches)


def arms_of(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arms of a timed cell, keyed by name, and the arm of full batches if it has one. cell: an entry of
    `timed_cells`."""
    full = cell.get("full_batches")
    return {**cell["arms"], **({f"k = {full['k']}, others wait": full} if full else {})}


def measured_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the measured and forecast speed-ups as a table for the user. cells: the entries of `timed_cells`."""
    rows = [["temperature", "rows", "drafts", "tau", "speed-up", "decoding alone", "95 % interval", "forecast"]]
    for cell in cells:
        for name, arm in arms_of(cell).items():
            if name == PLAIN:
                continue
            tau, decode, forecast = arm.get("tau"), arm["decode"], arm.get("predicted")
            rows.append(
                [
                    f"{cell['temperature']:g}",
                    str(cell["rows"]),
                    name,
                    "" if tau is None else f"{tau:.3f}",
                    f"{arm['speedup']['value']:.2f}x",
                    f"{decode['value']:.2f}x",
                    f"[{decode['low']:.2f}, {decode['high']:.2f}]",
                    "" if forecast is None else f"{forecast:.2f}x",
                ]
            )
    return aligned(rows, left=0)
