"""Command `cotrain bench`. It measures a draft folder against plain decoding on the same engine."""

import copy
import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from cotrain.bench import measurement, quantisation_table
from cotrain.bench.matrix import Grid, matrix
from cotrain.bench.measurement import recorded
from cotrain.commands.served_pair import Pair, measured, plan_of, prompts, refuse_pair, resolved, room_of, shape
from cotrain.config.settings import BenchConfig
from cotrain.console import answering, strict
from cotrain.errors import UserError
from cotrain.page.html_page import written
from cotrain.rollout.training_texts import start_of
from cotrain.run_folder import claim, refuse
from cotrain.students import quantised
from cotrain.students.base import DEFAULT
from cotrain.training.job import models, settle
from cotrain.training.preconditions import fits, refuse_rounded, timed
from inference.drafts.atomic import write_atomic
from inference.drafts.bundled_target import resolve
from inference.drafts.draft_folder import Metadata
from inference.models.quantisation import refuse_quantisation
from inference.report import replay
from inference.report.table import headline, table

DEPTHS = [2, 3, 4, 5, 6, 7, 8]  # draft lengths to choose from, if the plan of the folder is not measured


def _refuse_matrix(cfg: BenchConfig, kind: str, pair: Pair) -> None:
    """Raise UserError, naming the key, for a matrix that cannot be measured. It is called before any measurement."""
    asked, regime = cfg.matrix, cfg.regime
    if asked.vllm and kind != DEFAULT:
        raise UserError(
            f"matrix.vllm: vLLM is measured with {DEFAULT} drafts only, and draft.path={cfg.draft.path} is {kind}"
        )
    if asked.vllm and cfg.target.adapter:
        raise UserError("matrix.vllm: vLLM would ignore target.adapter=; merge the adapter into a target folder first")
    if asked.vllm and (regime.top_k or regime.top_p != 1):
        raise UserError("matrix.vllm: vLLM is measured without top-k and top-p: set regime.top_k=0 regime.top_p=1")
    if asked.vllm and shutil.which(asked.vllm) is None:
        raise UserError(
            f"matrix.vllm={asked.vllm} is not a Python interpreter: name the interpreter of a vLLM installation"
        )
    if wrong := sorted(set(asked.drafts) - set(quantised.QUANTISATIONS)):
        raise UserError(f"matrix.drafts: {wrong[0]!r} is not one of {', '.join(quantised.QUANTISATIONS)}")
    if asked.targets and "nf4" in asked.drafts and find_spec("bitsandbytes") is None:
        raise UserError("matrix.drafts: nf4 needs bitsandbytes: pip install bitsandbytes, or matrix.drafts=[none,int8]")
    if asked.targets and {*asked.drafts} - {"none"} and pair.draft is not None:
        quantised.refuse_unknown(pair.draft, "matrix.drafts")
    for bits in asked.targets:
        try:
            refuse_quantisation(str(cfg.target.path), bits, pair.target.config)
        except ValueError as error:
            raise UserError(f"matrix.targets: {error}") from error


def _grid(cfg: BenchConfig, logs: Path) -> Grid:
    asked = cfg.matrix
    servers = None if asked.vllm is None else (asked.vllm, resolve(str(cfg.target.path)), str(cfg.draft.path))
    return Grid(asked.temperatures, asked.batches, asked.k, servers, logs)


def _refuse(cfg: BenchConfig, kind: str, pair: Pair) -> None:
    """Raise UserError or ValueError if texts are longer than the context of either model, or if the target does not
    support its quantisation setting. It is called before weights are loaded."""
    for bits in (cfg.quantisation.kind, *cfg.matrix.targets):
        refuse_rounded(kind, bits, pair.target)
    size = cfg.bench
    fits(
        "bench.prompt_tokens", size.prompt_tokens, "bench.new_tokens", timed(size), room_of(pair), start_of(pair.target)
    )
    refuse_quantisation(str(cfg.target.path), cfg.quantisation.kind, pair.target.config)


