"""Compares runs on the same held-out texts: the tau of each run, and confidence intervals of paired differences."""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from cotrain.config.changes import BUDGETS, change
from cotrain.config.drafts import DRAFTS
from cotrain.config.settings import flat
from cotrain.errors import UserError
from cotrain.evaluation.held_out import HeldOut, Scores
from cotrain.run_folder import MARKER, read_marker, refuse_unfinished
from inference.drafts.draft_folder import REPORT
from inference.drafts.weight_files import read_json

FIGURES = "held_out.json"
RECORDED = re.compile(r"alpha_T([^/]+)/all")  # in reports, see `Distillation.acceptance`
DEPTHS = (4, 8)
RESAMPLES = 2000
LIKE = ("alpha", "kl", "entropy", "calibration")
RunFigures = dict[str, Any]  # the content of the file `FIGURES` of a run


class TextFigures(BaseModel):
    """What `FIGURES` has of the texts at one temperature, see `per_text`. Older files have no hashes."""

    model_config = ConfigDict(strict=True)
    alpha: float
    kl: float
    entropy: float
    calibration: float
    lengths: list[int]
    calls: dict[str, list[float]]
    hashes: list[str] | None = None

    @model_validator(mode="after")
    def _as_many(self) -> "TextFigures":
        rows = [self.calls.get(str(k), []) for k in DEPTHS] + [self.lengths if self.hashes is None else self.hashes]
        if any(len(row) != len(self.lengths) for row in rows):
            raise ValueError(f"it has {len(self.lengths)} lengths, but not as many calls at {DEPTHS} or hashes")
        return self


class StoredFigures(BaseModel):
    """What readers of `FIGURES` need."""

    model_config = ConfigDict(strict=True)
    label: str
    seed: int
    texts: dict[str, TextFigures]
    tau: float | None = None
    environment: dict[str, Any] | None = None


def read_figures(file: Path) -> RunFigures:
    """Return the figures of a run in its file `FIGURES`. Raises UserError, which names the file, if they are broken."""
    try:
        figures = read_json(file)
        StoredFigures.model_validate(figures)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UserError(
            f"{file} is broken ({'.'.join(map(str, wrong['loc']))}: {wrong['msg']}): restore it, or train the run again"
        ) from error
    except ValueError as error:
        raise UserError(str(error)) from error
    return figures


def per_text(scores: dict[float, Scores], held_out: Mapping[float, HeldOut]) -> dict[str, Any]:
    """Return the figures of one run for its file `FIGURES`, keyed by temperature. They are the means in `LIKE`;
    acceptance by depth, if the draft's distribution depends on the depth; and for each text the hashes of text and
    prompt, its length in tokens, and its expected target calls at k = 4 and 8.

    scores: on all held-out texts, keyed by temperature. held_out: these texts, keyed by temperature.
    """
    return {
        f"{temperature:g}": {
            **{name: getattr(one, name) for name in LIKE},
            **({"alphas": list(one.alphas)} if one.alphas else {}),
            "hashes": held_out[temperature].texts.hashes(),
            "prompts": held_out[temperature].texts.prompt_hashes(),
            "lengths": one.lengths.tolist(),
            "calls": {str(k): one.calls(k).tolist() for k in DEPTHS},
        }
        for temperature, one in scores.items()
    }


@dataclass(frozen=True)
class Gain:
    """The tau of all runs with one label, and its relative gain over the baseline, with a 95 % interval from `low` to
    `high`.

    k: draft length. seeds: number of pairs of runs. texts: number of texts per pair; both runs of a pair were evaluated
    on them, and tau and gain are computed on them. alpha, kl (nats), entropy of q (nats), calibration (error): means
    over the label's runs.
    """

    label: str
    temperature: str
    k: int
    seeds: int
    texts: int
    alpha: float
    kl: float
    entropy: float
    calibration: float
    tau: float
    gain: float
    low: float
    high: float


