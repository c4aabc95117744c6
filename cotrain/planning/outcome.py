"""The output of `cotrain plan`: plan.json, the files for other programs, and the printed table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from cotrain.acceptance import iid_tau
from cotrain.planning.drafted import Drafted
from cotrain.planning.forecast import SIGMAS, Forecast, schedule, stops_paying
from cotrain.planning.policy_file import content as policy_content
from inference.report.table import aligned

PROFILE, SCHEDULE, POLICY = "speculation_profile.json", "schedule.json", "policy.json"
METHODS = {"independent": "draft_model", "eagle": "eagle3", "block": "dflash"}  # names of the kinds in profiles
ANALYTIC = ("independent", "eagle")  # kinds whose k drafts begin with their k - 1 drafts
TOLERANCE = 0.02  # of a profile's mean


def entries(drafts: Sequence[Drafted], best: Drafted) -> dict[str, Any]:
    """Return the entries of plan.json about the drafts. best: the recommended draft."""
    return {
        "recommended": best.path,
        "cells": [_cell(one, t, rows, cell) for one in drafts for (t, rows), cell in one.cells.items()],
        "costs": {one.path: {str(rows): asdict(costs) for rows, costs in one.costs.items()} for one in drafts},
        "acceptance": {one.path: {f"{t:g}": rates.by_depth for t, rates in one.acceptance.items()} for one in drafts},
    }


def _cell(one: Drafted, t: float, rows: int, cell: Forecast) -> dict[str, Any]:
    """Return the entry of plan.json for one draft, temperature `t` and number of rows. `iid` in it is tau if acceptance
    were alpha at all depths, next to the exact expectation `tau`."""
    rates, lengths = cell.acceptance, range(len(cell.seconds))
    tree = cell.tree and asdict(cell.tree) | {"recommended": cell.tree.recommended}
    return {
        "draft": one.path,
        "kind": one.plan.kind,
        "rule": one.plan.verify,
        "temperature": t,
        "rows": rows,
        "k": cell.k,
        "fastest": cell.fastest,
        "undecided": cell.undecided,
        "gain": cell.gain,
        "speedup": cell.speedup,
        "speedups": list(cell.speedups),
        "errors": list(cell.errors),
        "tau": [rates.tau(k) for k in lengths],
        "tau_errors": [rates.error(k) for k in lengths],
        "iid": [iid_tau(rates.alpha, k) for k in lengths],
        "alpha": rates.alpha,
        "speedups_alone": list(cell.alone),
        "seconds_per_round": list(cell.seconds),
        "perfect": cell.perfect,
        "break_even": cell.break_even,
        "tree": tree,
    }


def files(best: Drafted, batches: Sequence[int], plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of the files for other programs, keyed by file name: the schedule of draft lengths by batch
    size at the first temperature, the acceptance of the recommended draft, and its adaptive policy.

    best: the recommended draft. batches: the batch sizes of the plan. plan: the content of plan.json.
    """
    t = next(iter(best.acceptance))
    lengths = {rows: best.cells[t, rows].k for rows in batches}
    return {
        SCHEDULE: {"draft": best.path, "temperature": t, **schedules(lengths)},
        PROFILE: speculation_profile(best, t, plan),
        POLICY: policy_content(best.policy) | {"draft": best.path, "environment": plan["environment"]},
    }


