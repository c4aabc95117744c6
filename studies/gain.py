"""The gain distribution: what total variation gains over forward KL, against the acceptance that forward KL reaches.

    python -m studies.gain outputs/losses outputs/results/blind.json \
        outputs/results/gain.json outputs/results/gain.svg

Reads pairs of runs of cotrain train (labels kl... and kl_then_tv) below gain/*, narrow and layers of the first folder,
and the report of studies.blind; writes a table and, with matplotlib installed, the figure.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cotrain.evaluation.comparison import compare, read_runs
from inference.measure.environment import environment

TEMPERATURE, K = "1", 8
NAMES = {"narrow": "width 64", "layers": "two layers", "l1": "one layer", "l4": "four layers"}
BASELINES = {"narrow": "kl_2e-3", "layers": "kl_1e-3"}


def drafts(folder: Path) -> list[dict[str, Any]]:
    """One row a draft: acceptance with kl and with kl then tv, and the gain in tau, least accepted first."""
    places = [*sorted((folder / "gain").iterdir()), folder / "narrow", folder / "layers"]
    rows = []
    for place in places:
        baseline = BASELINES.get(place.name, "kl")
        gains = {g.label: g for g in compare(read_runs(place), baseline) if (g.temperature, g.k) == (TEMPERATURE, K)}
        ours, theirs = gains["kl_then_tv"], gains[baseline]
        name = NAMES.get(place.name, f"width {place.name[1:]}")
        found = {key: asdict(ours)[key] for key in ("seeds", "alpha", "tau", "gain", "low", "high", "entropy")}
        rows.append(
            {"draft": name, "alpha_kl": theirs.alpha, "tau_kl": theirs.tau, "entropy_kl": theirs.entropy} | found
        )
    return sorted(rows, key=lambda row: float(row["alpha_kl"]))


def table(drafts: list[dict[str, Any]], heads: list[dict[str, Any]]) -> str:
    lines = [f"{'draft':<12} alpha kl  alpha tv  tau(8) kl  gain in tau(8)           gain in alpha"]
    for row in drafts:
        more = row["alpha"] / row["alpha_kl"] - 1
        lines.append(
            f"{row['draft']:<12} {row['alpha_kl']:8.3f}  {row['alpha']:8.3f}  {row['tau_kl']:9.3f}  "
            f"{row['gain']:+.1%} [{row['low']:+.1%}, {row['high']:+.1%}]   {more:+.1%}"
        )
    for row in heads:
        lines.append(
            f"{row['ahead']} ahead      {row['alpha_kl']:8.3f}  {row['alpha']:8.3f}  {'':9}  {'':24}"
            f" {row['gain']:+.1%} [{row['low']:+.1%}, {row['high']:+.1%}]"
        )
    return "\n".join(lines)


def draw(drafts: list[dict[str, Any]], heads: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "cotrain"  # the same figure, the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for rows, label, mark in ((drafts, "independent drafts: tau(8)", "o"), (heads, "blind heads: acceptance", "s")):
        spread = [
            [100 * (row["gain"] - row["low"]) for row in rows],
            [100 * (row["high"] - row["gain"]) for row in rows],
        ]
        axes.errorbar(
            [row["alpha_kl"] for row in rows],
            [100 * row["gain"] for row in rows],
            spread,
            fmt=mark,
            capsize=2,
            label=label,
        )
        for row in rows:
            name = row.get("draft") or f"{row['ahead']} ahead"
            axes.annotate(name, (row["alpha_kl"], 100 * row["gain"]), (4, 4), textcoords="offset points", fontsize=7)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set(xlabel="acceptance that forward KL reaches, T = 1", ylabel="gain of KL then total variation, %")
    axes.margins(x=0.1)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main(folder: str, blind: str, report: str, figure: str) -> None:
    rows, heads = drafts(Path(folder)), json.loads(Path(blind).read_text(encoding="utf-8"))["heads"]
    print(table(rows, heads))
    made = {"environment": environment(), "temperature": TEMPERATURE, "k": K, "drafts": rows, "heads": heads}
    Path(report).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    draw(rows, heads, Path(figure))


if __name__ == "__main__":
    main(*sys.argv[1:])
