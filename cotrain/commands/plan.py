"""Command `cotrain plan`. It forecasts the speed of drafts at every draft length, without timing a draft's texts."""

import copy
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.acceptance import iid_tau
from cotrain.bench import measurement
from cotrain.bench.planner import BATCH, MeasuredCosts, measured, plain_texts, text_figures
from cotrain.commands.served_pair import load_network, prompts, refuse_pair, resolved, room_of
from cotrain.commands.served_pair import measured as measured_folder
from cotrain.config.settings import PlanConfig, sampling
from cotrain.console import answering, strict
from cotrain.errors import UserError
from cotrain.plan.drift import Drift, drift, served
from cotrain.plan.forecast import (
    SIGMAS,
    Forecast,
    acceptance,
    alone,
    expected,
    forecast,
    schedule,
    stops_paying,
)
from cotrain.plan.policy_file import Observation, estimates, observed
from cotrain.plan.policy_file import content as policy_content
from cotrain.plan.timed import measured_table, timed_cells
from cotrain.rollout.training_texts import start_of
from cotrain.run_folder import claim, refuse
from cotrain.training.job import models, settle
from cotrain.training.preconditions import fits, timed
from inference.adaptive_policy import Adaptive, Estimates
from inference.drafts.atomic import write_atomic
from inference.measure.costs import Costs
from inference.measure.environment import environment
from inference.output import Emitted
from inference.report.table import aligned

PLAN, PROFILE, SCHEDULE, POLICY = "plan.json", "speculation_profile.json", "schedule.json", "policy.json"


@dataclass(frozen=True)
class Drafted:
    """The forecasts of one draft. plan: the draft with its target. by: (temperature, rows) -> forecast. alone: the same
    keys -> speed-ups of batches that are decoded alone, see `forecast.alone`. alpha: mean acceptance by temperature.
    profiles: acceptance by depth and temperature at the longest draft length. costs: by number of rows. estimates: of
    an adaptive policy."""

    path: str
    plan: measurement.Plan
    by: Mapping[tuple[float, int], Forecast]
    alone: Mapping[tuple[float, int], Sequence[float]]
    alpha: Mapping[float, float]
    profiles: Mapping[float, Mapping[str, Any]]
    costs: Mapping[int, Costs]
    estimates: Estimates


def run(cfg: PlanConfig) -> None:
    """Forecast, write plan.json and the files for other programs to `output`, and print a table."""
    if cfg.log is not None:
        with answering(cfg.json) as answer:
            compared = _compared(Path(cfg.log), Path(cfg.output) / PLAN)
            answer(asdict(compared), compared.line)
        return
    paths = [*([cfg.draft.path] if cfg.draft.path else []), *cfg.drafts]
    if not paths:
        raise UserError("name a draft folder with draft.path=, or several with drafts=[a,b]")
    settle(cfg.threads, cfg.bench.seed)
    refuse(cfg.output, cfg.overwrite)
    began = time.monotonic()
    with answering(cfg.json) as answer:
        settings = {path: _settings(cfg, path) for path in paths}
        _refuse_others(settings)
        target = models(settings[paths[0]])
        with claim(cfg.output, cfg.overwrite, command="plan") as folder:
            texts: dict[float, Emitted] = {}
            drafts = [_drafted(mine, target, texts) for mine in settings.values()]
            best = _best(drafts)
            plan = _entries(cfg, drafts, best, texts) | {"seconds": time.monotonic() - began}
            write_atomic(folder.path / PLAN, json.dumps(strict(plan), indent=1, allow_nan=False) + "\n")
            for name, content in _files(cfg, best, plan).items():
                write_atomic(folder.path / name, json.dumps(strict(content), indent=1) + "\n")
            lines = [table(drafts)]
            if cfg.measure:
                cells = timed_cells(best.plan, best.by, best.alone, Adaptive.load(folder.path / POLICY))
                plan["measured"] = cells
                write_atomic(folder.path / PLAN, json.dumps(strict(plan), indent=1, allow_nan=False) + "\n")
                lines.append(measured_table(cells))
            folder.finish()
            lines.append(f"plan: {folder.path / PLAN}, with {PROFILE}, {SCHEDULE} and {POLICY} beside it")
            answer(plan, "\n".join(lines))


def _compared(log: Path, plan: Path) -> Drift:
    """Compare a server's counters with a plan. Raises UserError for files that are missing or something else."""
    try:
        given = json.loads(plan.read_text(encoding="utf-8"))
        return drift(given, served(log))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"output: {plan} is no plan to compare with: {error!r}") from error


