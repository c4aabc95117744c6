"""Command `cotrain train`. It distils a draft, measures it, and writes its folder and page."""

import math
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

from cotrain.board import tags
from cotrain.config.changes import change
from cotrain.config.settings import TrainConfig
from cotrain.errors import UserError
from cotrain.evaluation.comparison import FIGURES, RunFigures, compare, gains_table, left_out, read_runs
from cotrain.page.html_page import written
from cotrain.ranks import rank
from cotrain.run_folder import claim, finished, read_marker, refuse_folder, resumable
from cotrain.training import joint
from cotrain.training.deadline import Deadline
from cotrain.training.interrupts import listening
from cotrain.training.overfit import overfit
from cotrain.training.preconditions import RunOutline, require
from cotrain.training.preflight import check_resources
from cotrain.training.run import train
from inference.drafts.compatibility import hash_weights
from inference.drafts.draft_folder import REPORT
from inference.drafts.draft_folder import read as read_draft
from inference.drafts.weight_files import read_json, weight_files
from inference.proposers import kind_of
from inference.report.table import comparison, table


@listening()  # between the stages of a joint run, and while the page is written, too
def run(cfg: TrainConfig) -> float | None:
    """Distil into `output` and print the table of the report. A finished run is not repeated: only its table is
    printed. With check=true, only print what the run needs; with overfit=true, only whether the draft learns.

    Returns the tau of the last step, which may not be the exported checkpoint: predicted on held-out texts, at policy.k
    and the sampling settings of `regime`. For a draft that is not trained, returns the measured tau, NaN if it was not
    measured. Returns None with check=true or overfit=true, and in all processes except the first. Raises UserError if
    the run cannot be started or resumed, and with overfit=true if the draft does not learn.
    """
    if rank() and (cfg.overfit or cfg.check):
        return None
    if cfg.overfit:
        print(overfit(cfg))
        return None
    _go_on(cfg)
    settings = cfg.model_dump(exclude={"overwrite", "check", "overfit", "output"})
    settings["target"]["weights"] = hash_weights(cfg.target.path, cfg.target.adapter)
    if cfg.overwrite and resumable(cfg.output, settings):  # the same command, after it was interrupted
        cfg.overwrite = False
        if not rank():
            print(
                f"output={cfg.output} has an unfinished run of the same settings, which is resumed; to start again, "
                "delete the folder"
            )
    deadline, work = Deadline(cfg.minutes, time.monotonic()), joint.joint if cfg.mode == "joint" else train
    if rank():  # the first process locks and marks the folder
        if cfg.overwrite or not finished(cfg.output) or _damage(cfg):
            # it stops where the first one does: in a collective it would wait for it, deaf to the launcher's signals
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                sources = _checked(cfg).sources
            work(cfg, Path(cfg.output), deadline, sources)
        return None
    kinds = partial(change, draft=type(cfg.draft))
    state = refuse_folder(cfg.output, cfg.overwrite, settings, kinds)
    damage = _damage(cfg) if state == "finished" else ""
    done = state == "finished" and not damage and not cfg.check
    known = None if done else _checked(cfg)  # fails before `claim` moves a run
    if cfg.check and known:
        print("\n".join(check_resources(cfg, known)))
        return None
    with claim(cfg.output, cfg.overwrite, settings, kinds) as folder:
        if folder.state != "finished" or damage:
            if damage:
                print(f"{damage}: the draft is written again, from the checkpoint of the training")
            work(cfg, folder.path, deadline, known.sources if known else None)
            folder.finish()
        elif late := [key for key in folder.changed if key != "measure"]:
            print(
                f"output={cfg.output} is finished, so the new {', '.join(late)} had no effect: measure its draft "
                "again with cotrain bench, or continue the training with more trainer.steps="
            )
        else:
            print(f"output={cfg.output} was finished before; overwrite=true repeats it")
    draft = folder.path / "draft"
    if cfg.measure or (draft / REPORT).exists():
        print(table(read_json(draft / REPORT)))
        print(f"draft: {draft}")
    else:
        how = "serve it, and use cotrain bench url=" if cfg.teacher.urls else f"cotrain bench draft.path={draft}"
        how += " target.device_map=auto" * bool(cfg.target.device_map)
        print(f"draft: {draft} (not measured): to measure it, {how}")
    print(f"page: {written(folder.path)}\ncurves: tensorboard --logdir {folder.path / tags.CURVES}")
    return float(read_json(folder.path / FIGURES).get("tau", math.nan))


def _checked(cfg: TrainConfig) -> RunOutline:
    known = require(cfg)
    if cfg.mode == "joint":
        joint.refuse_joint(cfg, known)
    return known


def _damage(cfg: TrainConfig) -> str:
    """Return what is wrong with the draft folder of a finished run; "" if nothing is. Raises UserError if the folder is
    damaged and no checkpoint is left from which the draft could be written again."""
    draft = Path(cfg.output) / "draft"
    try:
        stored = read_draft(draft)
        if kind_of(stored.kind).network_class:
            weight_files(draft)
        if not (stored.metadata and stored.metadata.report) or (draft / REPORT).is_file():
            return ""
        damage = f"{draft / REPORT} is missing"
    except (OSError, ValueError) as error:
        damage = str(error)
    if cfg.draft.trained and not any(Path(cfg.output).rglob("last.ckpt")):
        raise UserError(
            f"output={cfg.output} was finished, but {damage}, and no checkpoint is left to write the draft "
            "again: overwrite=true trains it again"
        )
    return damage


def _go_on(cfg: TrainConfig) -> None:
    """If data.chat is null, set it, in place, to the value that the run in `output` was started with. An earlier
    version may have had another default."""
    marker = None if cfg.overwrite else read_marker(Path(cfg.output))
    if marker and marker.get("command") == "train" and cfg.data.chat is None:
        cfg.data.chat = marker["settings"].get("data", {}).get("chat")


def swept(outputs: list[str]) -> None:
    """Print two tables after a sweep: the measured speeds, and the held-out figures. In the second, each run is
    compared with the first one, at the temperatures that both have. outputs: the folders of the runs."""
    reports = {Path(output).name: file for output in outputs if (file := Path(output) / "draft" / REPORT).exists()}
    if len(reports) > 1:
        print(comparison({name: read_json(file) for name, file in reports.items()}))
    runs: dict[str, list[RunFigures]] = {}
    for output in outputs:
        if (Path(output) / FIGURES).exists():
            for label, report in read_runs(Path(output)).items():
                runs.setdefault(label, []).extend(report)
    if len(runs) < 2:
        return
    baseline = next(iter(runs))
    print(gains_table(compare(runs, baseline), baseline, left_out(runs, baseline)))
