"""Command `cotrain plan`. It forecasts the speed of drafts at every draft length. Only rounds are timed; whole texts
are timed with measure=true."""

import copy
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.commands.served_pair import as_trained, measurable_folder, plan_of, prompts, refuse_pair, resolved, room_of
from cotrain.commands.shapes import composed_shape, shape_table, timed_shape
from cotrain.config.settings import PlanConfig
from cotrain.console import answering, write_answer
from cotrain.errors import UserError
from cotrain.planning.costs_file import speedup_table, speedups_of
from cotrain.planning.drafted import Drafted, drafted
from cotrain.planning.drift import drift, read_plan, served_counters
from cotrain.planning.outcome import POLICY, PROFILE, SCHEDULE, entries, files, forecast_table
from cotrain.planning.page import PAGE, plan_page
from cotrain.planning.plan import Plan
from cotrain.planning.timed import measured_table, timed_cells
from cotrain.rollout.training_texts import start_of
from cotrain.run_folder import claim, refuse_folder
from cotrain.training.job import models, settle
from cotrain.training.preconditions import fits, timed, timed_by
from inference.drafts import bundled_target
from inference.drafts.atomic import write_atomic
from inference.drafts.draft_folder import PROMPTS, folder_identity
from inference.measure.environment import environment
from inference.output import Emitted
from inference.report.schema import strict

PLAN = "plan.json"
# settings that several drafts must have in common
SHARED = (
    "target.path",
    "target.adapter",
    "quantisation.kind",
    "regime.top_k",
    "regime.top_p",
    "bench.prompt_tokens",
    "data.chat",
    "data.template",
)


def run(cfg: PlanConfig) -> None:
    """Forecast, write plan.json, a page and the files for other programs to `output`, and print a table.

    Three settings ask for something else. log= compares a server's counters with the plan in `output`. shapes= times
    drafts that do not exist yet. costs= without a draft forecasts the speed-up for a range of acceptances.
    """
    with answering(cfg.as_json) as answer:
        if cfg.log is not None:
            compared = drift(read_plan(Path(cfg.output) / PLAN), served_counters(Path(cfg.log)))
            answer(asdict(compared), compared.line)
            return
        paths = [*([cfg.draft.path] if cfg.draft.path else []), *cfg.drafts]
        if paths and cfg.shapes or not (paths or cfg.shapes or cfg.costs):
            raise UserError(
                "name a draft folder with draft.path=, or several with drafts=[a,b]; or, without a draft folder, "
                "drafts that do not exist yet with shapes="
            )
        if cfg.costs and (cfg.measure or cfg.shapes or cfg.bench.trees):
            raise UserError(
                f"costs={cfg.costs}: with the costs of another machine nothing is timed here: leave out measure=, "
                "shapes= and bench.trees="
            )
        settle(cfg.threads, cfg.bench.seed)
        refuse_folder(cfg.output, cfg.overwrite)
        answer(*(_shapes(cfg) if cfg.shapes else _drafts(cfg, paths) if paths else _costs(cfg)))


def _drafts(cfg: PlanConfig, paths: list[str]) -> tuple[dict[str, Any], str]:
    """Forecast the drafts in the folders `paths` and write the files. Return the content of plan.json, and the text to
    print."""
    began = time.monotonic()
    settings = {path: _settings(cfg, path) for path in paths}
    _refuse_others(settings)
    target = models(settings[paths[0]])
    with claim(cfg.output, cfg.overwrite, command="plan") as folder:
        texts: dict[float, Emitted] = {}
        drafts = [drafted(mine, _plan(mine, target), texts) for mine in settings.values()]
        best = _best(drafts)
        best = replace(best, policy=replace(best.policy, draft=folder_identity(Path(best.path))))
        plan = _origin(settings[paths[0]], texts) | entries(drafts, best) | {"seconds": time.monotonic() - began}
        contents = {PLAN: plan} | files(best, cfg.batches, plan)
        for name, content in contents.items():
            write_answer(folder.path / name, content, 1)
        lines = [forecast_table(drafts)]
        if cfg.measure:
            plan["measured"] = timed_cells(best.plan, best.cells, best.policy)
            write_answer(folder.path / PLAN, plan, 1)
            lines.append(measured_table(plan["measured"]))
        write_atomic(folder.path / PAGE, plan_page(strict(plan)))
        folder.finish()
    lines.append(f"plan: {Path(cfg.output) / PLAN}, with {PROFILE}, {SCHEDULE}, {POLICY} and {PAGE} beside it")
    return plan, "\n".join(lines)


