"""What a report of `studies.trees` shows, line by line of what it must show."""

from collections.abc import Iterable
from typing import Any

NEAR = 0.02


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Predicted against measured tau, the plan against the best and Sequoia's tree, orders of the rules, and where
    trees pay."""
    return {
        "predictions": predictions(report["rows"]),
        "plans": plans(report["cells"]),
        "orders": of_orders(report["orders"]),
        "gains": gains(report["orders"]),
        "pays": pays(report["cells"]),
    }


def predictions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows whose predicted tau is within 1 % of the measured one, or the calls within 3 standard errors."""
    known = [row for row in rows if "z" in row]
    good = [abs(row["predicted_tau"] / row["tau"] - 1) <= 0.01 or abs(row["z"]) <= 3 for row in known]
    return {
        "rows": len(rows),
        "predicted": len(known),
        "within": sum(good),
        "root_mean_square_z": (sum(row["z"] ** 2 for row in known) / max(1, len(known))) ** 0.5,
        "largest_z": max((abs(row["z"]) for row in known), default=0.0),
    }


def plans(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """By table of costs: cells, how many plans are within 2 % of the best, at least as fast as Sequoia's
    tree, and within 2 % of the fastest chain or above; the worst shares."""
    found = {}
    for name in sorted({cell["costs"] for cell in cells}):
        own = [cell for cell in cells if cell["costs"] == name]
        found[name] = {
            "cells": len(own),
            "near_best": sum(cell["of_best"]["planned"] >= 1 - NEAR for cell in own),
            "as_sequoia": sum(cell["over_sequoia"] >= 1 - 1e-9 for cell in own),
            "as_chain": sum(_speed(cell, "planned") >= (1 - NEAR) * _speed(cell, "fastest chain") for cell in own),
            "worst": min(cell["of_best"]["planned"] for cell in own),
            "worst_over_sequoia": min(cell["over_sequoia"] for cell in own),
        }
    return found


def of_orders(orders: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether traversal gives at least the tokens a call of multi-round, and that those of the best chain: cells, those
    below, those below by more than 2 standard errors."""
    found: dict[str, Any] = {}
    for name in ("traversal_over_tree", "tree_over_chain"):
        ratios = [one[name] for one in orders if name in one]
        found[name] = {
            "cells": len(ratios),
            "below": sum(value < 1 for value, _ in ratios),
            "below_by_2_errors": sum(value + 2 * error < 1 for value, error in ratios),
        }
    same = [one["same_shape"] for one in orders if "same_shape" in one]
    found["traversal_over_tree_of_one_shape"] = {
        name: sum(one[name] for one in same) for name in ("shapes", "below", "below_by_2_errors")
    }
    found["least_of_one_shape"] = min((one["least"][0] for one in same), default=(1.0, 0.0))
    return found


def gains(orders: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Tokens a call of the largest tree over the best chain of up to 8 drafts and of up to as many as the tree has, by
    kind and temperature, with standard errors."""
    return {
        kind: {
            str(one["temperature"]): ", ".join(
                f"{value - 1:+.1%} +- {error:.1%}" for value, error in (one["gain"], one["gain_over_any"])
            )
            for one in orders
            if one["kind"] == kind
        }
        for kind in _names(orders)
    }


def pays(cells: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By kind, batch and table: a pass over 16 drafts and a draft step in plain passes, and by temperature the speed
    over plain decoding of the plan, the largest tree and the fastest chain, with the plan's nodes."""
    found: dict[str, dict[str, Any]] = {}
    for cell in cells:
        name = f"{cell['kind']}, {cell['rows']} rows, {cell['costs']}"
        here = found.setdefault(
            name, {"pass_over_16": round(cell["pass_over_16"], 2), "draft_step": round(cell["draft_step"], 3)}
        )
        speeds = {key: round(_speed(cell, key), 3) for key in ("planned", "largest tree", "fastest chain")}
        here[str(cell["temperature"])] = speeds | {"nodes": len(cell["choices"]["planned"]["parents"])}
    return found


def _speed(cell: dict[str, Any], name: str) -> float:
    return float(cell["choices"][name]["speed"])


def _names(found: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(one["kind"] for one in found))