def _settings(cfg: PlanConfig, path: str) -> PlanConfig:
    """Return the settings for one draft, with those of its folder filled in. Raises the errors of `resolved` and
    `measurement.refuse`."""
    mine = copy.deepcopy(cfg)
    mine.draft.path = path
    resolved(mine)
    measurement.refuse(mine.bench)
    return mine


def _refuse_others(settings: Mapping[str, PlanConfig]) -> None:
    """Raise UserError unless all drafts are for the same target and regime, since they share it and its texts."""
    (first, one), *others = settings.items()
    for path, other in others:
        for key in ("target.path", "target.adapter", "quantisation.kind", "regime.top_k", "regime.top_p"):
            mine, theirs = (OmegaConf.select(cast(Any, cfg), key) for cfg in (one, other))
            if mine != theirs:
                raise UserError(f"drafts: {path} is for {key}={theirs}, and {first} for {key}={mine}: plan them one by "
                                "one")  # fmt: skip


def _drafted(
    cfg: PlanConfig, pair: tuple[PreTrainedModel, PreTrainedTokenizerBase], texts: dict[float, Emitted]
) -> Drafted:
    """Forecast one draft. pair: the target and its tokenizer. texts: those of the target by temperature, which the
    first draft fills."""
    path, name, size = str(cfg.draft.path), str(cfg.target.path), cfg.bench
    model, tokenizer = pair
    draft_folder, outline = measured_folder(path), refuse_pair(path, name, cfg.target.trust_remote_code)
    room, start = room_of(outline), start_of(outline.target)
    fits("bench.prompt_tokens", size.prompt_tokens, "bench.new_tokens", timed(size), room, start)
    given = prompts(cfg.data, size, outline.target, outline.tokenizer, None, draft_folder.path)
    draft, metadata = load_network(draft_folder, model, tokenizer), draft_folder.metadata
    assert cfg.verify is not None
    plan = measurement.Plan(
        model, tokenizer, draft, sampling(cfg.regime), cfg.verify, size, (name, path),
        metadata.objective if metadata else "sampled", given=given, kind=draft_folder.kind,
    )  # fmt: skip
    temperatures = list(cfg.temperatures) or [plan.sampling.temperature]
    longest = max(plan.depths)
    costs = {rows: _costs(plan, rows).costs for rows in sorted({1, *cfg.batches})}
    seconds = {rows: one.rounds for rows, one in costs.items()}
    by: dict[tuple[float, int], Forecast] = {}
    ends: dict[tuple[float, int], Sequence[float]] = {}
    alpha, profiles, observations, shares = {}, {}, list[Observation](), list[float]()
    for t in temperatures:
        here = replace(plan, sampling=replace(plan.sampling, temperature=t))
        if t not in texts:
            print(f"plan: {cfg.texts} texts of the target at temperature {t:g}")
            texts[t] = plain_texts(here, cfg.texts)
        figures = text_figures(here, texts[t], longest)
        calls = expected(figures, plan.verify, longest)
        inside = torch.arange(figures.logp.shape[1]) < figures.lengths[:, None]
        alpha[t] = float(figures.first(figures.alpha)[inside].mean())
        profiles[t] = acceptance(figures, plan.verify, longest)
        by |= {(t, rows): forecast(calls, costs[rows]) for rows in cfg.batches}
        ends |= {(t, rows): alone(calls, seconds, rows) for rows in cfg.batches}
        share, more = observed(here.engine(longest, BATCH), longest, texts[t].prompts, here.sampling, size.new_tokens,
                               size.seed + 1)  # fmt: skip
        observations, shares = observations + more, [*shares, share]
    fit = estimates(sum(shares) / len(shares), observations)
    return Drafted(path, plan, by, ends, alpha, profiles, costs, fit)


def _costs(plan: measurement.Plan, rows: int) -> MeasuredCosts:
    print(f"plan: costs of rounds, {rows} row{'s' * (rows > 1)}")
    bench = copy.copy(plan.bench)
    bench.rows = rows
    return measured(replace(plan, bench=bench))


def _best(drafts: list[Drafted]) -> Drafted:
    """Return the draft with the highest mean of the logarithms of its speed-ups, at its recommended lengths."""
    return max(drafts, key=lambda one: sum(torch.tensor([f.speedups[f.k] for f in one.by.values()]).log().tolist()))


# --- what is written and printed