def read_runs(folder: Path) -> dict[str, list[RunFigures]]:
    """Return the figures of all runs in a folder, as label -> list of the runs' figures, ordered by seed. Raises
    UserError if there are none.

    Runs with the same label are pooled only if their settings differ in seeds alone. Otherwise the settings that differ
    are added to the label, as in `kl,draft.kind=eagle`.
    """
    files = [file for file in sorted(folder.rglob(FIGURES)) if not _of_stage(file, folder)]
    if not files:
        refuse_unfinished("folder", folder)
        if not folder.exists():
            raise UserError(f"folder={folder} does not exist: name a folder with runs of cotrain train")
        raise UserError(f"folder={folder}: no run in it has a {FIGURES}: name a folder with runs of cotrain train")
    runs = [(read_figures(file), _settings_of(file.parent)) for file in files]
    labelled = defaultdict(list)
    for run, settings in sorted(runs, key=lambda run: run[0]["seed"]):
        labelled[run["label"]].append((run, settings))
    groups = defaultdict(list)
    for label, some in labelled.items():
        keys = sorted({key for _, settings in some for key in settings})
        differing = [key for key in keys if len({json.dumps(settings.get(key)) for _, settings in some}) > 1]
        for run, settings in some:
            groups[",".join([label, *(f"{key}={settings.get(key)}" for key in differing)])].append(run)
    return dict(groups)


def _of_stage(file: Path, folder: Path) -> bool:
    """Return whether a file of figures below `folder` is of one stage of a joint training, not of a whole run."""
    within = [place for place in file.parent.parents if place == folder or folder in place.parents]
    return not (file.parent / MARKER).is_file() and any((place / MARKER).is_file() for place in within)


