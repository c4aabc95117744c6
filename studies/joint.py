"""What joint training gains: tau of drafts of moved targets beside the best draft of the frozen target, against the KL.

    cotrain train draft=medusa measure=false trainer.steps=400 output=outputs/joint/medusa/warm ...
    cotrain train mode=joint draft=medusa init=pretrained draft.path=outputs/joint/medusa/warm/draft measure=false \
        joint.warm_steps=0 joint.epsilon=0.01 output=outputs/joint/medusa/joint_0.01 ...
    cotrain train draft=medusa init=pretrained draft.path=outputs/joint/medusa/warm/draft measure=false \
        output=outputs/joint/medusa/frozen ...
    python -m studies.joint outputs/joint outputs/results/joint.json outputs/results/joint.svg

Reads one folder per kind. In it, `frozen*` are runs that go on from the same draft with the frozen target for about
the same time, and every run with a moved target is compared with the best of them. tau is the exact expectation on
held-out texts, each target's own texts of the same prompts; intervals are 95 %, by resampling prompts. `lines` scores
both targets at a task: the share of lines of shipped texts all of whose tokens are the likeliest ones, by domain; null
without the weights of the moved target. The picture has the gain of tau against the KL, a line per kind.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from cotrain.data.corpora import DOMAINS, shipped
from cotrain.evaluation.comparison import FIGURES
from cotrain.run_folder import read_marker
from cotrain.training.joint import TARGET
from inference.drafts.bundled_target import resolve
from inference.drafts.moved_target import movement_of
from inference.measure.environment import environment
from inference.models.pretrained import load_model

DEPTHS, RESAMPLES, TEMPERATURE = ("4", "8"), 2000, "1"
COPIED = ("epsilon", "weight", "kl", "bound", "certified", "scale", "multiplier")
OF_TEXTS = ("kl_999", "reverse_kl", "same_top", "nats", "lorenz", "tokens_moved", "domains")


def figures(run: Path) -> dict[str, Any]:
    """Return alpha, and lengths and expected calls of each held-out text, of a run."""
    texts: dict[str, Any] = json.loads((run / FIGURES).read_text(encoding="utf-8"))["texts"][TEMPERATURE]
    return texts


def tau(texts: dict[str, Any], k: str, rows: Any = slice(None)) -> Any:
    """Return tokens per target call on some texts; rows (R, N) gives R values."""
    lengths, calls = np.array(texts["lengths"]), np.array(texts["calls"][k])
    return lengths[rows].sum(-1) / calls[rows].sum(-1)


def gain(moved: dict[str, Any], frozen: dict[str, Any], k: str) -> dict[str, float]:
    """Return the relative gain of tau with its interval. Prompts are resampled, with the texts of both sides; of
    other prompts (`same_prompts`) the interval lacks their noise."""
    count = len(moved["lengths"])
    rows = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    low, high = np.quantile(tau(moved, k, rows) / tau(frozen, k, rows) - 1, [0.025, 0.975])
    return {"value": float(tau(moved, k) / tau(frozen, k) - 1), "low": float(low), "high": float(high)}


def settings(run: Path) -> dict[str, Any]:
    """Return the settings of a run that its figures depend on."""
    said = (read_marker(run) or {}).get("settings") or {}
    trainer = {key: said["trainer"][key] for key in ("steps", "batch", "seed")}
    draft = {key: value for key, value in said["draft"].items() if value not in (None, 0, []) and key != "path"}
    rest = {key: said[key] for key in ("loss", "joint")}
    return {"trainer": trainer, "lr": said["optimizer"]["lr"], "draft": draft} | rest


def row(run: Path, frozen: Path) -> dict[str, Any]:
    """Return the figures of a moved target and its draft beside the frozen one."""
    moved, base = figures(run), figures(frozen)
    said = movement_of(str(run / TARGET))
    assert said is not None
    return {
        "name": run.name,
        "alpha": moved["alpha"],
        "alpha_frozen": base["alpha"],
        "alphas": moved.get("alphas"),
        "tau": {k: float(tau(moved, k)) for k in DEPTHS},
        "tau_frozen": {k: float(tau(base, k)) for k in DEPTHS},
        "gain": {k: gain(moved, base, k) for k in DEPTHS},
        "frozen": frozen.name,
        "same_prompts": "prompts" in base and base["prompts"] == moved.get("prompts"),
        **{name: said[name] for name in COPIED},
        **{part: {name: said[part][name] for name in OF_TEXTS} for part in ("texts", "own_texts")},
        "lines": lines(resolve(said["original"]), run / TARGET) if weighted(run / TARGET) else None,
        "settings": settings(run),
    }


def weighted(folder: Path) -> bool:
    """Return whether a target's folder has its weights."""
    return any(folder.glob("*.safetensors"))