def _entries(cfg: PlanConfig, drafts: list[Drafted], best: Drafted, texts: Mapping[float, Emitted]) -> dict[str, Any]:
    cells = [_cell(one, t, rows, cell) for one in drafts for (t, rows), cell in one.by.items()]
    return {
        "environment": environment(),
        "settings": {"texts": {f"{t:g}": len(some.tokens) for t, some in texts.items()},
                     "tokens": {f"{t:g}": sum(map(len, some.tokens)) for t, some in texts.items()},
                     "bench": OmegaConf.to_container(cast(Any, cfg.bench))},
        "recommended": best.path,
        "cells": cells,
        "costs": {one.path: {str(rows): asdict(costs) for rows, costs in one.costs.items()} for one in drafts},
        "acceptance": {one.path: {f"{t:g}": profile for t, profile in one.profiles.items()} for one in drafts},
    }  # fmt: skip


def _cell(one: Drafted, t: float, rows: int, cell: Forecast) -> dict[str, Any]:
    """Return the entry of a cell. iid: tau by the formula of equal acceptance at all depths, from the mean acceptance,
    beside the exact expectation."""
    taus = [cell.calls.tau(k) for k in range(len(cell.seconds))]
    return {
        "draft": one.path, "kind": one.plan.kind, "rule": one.plan.verify, "temperature": t, "rows": rows,
        "k": cell.k, "fastest": cell.fastest, "undecided": cell.undecided, "gain": cell.gain,
        "speedup": cell.speedups[cell.k], "speedups": list(cell.speedups), "errors": list(cell.errors),
        "tau": taus, "tau_errors": [cell.calls.error(k) for k in range(len(cell.seconds))],
        "iid": [iid_tau(one.alpha[t], k) for k in range(len(cell.seconds))], "alpha": one.alpha[t],
        "speedups_alone": list(one.alone[t, rows]),
        "seconds_per_round": list(cell.seconds), "perfect": cell.perfect, "break_even": cell.break_even,
    }  # fmt: skip


def _files(cfg: PlanConfig, best: Drafted, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of the files for other programs, by name: the schedule of draft lengths by batch size at the
    first temperature, as vLLM's ranges and by batch size, the acceptance of the recommended draft, and its adaptive
    policy."""
    t = next(iter(best.alpha))
    lengths = {rows: best.by[t, rows].k for rows in cfg.batches}
    most, profile = max(cfg.batches), best.profiles[t]
    k = len(profile["prefix"])
    return {
        SCHEDULE: {"draft": best.path, "temperature": t, "ranges": schedule(lengths, most),
                   "by_batch": {str(rows): length for rows, length in sorted(lengths.items())}},
        PROFILE: {
            "method": best.plan.kind, "draft": best.path, "num_speculative_tokens": k,
            "conditional_acceptance_rates": profile["conditional"], "marginal_acceptance_rates": profile["prefix"],
            "mean_acceptance_length": next(iter(best.by.values())).calls.tau(k),
            "acceptance_length_histogram": profile["histogram"],
            "conditions": {"temperature": t, "rule": best.plan.verify, "settings": plan["settings"],
                           "environment": plan["environment"], "measured": False},
        },
        POLICY: policy_content(best.estimates, best.costs) | {"draft": best.path, "environment": plan["environment"]},
    }  # fmt: skip


def table(drafts: list[Drafted]) -> str:
    """Return the forecasts as a table, and a line for each thing that a reader must know before using them."""
    rows = [["draft", "temperature", "rows", "k", "tau", "speed-up", "95 % interval", "batch alone", "break-even",
             "perfect draft"]]  # fmt: skip
    lines = []
    for one in drafts:
        for (t, count), cell in one.by.items():
            speedup, error = cell.speedups[cell.k], SIGMAS * cell.errors[cell.k]
            rows.append([one.path, f"{t:g}", str(count), str(cell.k), f"{cell.calls.tau(cell.k):.3f}",
                         f"{speedup:.2f}x", f"[{speedup - error:.2f}, {speedup + error:.2f}]" if cell.k else "",
                         f"{one.alone[t, count][cell.k]:.2f}x" if one.alone[t, count] else "-",
                         "-" if cell.break_even is None else f"{cell.break_even:.2f}",
                         f"{cell.perfect:.2f}x"])  # fmt: skip
            if cell.undecided:
                lines.append(f"{one.path}, temperature {t:g}, {count} rows: k = {cell.fastest} may be up to "
                             f"{100 * cell.gain:.0f} % faster than {cell.k}: raise texts= to know")  # fmt: skip
        for t in one.alpha:
            stop = stops_paying({count: cell for (at, count), cell in one.by.items() if at == t})
            if stop:
                lines.append(f"{one.path}, temperature {t:g}: no draft length pays from {stop} rows on")
    lines.append("speed-ups are those of this machine; their intervals are those of the texts. Rows that end are "
                 "replaced by prompts that wait; if none wait, the speed-up is that of `batch alone`")  # fmt: skip
    return "\n".join([aligned(rows, left=1), *lines])