def _settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings that decide a run's results, by dotted key, without seeds; {} if the folder has no record of
    them."""
    settings = dict(flat((read_marker(folder) or {}).get("settings") or {}))
    draft = DRAFTS.get(str(settings.get("draft.kind")))  # an earlier version stored the settings of all kinds
    return {
        key: value
        for key, value in settings.items()
        if key in BUDGETS
        or not (isinstance(value, dict) or key.endswith("seed"))
        and change(key, 0, 1, draft=draft) == "other"
    }


def left_out(runs: dict[str, list[RunFigures]], baseline: str) -> dict[str, str]:
    """Return, by label, why `compare` leaves out the runs with this label. runs: label -> the figures of its runs, from
    `read_runs`. baseline: the label to compare with, or a part that only this label has."""
    baseline = named(baseline, runs)
    base = [run["texts"] for run in runs[baseline]]
    reasons = {}
    for label, mine in runs.items():
        texts = [run["texts"] for run in mine]
        common = [t for t in texts[0] if all(t in one for one in (*texts, *base))]
        if not any(texts):
            reasons[label] = "it is not trained, so it has no held-out figures"
        elif not common:
            theirs = sorted({t for one in base for t in one})
            reasons[label] = (
                f"it was evaluated at temperatures {sorted({t for one in texts for t in one})}, the baseline at "
                f"{theirs}: set a common one in rollout.temperatures="
            )
        elif not all(_rows(mine, runs[baseline], t)[1][0] for t in common):
            reasons[label] = (
                "it was evaluated on other texts than the baseline: set the same rollout.folder= in all runs, which "
                "must be of the same target"
            )
    return reasons


def compare(runs: dict[str, list[RunFigures]], baseline: str) -> list[Gain]:
    """Return the gain of every label over the baseline, for each k in `DEPTHS` and each temperature that all runs of
    both labels have.

    runs: label -> the figures of its runs, from `read_runs`. baseline: a label, or a part (`loss=kl` or `kl`) that only
    one label has.

    Runs are paired with the baseline's runs by seed or, if no seed is in common, in the order of their seeds. The two
    runs of a pair are compared on the texts on which both were evaluated, and all pairs use equally many texts. Each
    bootstrap sample draws seeds and texts with replacement, the same ones for both sides. Labels in `left_out` are
    skipped. Raises UserError if the baseline is missing.
    """
    baseline = named(baseline, runs)
    gains, apart = [], left_out(runs, baseline)
    for label, mine in runs.items():
        if label in apart:
            continue
        every = [run["texts"] for run in (*mine, *runs[baseline])]
        for temperature in (t for t in mine[0]["texts"] if all(t in texts for texts in every)):
            for k in DEPTHS:
                gains.append(_gain(label, mine, runs[baseline], temperature, k))
    return sorted(gains, key=lambda gain: (gain.temperature, gain.k, -gain.tau))


def own_acceptance(draft: Path) -> dict[str, float]:
    """Return a draft's acceptance on held-out texts of the target that it was trained for, keyed by temperature (`1`),
    as its report has it or, if it was not measured, its run. Return {} if there is no such file. draft: its folder."""
    if (draft / REPORT).is_file():
        held: dict[str, float] = (read_json(draft / REPORT).get("extra") or {}).get("held_out") or {}
        named = {RECORDED.fullmatch(name): value for name, value in held.items()}
        return {match[1]: value for match, value in named.items() if match}
    if not (draft.parent / FIGURES).is_file():
        return {}
    texts = read_json(draft.parent / FIGURES).get("texts")
    stored = texts.items() if isinstance(texts, dict) else ()
    return {temperature: one["alpha"] for temperature, one in stored if isinstance(one, dict) and "alpha" in one}


def at_start(before: RunFigures, record: Mapping[str, float]) -> list[str]:
    """Return a line for the user for each temperature: the acceptance of a draft with which a training begins. before:
    its figures, from `per_text`. record: of the draft, from `own_acceptance`."""
    return [
        f"at the start, T={temperature}: acceptance {one['alpha']:.3f}{_beside(record, temperature)}"
        for temperature, one in before.items()
    ]


def _beside(record: Mapping[str, float], temperature: str) -> str:
    known = temperature in record
    return f" ({record[temperature]:.3f} on texts of the target that the draft was trained for)" if known else ""


def since_start(before: RunFigures, after: RunFigures, record: Mapping[str, float]) -> list[str]:
    """Return a line for the user for each temperature: how far a training has moved a draft that it began with. before,
    after: the figures of its start and of its end, from `per_text`, on the same texts. record: of the draft, from
    `own_acceptance`."""
    gains = [_gain("end", [{"texts": after}], [{"texts": before}], temperature, DEPTHS[0]) for temperature in after]
    return [
        f"since the start, T={gain.temperature}: acceptance {before[gain.temperature]['alpha']:.3f} -> "
        f"{gain.alpha:.3f}{_beside(record, gain.temperature)}, tau at k={gain.k} "
        f"{gain.tau / (1 + gain.gain):.2f} -> {gain.tau:.2f}, {gain.gain:+.1%} [{gain.low:+.1%}, {gain.high:+.1%}] "
        f"on {gain.texts} texts"
        for gain in gains
    ]


def named(baseline: str, labels: Collection[str]) -> str:
    """Return the label that `baseline` stands for: the label itself, or the only label that contains this setting
    (`loss=kl`) or this value (`kl`). Raises UserError, which lists the labels, if none or several match."""
    if baseline in labels:
        return baseline
    matches = [label for label in labels if baseline in _settings(label)]
    if len(matches) == 1:
        return matches[0]
    listed = ", ".join(sorted(matches or labels))
    which = f"several labels have it, {listed}" if matches else f"no run has this label; the labels are {listed}"
    raise UserError(f"baseline={baseline}: {which}: name one of them")


def _settings(label: str) -> set[str]:
    """Return the parts of a sweep's label: its settings (`loss=kl`), and their values (`kl`)."""
    parts = label.split(",")
    return {*parts, *(part.partition("=")[2] for part in parts)}


def _gain(label: str, mine: Sequence[RunFigures], base: Sequence[RunFigures], temperature: str, k: int) -> Gain:
    pairs, common = _rows(mine, base, temperature)
    lengths, ours, theirs = np.array(
        [
            [(one["lengths"][i], one["calls"][str(k)][i], two["calls"][str(k)][j]) for i, j in rows]
            for (one, two), rows in zip(pairs, common, strict=True)
        ],
        dtype=np.float64,
    ).transpose(2, 0, 1)  # each (seeds, texts)
    seeds = len(pairs)
    rng, texts = np.random.default_rng(0), lengths.shape[1]
    draws = [(rng.integers(seeds, size=seeds), rng.integers(texts, size=texts)) for _ in range(RESAMPLES)]
    ratios = [theirs[np.ix_(s, t)].sum() / ours[np.ix_(s, t)].sum() - 1 for s, t in draws]
    low, high = np.quantile(ratios, [0.025, 0.975])
    like = {name: float(np.mean([run["texts"][temperature][name] for run in mine])) for name in LIKE}
    return Gain(
        label,
        temperature,
        k,
        seeds,
        texts,
        **like,
        tau=float(lengths.sum() / ours.sum()),
        gain=float(theirs.sum() / ours.sum() - 1),
        low=float(low),
        high=float(high),
    )