def _plan_line(metadata: Metadata) -> str:
    """Return a line that says what is measured, if the folder's plan is measured."""
    return (f"bench: {shape(metadata)} and rule {metadata.rule}, as the folder was planned; to choose anew, set "
            f"bench.depths=[2,4,8], "
            "bench.trees=16 or verify=")  # fmt: skip


def _planned(cfg: BenchConfig, metadata: Metadata | None, typed: str | None) -> int | None:
    """Return the draft length with which the folder was planned, if its length or its tree is to be measured.
    bench.depths is filled in. Return None if the settings name others (bench.depths, bench.trees, or `typed`, another
    rule), or if the folder has no plan. Then the fastest of bench.depths is chosen."""
    size, chosen = cfg.bench, not cfg.bench.depths and not cfg.bench.trees
    size.depths = list(size.depths) or DEPTHS
    if metadata is None or not chosen:
        return None
    if typed not in (None, metadata.rule):
        return None
    size.depths = sorted({*size.depths, metadata.k})
    return metadata.k


def _bits(cfg: BenchConfig, plan: measurement.Plan) -> list[dict[str, Any]]:
    def load(kind: str) -> PreTrainedModel:
        held = copy.deepcopy(cfg)
        held.quantisation.kind = kind
        return models(held)[0]

    asked, temperatures = cfg.matrix, cfg.matrix.temperatures or [plan.sampling.temperature]
    return quantisation_table.table(plan, load, asked.targets, asked.drafts, temperatures, asked.k)


def _write(folder: Path, report: dict[str, Any]) -> None:
    """Write report.json. NaN, for example the interval of a single batch, becomes null."""
    write_atomic(folder / "report.json", json.dumps(strict(report), indent=2, allow_nan=False) + "\n")


def run(cfg: BenchConfig) -> None:
    """Measure, write report.json and the page to `output`, and print the report."""
    if cfg.draft.path is None:
        raise UserError("name the draft folder with draft.path=")
    settle(cfg.threads, cfg.bench.seed)
    with answering(cfg.as_json) as answer:
        report = _measured(cfg, cfg.draft.path)
        page = written(Path(cfg.output))
        answer(report | {"verdict": headline(report), "page": str(page)}, f"{table(report)}\npage: {page}")


def _measured(cfg: BenchConfig, draft_path: str) -> dict[str, Any]:
    """Measure the draft, write the report and the replay, and return the report."""
    typed, open_tokens = cfg.verify, not cfg.bench.prompt_tokens
    path = resolved(cfg)
    draft_folder = measured(draft_path)
    planned = _planned(cfg, draft_folder.metadata, typed)
    measurement.refuse(cfg.bench)
    refuse(cfg.output, cfg.overwrite)
    pair = refuse_pair(draft_path, path, cfg.target.trust_remote_code)
    _refuse(cfg, draft_folder.kind, pair)
    _refuse_matrix(cfg, draft_folder.kind, pair)
    room = room_of(pair) - timed(cfg.bench) if open_tokens else None
    given = prompts(cfg.data, cfg.bench, pair.target, pair.tokenizer, room, draft_folder.path)
    metadata = draft_folder.metadata
    plan = plan_of(
        cfg, draft_folder, models(cfg), cfg.bench, cfg.verify, given=given, planned=planned, adapter=cfg.target.adapter,
        tree=metadata.tree if metadata else None,
    )  # fmt: skip
    with claim(cfg.output, cfg.overwrite, command="bench") as folder:
        if metadata and planned:
            print(_plan_line(metadata))
        report = measurement.measure(plan)
        chains = replace(plan, tree=None, planned=None)
        if cfg.matrix.targets:
            report["extra"]["bits"] = _bits(cfg, chains)
        elif cfg.matrix.temperatures:
            report["extra"]["matrix"] = matrix(chains, _grid(cfg, folder.path))
        _write(folder.path, report)
        replay.write(recorded(plan, report["extra"]), folder.path / replay.FILE)
        folder.finish()
    return report