def _shapes(cfg: PlanConfig) -> tuple[dict[str, Any], str]:
    """Time drafts of the shapes in `cfg` and write plan.json. Return its content, and the text to print. Settings of
    the target that are not set get their defaults in `cfg`, in place."""
    began = time.monotonic()
    if cfg.measure or cfg.temperatures:
        raise UserError(
            "shapes=: drafts that do not exist yet have no acceptance, so only their costs are timed: leave out "
            "measure= and temperatures="
        )
    cfg.target.path = cfg.target.path or bundled_target.NAME
    as_trained(cfg, None)
    # wrong ones are named before any is timed
    composed = [composed_shape(settings, cfg.target) for settings in cfg.shapes]
    target = models(cfg)
    with claim(cfg.output, cfg.overwrite, command="plan") as folder:
        timed_shapes = [timed_shape(cfg, *shape, target) for shape in zip(cfg.shapes, composed, strict=True)]
        plan = _origin(cfg, {}) | {"shapes": timed_shapes, "seconds": time.monotonic() - began}
        write_answer(folder.path / PLAN, plan, 1)
        folder.finish()
    return plan, f"{shape_table(timed_shapes)}\nplan: {Path(cfg.output) / PLAN}"


def _costs(cfg: PlanConfig) -> tuple[dict[str, Any], str]:
    """Forecast the speed-up for a range of acceptances from the costs in the file costs=, and write plan.json. Return
    its content, and the text to print."""
    speedups = speedups_of(str(cfg.costs), cfg.batches, max(cfg.bench.depths))
    plan = {"environment": environment(), "speedups": speedups}
    with claim(cfg.output, cfg.overwrite, command="plan") as folder:
        write_answer(folder.path / PLAN, plan, 1)
        folder.finish()
    return plan, f"{speedup_table(speedups)}\nplan: {Path(cfg.output) / PLAN}"


def _origin(cfg: PlanConfig, texts: Mapping[float, Emitted]) -> dict[str, Any]:
    """Return the entries of plan.json that describe how the plan was measured. texts: the target's texts, keyed by
    temperature."""
    return {
        "environment": environment(),
        "settings": {
            "texts": {f"{t:g}": len(some.tokens) for t, some in texts.items()},
            "tokens": {f"{t:g}": sum(map(len, some.tokens)) for t, some in texts.items()},
            "bench": cfg.bench.model_dump(),
        },
    }


def _settings(cfg: PlanConfig, path: str) -> PlanConfig:
    """Return a copy of `cfg` for the draft folder `path`. Settings that are not set get the values stored in the
    folder. Raises UserError if the folder is invalid, or if no target is named."""
    mine = copy.deepcopy(cfg)
    mine.draft.path = path
    resolved(mine)
    return mine


def _refuse_others(settings: Mapping[str, PlanConfig]) -> None:
    """Raise UserError if two drafts differ in target, regime or form of prompts, since all drafts are measured on the
    same texts of the target. settings: the settings for each draft, keyed by its folder.

    Without data.path= the folders must also have the same prompts, since a draft may have learnt from prompts that
    another draft did not learn from.
    """
    (first, one), *others = settings.items()
    for path, other in others:
        if one.data.path is None and _own_prompts(path) != _own_prompts(first):
            raise UserError(
                f"drafts: the folders {first} and {path} have different prompts to measure on: with data.path=, name "
                "prompts that neither draft has learnt from"
            )
        for key in (*SHARED, *(() if one.temperatures else ("regime.temperature",))):
            mine, theirs = (reduce(getattr, key.split("."), cfg) for cfg in (one, other))
            if mine != theirs:
                raise UserError(
                    f"drafts: {path} is for {key}={theirs}, and {first} for {key}={mine}: plan them one by one"
                )


def _own_prompts(path: str) -> bytes | None:
    file = Path(path) / PROMPTS
    return file.read_bytes() if file.is_file() else None


def _plan(cfg: PlanConfig, pair: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> Plan:
    """Load the draft of `cfg`, and return its plan. pair: the target and its tokenizer. The draft length stored in the
    folder is added to bench.depths in `cfg`, in place."""
    path, name, size = str(cfg.draft.path), str(cfg.target.path), cfg.bench
    draft_folder, outline = measurable_folder(path), refuse_pair(path, name, cfg.target.trust_remote_code)
    room, start = room_of(outline), start_of(outline.target)
    fits("bench.prompt_tokens", size.prompt_tokens, timed_by(size), timed(size), room, start)
    given = prompts(cfg.data, size, outline.target, outline.tokenizer, None, draft_folder.path)
    metadata = draft_folder.metadata
    if metadata:
        size.depths = sorted({*size.depths, metadata.k})
    if metadata and metadata.tree and not size.trees:
        nodes = len(metadata.tree.parents)
        print(
            f"plan: {path} is served with a tree of {nodes} nodes, but only chains are forecast: set "
            f"bench.trees={nodes} to forecast trees too"
        )
    return plan_of(cfg, draft_folder, pair, size, cfg.verify, given=given)


def _best(drafts: list[Drafted]) -> Drafted:
    """Return the draft to recommend: the one whose forecast speed-ups, over all temperatures and numbers of rows, have
    the highest geometric mean."""
    return max(drafts, key=lambda one: sum(torch.tensor([cell.speedup for cell in one.cells.values()]).log().tolist()))