def _rows(
    mine: Sequence[RunFigures], base: Sequence[RunFigures], temperature: str
) -> tuple[list[tuple[Any, Any]], list[list[tuple[int, int]]]]:
    """Return two lists: the pairs of runs' figures at a temperature, and for each pair the rows (i, j) of the texts
    that both runs have, equally many for all pairs. mine, base: the runs of one label and of the baseline, paired by
    seed. If the two sides have no seed in common, they are paired in the order of their seeds."""
    ours, theirs = map(_by_seed, (mine, base))
    runs = [(ours[key], theirs[key]) for key in ours if key in theirs] or zip(mine, base, strict=False)
    pairs = [(one["texts"][temperature], two["texts"][temperature]) for one, two in runs]
    return pairs, _aligned(pairs)


def _by_seed(runs: Sequence[RunFigures]) -> dict[tuple[Any, int], RunFigures]:
    """Return runs keyed by (seed, number of earlier runs with this seed)."""
    seeds = [run.get("seed") for run in runs]
    return {(seed, seeds[:index].count(seed)): run for index, (seed, run) in enumerate(zip(seeds, runs, strict=True))}


def _aligned(pairs: Sequence[tuple[RunFigures, RunFigures]]) -> list[list[tuple[int, int]]]:
    """Return for each pair the rows (i, j) of the texts that both runs have, equally many for all pairs. A run with a
    time limit may have fewer texts.

    If some texts are in all pairs, only these are used, in the same order for each pair, since a bootstrap sample draws
    the same numbers for each seed. Otherwise evenly spaced texts are used for each pair.
    """
    common = [_common(*pair) for pair in pairs]
    hashes = [
        [one["hashes"][i] for i, _ in rows] if "hashes" in one else []
        for (one, _), rows in zip(pairs, common, strict=True)
    ]
    if shared := set(hashes[0]).intersection(*hashes[1:]):
        by_hash = [dict(zip(own, rows, strict=True)) for own, rows in zip(hashes, common, strict=True)]
        return [[rows[text] for text in hashes[0] if text in shared] for rows in by_hash]
    count = min(map(len, common))
    return [[rows[n * len(rows) // count] for n in range(count)] for rows in common]


def _common(one: RunFigures, two: RunFigures) -> list[tuple[int, int]]:
    """Return the rows (i, j) of the texts that two runs have in common. For runs without stored hashes, all texts are
    in common if all lengths are equal, and none otherwise."""
    if "hashes" not in one or "hashes" not in two:
        return [(row, row) for row in range(len(one["lengths"]))] if one["lengths"] == two["lengths"] else []
    rows = {text: row for row, text in enumerate(two["hashes"])}
    return [(row, rows[text]) for row, text in enumerate(one["hashes"]) if text in rows]


def gains_table(gains: Sequence[Gain], baseline: str, absent: Mapping[str, str]) -> str:
    """Return the gains as a table for the user, and one line for each label that was left out. baseline: the label that
    was compared with. absent: the reason for each label that was left out."""
    wide = max([len("label"), *(len(gain.label) for gain in gains)])
    lines = [
        f"{'T':>4}  {'k':>2}  {'label':<{wide}} seeds texts  alpha     kl  H(q)    ECE    tau  over {baseline} "
        "[95 % interval]"
    ]
    for g in gains:
        interval = f"{g.gain:+.2%} [{g.low:+.2%}, {g.high:+.2%}]"
        lines.append(
            f"{g.temperature:>4}  {g.k:>2}  {g.label:<{wide}} {g.seeds:>5} {g.texts:>5}  {g.alpha:.3f}  {g.kl:5.3f}"
            f"  {g.entropy:4.2f}  {g.calibration:.3f}  {g.tau:.3f}  {interval}"
        )
    return "\n".join([*lines, *(f"left out: {label}: {why}" for label, why in absent.items())])
