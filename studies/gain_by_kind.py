"""The gain distribution by kind and depth: what acceptance losses gain over forward KL, for every kind of draft.

    python -m studies.gain_by_kind outputs/gain_by_kind outputs/results/gain_by_kind.json \
        outputs/results/gain_by_kind.svg

Reads runs of cotrain train below one folder a kind: labels kl_<rate> and <loss>_<rate>, several seeds each. Of a kind
the rate of most tau counts, for forward KL and for all other losses together; gains are paired by seed and text, with
95 % intervals. Writes a table and, with matplotlib installed, the figure: the gain of acceptance at each depth against
the acceptance that forward KL reaches there, beside that of independent drafts (outputs/results/gain.json). Kinds
that the report has already and the folder has not stay in it, each with the machine and day that it was measured on.
"""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from cotrain.evaluation.comparison import Gain, RunFigures, compare, read_runs
from inference.measure.environment import environment

TEMPERATURE, K = "1", 8
KL = re.compile(r"kl_[\d.e+-]+")
KEPT = ("label", "seeds", "alpha", "tau", "gain", "low", "high", "entropy")
INDEPENDENT = Path("outputs/results/gain.json")


def best(gains: list[Gain], of_kl: bool) -> Gain:
    """Of forward KL, or of the other losses: the label of most tau."""
    return max((gain for gain in gains if bool(KL.fullmatch(gain.label)) == of_kl), key=lambda gain: gain.tau)


def at(gains: list[Gain]) -> list[Gain]:
    return [gain for gain in gains if (gain.temperature, gain.k) == (TEMPERATURE, K)]


def by_depth(runs: list[RunFigures]) -> list[float]:
    """Acceptance by depth, the mean over runs; of a draft whose distributions do not depend on it, its one
    acceptance."""
    texts = [run["texts"][TEMPERATURE] for run in runs]
    return [float(one) for one in np.mean([one.get("alphas") or [one["alpha"]] for one in texts], axis=0)]


def row(folder: Path) -> dict[str, Any]:
    """A kind: its best loss beside forward KL at its best rate. Raises ValueError where one of the two is missing."""
    runs = read_runs(folder)
    kl_labels = sorted(filter(KL.fullmatch, runs))
    if not kl_labels or len(kl_labels) == len(runs):
        raise ValueError(f"{folder}: labels {', '.join(sorted(runs))}: wanted are kl_<rate> and those of other losses")
    baseline = best(at(compare(runs, kl_labels[0])), True).label
    gains = at(compare(runs, baseline))
    kl, other = best(gains, True), best(gains, False)
    sides = zip(by_depth(runs[kl.label]), by_depth(runs[other.label]), strict=True)
    depths = [
        {"depth": n, "alpha_kl": was, "alpha": now, "gain": now / was - 1} for n, (was, now) in enumerate(sides, 1)
    ]
    found = {key: asdict(other)[key] for key in KEPT}
    about = {
        "kind": folder.name,
        "environment": environment(),
        "baseline": baseline,
        "alpha_kl": kl.alpha,
        "tau_kl": kl.tau,
    }
    return about | found | {"depths": depths, "labels": [asdict(gain) for gain in gains]}


def beside(rows: list[dict[str, Any]], report: Path) -> list[dict[str, Any]]:
    """The rows, and those of other kinds that the report holds already, by name."""
    kept = json.loads(report.read_text(encoding="utf-8"))["kinds"] if report.is_file() else []
    return sorted({one["kind"]: one for one in [*kept, *rows]}.values(), key=lambda one: str(one["kind"]))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'kind':<14} {'kl':<12} {'loss':<22} seeds  tau(8) kl  tau(8)  gain in tau(8)"]
    for one in rows:
        gain = f"{one['gain']:+.1%} [{one['low']:+.1%}, {one['high']:+.1%}]"
        lines.append(
            f"{one['kind']:<14} {one['baseline']:<12} {one['label']:<22} {one['seeds']:>5}  "
            f"{one['tau_kl']:9.3f}  {one['tau']:6.3f}  {gain}"
        )
        lines += [
            f"    depth {d['depth']}: acceptance {d['alpha_kl']:.3f} -> {d['alpha']:.3f} ({d['gain']:+.1%})"
            for d in one["depths"]
        ]
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], independent: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "cotrain"  # the same figure, the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    lone = [(one["alpha_kl"], 100 * (one["alpha"] / one["alpha_kl"] - 1)) for one in independent]
    axes.plot(*zip(*lone, strict=True), "o-", color="grey", label="independent drafts of several sizes")
    for one, mark in zip(rows, "sD^vPX*<>", strict=False):
        axes.plot(
            [d["alpha_kl"] for d in one["depths"]], [100 * d["gain"] for d in one["depths"]], mark, label=one["kind"]
        )
        for d in one["depths"]:
            axes.annotate(
                str(d["depth"]), (d["alpha_kl"], 100 * d["gain"]), (4, 4), textcoords="offset points", fontsize=7
            )
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set(xlabel="acceptance that forward KL reaches at a depth, T = 1", ylabel="gain of acceptance by the loss, %")
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main(folder: str, report: str, figure: str) -> None:
    rows = beside([row(place) for place in sorted(Path(folder).iterdir()) if place.is_dir()], Path(report))
    print(table(rows))
    made = {"temperature": TEMPERATURE, "k": K, "kinds": rows}
    Path(report).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    draw(rows, json.loads(INDEPENDENT.read_text(encoding="utf-8"))["drafts"], Path(figure))


if __name__ == "__main__":
    main(*sys.argv[1:])
