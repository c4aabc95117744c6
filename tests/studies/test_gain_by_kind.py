"""Gains by kind are of the best rate on either side, and those of a depth of that depth."""

from pathlib import Path
from typing import Any

import pytest

from studies import gain_by_kind
from tests.cotrain.evaluation.test_comparison import write


def run(label: str, seed: int, calls: float, alphas: list[float]) -> dict[str, Any]:
    one = {
        "alpha": alphas[0],
        "kl": 1.0,
        "entropy": 2.0,
        "calibration": 0.1,
        "lengths": [40, 20],
        "calls": {"4": [40.0, 20.0], "8": [calls, calls / 2]},
    }
    texts = {"1": one | ({"alphas": alphas} if len(alphas) > 1 else {}), "0": one | {"alpha": 0.9}}
    return {"label": label, "seed": seed, "texts": texts}


def test_the_best_rates_are_compared(tmp_path: Path) -> None:
    # those of more acceptance at the first depth are not those of most tau
    slow, fast = run("kl_1e-3", 0, 36.0, [0.5, 0.1]), [run("kl_2e-3", s, 30.0, [0.4, 0.2 + 0.1 * s]) for s in (0, 1)]
    worse = run("lk_2e-3", 0, 33.0, [0.7, 0.1])
    found = [run("kl_then_tv_2e-3", s, 25.0 - 5 * s, [0.6, 0.4]) for s in (0, 1)]
    row = gain_by_kind.row(write(tmp_path / "medusa", [slow, *fast, worse, *found]))
    assert (row["kind"], row["baseline"], row["label"], row["seeds"]) == ("medusa", "kl_2e-3", "kl_then_tv_2e-3", 2)
    assert (row["tau_kl"], row["tau"]) == pytest.approx((40 / 30, 80 / 45))
    assert row["gain"] == pytest.approx(60 / 45 - 1) and row["low"] <= row["gain"] <= row["high"]
    assert [d["depth"] for d in row["depths"]] == [1, 2]
    assert [d["alpha_kl"] for d in row["depths"]] == pytest.approx([0.4, 0.25])
    assert [d["gain"] for d in row["depths"]] == pytest.approx([0.5, 0.6])
    with pytest.raises(ValueError, match="labels kl_1e-3: wanted are"):
        gain_by_kind.row(write(tmp_path / "alone", [slow]))