def speculation_profile(best: Drafted, t: float, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of speculation_profile.json in the format of NVIDIA's Model-Optimizer, version 1.0. best: the
    draft. t: the temperature. plan: the content of plan.json.

    Rates are by draft position. The histogram is over the tokens that a round emits, with the one after the accepted
    drafts; its counts are expected ones. It counts tokens past a text's end; `accept_length_by_k`, which is tau, does
    not.
    """
    rates = best.acceptance[t]
    histogram = rates.by_depth["histogram"]
    k = len(histogram) - 1
    marginal = [sum(histogram[n:]) for n in range(1, k + 1)]  # over all rounds, also those that end a text early
    conditional = [m / before if before else 0.0 for before, m in pairwise([1.0, *marginal])]
    rounds, implied = float(rates.calls[k].sum()), 1 + sum(marginal)
    mean = sum((n + 1) * share for n, share in enumerate(histogram))
    analytic = best.plan.kind in ANALYTIC
    violations = [
        {"position": i, "value": marginal[i], "previous": marginal[i - 1]}
        for i in range(1, k)
        if marginal[i] > marginal[i - 1] + 1e-9
    ]
    return {
        "schema_version": "1.0",
        "measured": True,
        "method": METHODS.get(best.plan.kind, best.plan.kind),
        "draft_checkpoint": {"id": _id(best.path)},
        "target_model": {"id": _id(best.plan.names[0])},
        "num_speculative_tokens": k,
        "block_size": None,
        "max_supported_k": k,
        "verification_method": "block" if best.plan.verify == "block" else "longest_prefix",
        "conditional_accept_rates": conditional,
        "marginal_accept_rates": marginal,
        "mean_accept_length": mean,
        "mean_accept_length_per_request": float((rates.lengths / rates.calls[k]).mean()),
        "accept_length_model": "chain_analytic" if analytic else "measured_per_k",
        "accept_length_by_k": {str(n): rates.tau(n) for n in range(1, k + 1)},
        "acceptance_length_histogram": {str(n + 1): rounds * share for n, share in enumerate(histogram)},
        "per_category": None,
        "measurement_conditions": {
            "temperature": t,
            "rule": best.plan.verify,
            "settings": plan["settings"],
            "environment": plan["environment"],
            "figures": "expected on texts of the target, from both models' distributions; not counted in rounds",
        },
        "validation": {
            "mean_consistency": {
                "implied_mean_accept_length": implied,
                "reported_mean_accept_length": mean,
                "abs_delta": abs(implied - mean),
                "tolerance": TOLERANCE,
                "passed": abs(implied - mean) <= TOLERANCE,
            },
            "marginal_monotonicity": {"passed": not violations, "violations": violations},
        },
    }


def _id(path: str) -> str:
    """Return the last two parts of a path. A profile may be published, and the rest of the path is private to this
    machine."""
    return "/".join(Path(path).parts[-2:])


def schedules(lengths: Mapping[int, int]) -> dict[str, Any]:
    """Return the draft lengths by number of rows, and the settings for other engines. lengths: recommended length by
    number of rows.

    Each engine's settings are for its speculative configuration, in addition to the draft's own settings. They are None
    if no draft is recommended at any number of rows. TensorRT-LLM (1.3 and later) names the largest batch of each
    length, and drafts nothing above the last.
    """
    ranges = schedule(lengths, max(lengths))
    longest = max(k for _, _, k in ranges)
    vllm = {"num_speculative_tokens": longest, "num_speculative_tokens_per_batch_size": ranges}
    tensorrt_llm = {"max_draft_len": longest, "draft_len_schedule": {str(last): k for _, last, k in ranges}}
    return {"ranges": ranges, "vllm": vllm if longest else None, "tensorrt_llm": tensorrt_llm if longest else None}


def forecast_table(drafts: Sequence[Drafted]) -> str:
    """Return the forecasts of all drafts as a table, followed by remarks for the user."""
    rows = [
        [
            "draft",
            "temperature",
            "rows",
            "k",
            "tau",
            "speed-up",
            "95 % interval",
            "batch alone",
            "break-even",
            "perfect draft",
        ]
    ]
    lines = []
    for one in drafts:
        for (t, count), cell in one.cells.items():
            rows.append([one.path, f"{t:g}", str(count), *_columns(cell)])
            lines += [f"{one.path}, temperature {t:g}, {count} rows: {line}" for line in forecast_remarks(cell)]
        for t, rates in one.acceptance.items():
            by_domain = rates.by_depth.get("domains", {}).items()
            if by_domain:
                domains = ", ".join(f"{name} {each['alpha']:.2f}" for name, each in by_domain)
                lines.append(f"{one.path}, temperature {t:g}: acceptance by domain: {domains}")
            stop = stops_paying({count: cell for (at, count), cell in one.cells.items() if at == t})
            if stop:
                lines.append(f"{one.path}, temperature {t:g}: no draft length pays from {stop} rows on")
    lines.append(
        "speed-ups are for the machine whose rounds were timed, and their intervals say what other texts could give. A "
        "prompt that waits takes the place of each row that ends; if none waits, see the column `batch alone`"
    )
    return "\n".join([aligned(rows, left=1), *lines])


def _columns(cell: Forecast) -> list[str]:
    speedup, error = cell.speedups[cell.k], SIGMAS * cell.errors[cell.k]
    return [
        str(cell.k),
        f"{cell.acceptance.tau(cell.k):.3f}",
        f"{speedup:.2f}x",
        f"[{speedup - error:.2f}, {speedup + error:.2f}]" if cell.k else "",
        f"{cell.alone[cell.k]:.2f}x" if cell.alone else "-",
        "-" if cell.break_even is None else f"{cell.break_even:.2f}",
        f"{cell.perfect:.2f}x",
    ]


def forecast_remarks(cell: Forecast) -> list[str]:
    """Return lines for the user that are not in the table: whether more texts could show that another length is faster,
    and whether a tree is faster."""
    tree, lines = cell.tree, []
    if cell.undecided:
        lines.append(
            f"k = {cell.fastest} may be up to {100 * cell.gain:.0f} % faster than {cell.k}: raise texts= to know"
        )
    if tree:
        gain = f"{100 * tree.gain:+.0f} % over {f'k = {cell.k}' if cell.k else 'plain decoding'}"
        verdict = "recommended" if tree.recommended else "not recommended, since the texts do not show a gain"
        lines.append(
            f"{tree.words()}: {tree.speedup:.2f}x, {gain} (standard error {100 * tree.error:.1f} %), {verdict}"
        )
    return lines