def lines(original: str, moved: Path) -> dict[str, dict[str, float]]:
    """Return by domain the share of lines that each target predicts exactly, their difference with its standard error
    over texts, and the bits per byte of both on these texts."""
    tokenizer, result = AutoTokenizer.from_pretrained(original), {}
    models = [load_model(path, torch.float32) for path in (original, str(moved))]
    for domain in DOMAINS:
        texts = [row["text"] for row in shipped() if row["domain"] == domain]
        ours, theirs = (np.array([scored(model, tokenizer, text) for text in texts], float).T for model in models)
        total, change, bytes = ours[1].sum(), theirs[0] - ours[0], sum(len(text.encode()) for text in texts)
        result[domain] = {
            "lines": total,
            "original": ours[0].sum() / total,
            "moved": theirs[0].sum() / total,
            "difference": change.sum() / total,
            "error": change.std(ddof=1) * np.sqrt(len(texts)) / total,
            "bits_per_byte": [side[2].sum() / np.log(2) / bytes for side in (ours, theirs)],
        }
    return result


@torch.inference_mode()
def scored(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, int, float]:
    """Return how many lines of a text have the likeliest token at each place, given what is before it, how many lines
    there are, and the nats of all tokens but the first. A token over several lines, such as a line's end with the next
    indent, counts in each. The first line, which nothing is before, and an unfinished last one do not count."""
    encoded = tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
    ids = encoded["input_ids"]
    logs, following = model(input_ids=ids).logits[0, :-1].log_softmax(-1), ids[0, 1:]
    right, nats = (logs.argmax(-1) == following).tolist(), -float(logs.gather(1, following[:, None]).sum())
    whole = range(1, text.count("\n"))
    spans = zip(encoded["offset_mapping"][0, 1:].tolist(), right, strict=True)
    wrong = {text.count("\n", 0, at) for (start, end), good in spans if not good for at in range(start, end)}
    return sum(line not in wrong for line in whole), len(whole), nats


def draw(kinds: dict[str, Any], path: Path) -> None:
    """Draw the gain of tau(4) against the KL of the moved target, for the runs under a bound."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "cotrain"  # the same figure, the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for kind, found in kinds.items():
        rows = sorted((row for row in found["rows"] if row["weight"] is None), key=lambda row: float(row["kl"]))
        gains = [row["gain"][DEPTHS[0]] for row in rows]
        spread = [[100 * abs(gain[end] - gain["value"]) for gain in gains] for end in ("low", "high")]
        axes.errorbar(
            [row["kl"] for row in rows],
            [100 * gain["value"] for gain in gains],
            spread,
            marker="o",
            capsize=2,
            label=kind,
        )
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set(
        xscale="log",
        xlabel="KL(original || moved), nats per token, held-out texts",
        ylabel="gain of tau(4) over the frozen target, %",
    )
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main(folder: Path, output: Path, picture: Path) -> None:
    """Write the report and the picture, and print the table."""
    kinds: dict[str, Any] = {}
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        runs = sorted(file.parent for file in place.glob(f"*/{FIGURES}"))
        frozen = [run for run in runs if run.name.startswith("frozen")]
        moved = [run for run in runs if (run / TARGET).is_dir()]
        if frozen and moved:
            best = max(frozen, key=lambda run: tau(figures(run), DEPTHS[0]))
            kinds[place.name] = {"rows": [row(run, best) for run in moved], "frozen": settings(best)}
    output.write_text(json.dumps({"environment": environment(), "kinds": kinds}, indent=1) + "\n", encoding="utf-8")
    draw(kinds, picture)
    for kind, found in kinds.items():
        for one in found["rows"]:
            value, low, high = (100 * one["gain"][DEPTHS[0]][name] for name in ("value", "low", "high"))
            taus = f"{one['tau_frozen']['4']:.3f} -> {one['tau']['4']:.3f}"
            print(
                f"{kind:12} {one['name']:16} KL {one['kl']:.4f} (at most {one['bound']:.4f}) alpha "
                f"{one['alpha_frozen']:.3f} -> {one['alpha']:.3f} tau(4) {taus} "
                f"{value:+.1f} % [{low:.1f}, {high:.1f}]"
            )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
