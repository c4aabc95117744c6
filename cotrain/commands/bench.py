"""Command `cotrain bench`. It measures a draft folder against plain decoding on the same engine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cotrain.bench import measurement, servers
from cotrain.bench.measurement import recorded
from cotrain.commands.served_pair import measurable_folder, plan_of, prompts, refuse_pair, resolved, room_of, shape
from cotrain.config.groups import DEPTHS
from cotrain.config.settings import BenchConfig, sampling
from cotrain.console import answering, write_answer
from cotrain.errors import UserError, user_errors
from cotrain.page.html_page import written
from cotrain.rollout.training_texts import start_of
from cotrain.run_folder import claim, refuse_folder
from cotrain.training.job import models, settle
from cotrain.training.preconditions import fits, other_sampling, refuse_rounded, server, timed, timed_by
from inference.drafts.draft_folder import Metadata
from inference.measure.environment import environment
from inference.measure.timing import FEW
from inference.models.quantisation import refuse_quantisation
from inference.report import replay
from inference.report.table import headline, table

Further = Callable[[measurement.Plan, Path], dict[str, Any]]


def _plan_line(metadata: Metadata) -> str:
    """Return a line for the user that names the folder's plan, a draft length or a tree, for a measurement that follows
    this plan, and says how to choose again."""
    return (
        f"bench: measures {shape(metadata)} with verify={metadata.rule}, as the folder says; to choose again, "
        "set bench.depths=[2,4,8], bench.trees=16 or verify="
    )


def _planned(cfg: BenchConfig, metadata: Metadata | None, typed: str | None) -> int | None:
    """Return the draft length of the folder's plan, if this length or the planned tree is to be measured. Otherwise
    return None: the folder has no plan, or the user set bench.depths, bench.trees or another rule. The fastest length
    of bench.depths is then chosen.

    typed: the value of verify= that the user gave, or None. If bench.depths is empty, it is set to `DEPTHS` in place.
    The planned length is added to it.
    """
    size, chosen = cfg.bench, not cfg.bench.depths and not cfg.bench.trees
    size.depths = size.depths or [*DEPTHS]
    if metadata is None or not chosen or metadata.origin.get("planned") is False:
        return None
    if typed not in (None, metadata.rule):
        return None
    size.depths = sorted({*size.depths, metadata.k})
    return metadata.k


def run(cfg: BenchConfig, further: Further | None = None) -> None:
    """Measure, write report.json and the page to `output`, and print the report.

    further: a function that measures more. Its arguments are the plan without a tree, and the output folder. The
    dictionary that it returns is added to the report's `extra`.
    """
    if cfg.draft.path is None:
        raise UserError(
            "draft.path=null: set draft.path= to a draft folder, for example draft.path=outputs/train/draft"
        )
    settle(cfg.threads, cfg.bench.seed)
    with answering(cfg.as_json) as answer:
        if cfg.url or cfg.url_draft:
            report, lines = _servers(cfg, cfg.draft.path)
            answer(report, "\n".join(lines))
            return
        report = _measured(cfg, cfg.draft.path, further)
        page = written(Path(cfg.output))
        answer(report | {"verdict": headline(report), "page": str(page)}, f"{table(report)}\npage: {page}")


def _servers(cfg: BenchConfig, draft_path: str) -> tuple[dict[str, Any], list[str]]:
    """Measure the servers url= and url_draft= on the prompts of the draft folder, and write report.json. Return the
    report, and lines for the user."""
    if not (cfg.url and cfg.url_draft):
        raise UserError("url=, url_draft=: set both, to a server of the target without a draft and one with the draft")
    if cfg.url == cfg.url_draft:
        raise UserError(f"url_draft={cfg.url_draft}: it is url=; start a second server, with the draft")
    if cfg.verify or cfg.bench.depths or cfg.bench.trees:
        raise UserError("verify=, bench.depths=, bench.trees=: the servers decide these: leave them out")
    size, open_tokens = cfg.bench, not cfg.bench.prompt_tokens
    refuse_folder(cfg.output, cfg.overwrite)
    pair = refuse_pair(draft_path, resolved(cfg), cfg.target.trust_remote_code)
    regime = sampling(cfg.regime)
    plain, drafted = server("url", cfg.url, regime), server("url_draft", cfg.url_draft, regime)
    room = room_of(pair) - timed(size) if open_tokens else None
    given = prompts(cfg.data, size, pair.target, pair.tokenizer, room, Path(draft_path))
    if (FEW - 1) * max(cfg.concurrent) >= (count := min(size.prompts, len(given.final))):
        raise UserError(
            f"concurrent={cfg.concurrent}: {count} prompts are fewer than {FEW} batches of {max(cfg.concurrent)}, so "
            "there would be no interval: raise bench.prompts=, give more prompts with data.path=, or lower concurrent="
        )
    with claim(cfg.output, cfg.overwrite, command="bench") as folder, user_errors():
        cells = servers.measured(
            plain,
            drafted,
            given.final[: size.prompts],
            regime,
            size.new_tokens,
            cfg.concurrent,
            servers.trained_for(Path(draft_path).parent, cfg.regime.model_dump()),
            size.seed,
        )
        report = {
            "environment": environment(),
            "url": cfg.url,
            "url_draft": cfg.url_draft,
            "draft": draft_path,
            "cells": [cell.report() for cell in cells],
        }
        write_answer(folder.path / "report.json", report)
        folder.finish()
    return report, [cell.line() for cell in cells]


def _measured(cfg: BenchConfig, draft_path: str, further: Further | None) -> dict[str, Any]:
    """Measure the draft, write report.json and the replay, and return the report. draft_path: the draft folder.
    further: a function from the plan without a tree and the output folder to more entries of the report's `extra`; None
    for none."""
    typed, size, open_tokens = cfg.verify, cfg.bench, not cfg.bench.prompt_tokens
    path = resolved(cfg)
    draft_folder = measurable_folder(draft_path)
    metadata = draft_folder.metadata
    planned = _planned(cfg, metadata, typed)
    refuse_folder(cfg.output, cfg.overwrite)
    pair = refuse_pair(draft_path, path, cfg.target.trust_remote_code)
    # refused before weights are loaded: a target in other bits, and texts that are longer than a context
    refuse_rounded(draft_folder.kind, cfg.quantisation.kind, pair.target)
    fits("bench.prompt_tokens", size.prompt_tokens, timed_by(size), timed(size), room_of(pair), start_of(pair.target))
    refuse_quantisation(path, cfg.quantisation.kind, pair.target.config)
    for line in other_sampling(cfg.regime, pair.target) if metadata is None else ():
        print(f"bench: measures {line}")
    room = room_of(pair) - timed(size) if open_tokens else None
    given = prompts(cfg.data, size, pair.target, pair.tokenizer, room, draft_folder.path)
    plan = plan_of(
        cfg,
        draft_folder,
        models(cfg),
        size,
        cfg.verify,
        given=given,
        planned=planned,
        adapter=cfg.target.adapter,
        tree=metadata.tree if metadata else None,
    )
    with claim(cfg.output, cfg.overwrite, command="bench") as folder:
        if metadata and planned:
            print(_plan_line(metadata))
        report = measurement.measure(plan)
        if further:
            report["extra"] |= further(replace(plan, tree=None, planned=None), folder.path)
        write_answer(folder.path / "report.json", report)
        replay.write_replay(recorded(plan, report["extra"]), folder.path / replay.FILE)
        folder.finish()
    return report
