"""Command `cotrain report`. It writes the page of one run or several, or prints what an issue needs."""

import platform
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from cotrain import __version__
from cotrain.config.base import Mark, fields, marked
from cotrain.config.settings import SCHEMAS, ReportConfig, flat
from cotrain.errors import UserError, first_line
from cotrain.page.html_page import PAGE, refuse_path, write_page
from cotrain.page.loaded_run import LoadedRun, load_runs
from cotrain.run_folder import UNNAMED, writable
from inference.measure.environment import environment
from inference.report.table import table

PACKAGES = """torch triton transformers tokenizers safetensors accelerate bitsandbytes peft gguf numpy lightning
hydra-core pydantic datasets pyarrow vllm sglang""".split()
HIDDEN = "(hidden)"
PRIVATE = ("data", "label", "model", "shapes")  # groups and settings with unmarked texts of the user


def run(cfg: ReportConfig) -> None:
    """Write the page and print its path. With issue=true, print the text for an issue instead. Raises UserError if a
    file of a run has a value of another type than cotrain writes: what is under `extra` in a report has no schema."""
    if cfg.issue:
        if cfg.page:
            raise UserError(f"page={cfg.page}: issue=true writes no page: leave out one of them")
        print("\n\n".join([installed(), *map(measured, load_runs(cfg.run) if cfg.run else [])]))
        return
    runs = load_runs(cfg.run)
    first = runs[0].path
    path = Path(cfg.page) if cfg.page else (first if first.is_dir() else first.parent) / PAGE
    refuse_path(path)
    writable("page", path)
    try:
        write_page(runs, path)
    except (TypeError, LookupError, AttributeError, ArithmeticError, ValueError) as error:
        raise UserError(
            f"run={','.join(str(one.path) for one in runs)}: a file in it has a value that the page cannot show "
            f"({type(error).__name__}: {first_line(error)}): measure the draft again with cotrain bench "
            "(COTRAIN_TRACEBACK=1 shows where)"
        ) from error
    for one in runs:
        print(f"{one.path}: the run is not finished, so the page is marked as partial") if one.partial else None
    print(f"page: {path}")


def installed() -> str:
    """Return the machine and the versions that matter, for an issue."""
    here, versions = environment(), {one.name: one.version for one in distributions()}
    commit = f"commit {here['commit']}{' with changes' * here['dirty']}" if here["commit"] else "installed"
    return "\n".join(
        [
            f"cotrain {__version__}, {commit}; Python {here['python']}; {platform.platform()}",
            ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions),
            f"{here['cpu']} ({torch.backends.cpu.get_cpu_capability()}), {here['cores']} cores, {here['threads']} "
            f"threads, {here['memory_gib']} GiB; GPU: {here['accelerator'] or 'none'}",
        ]
    )


def measured(run: LoadedRun) -> str:
    """Return a run's state, its settings that differ from the defaults, and its figures, for an issue. Paths, names and
    texts of the user are left out."""
    parts, marker, report = [], run.documents["run"], run.report
    if marker is not None:
        command = marker.get("command", "unknown")
        parts.append(f"run of cotrain {command} {marker['cotrain']}, {marker['state']}")
        other = " ".join(changed(command, marker["settings"])) or "all settings are the defaults"
        parts.append("its settings are not stored: add the command" if command in UNNAMED else other)
    if report is not None:
        extra = {**report["extra"], "moved": None}  # it names the original target
        settings = {**report["settings"], "target": HIDDEN, "draft": HIDDEN}
        parts.append(table({**report, "settings": settings, "extra": extra}).rstrip())
    return "\n\n".join(parts)


def changed(command: str, settings: dict[str, Any]) -> list[str]:
    """Return the settings of a run that differ from the defaults of `command`, as key=value. Values that are paths or
    texts of the user are hidden."""
    schema = SCHEMAS.get(command)
    if schema is None:
        return []
    defaults, keys = dict(flat(schema().model_dump(by_alias=True))), {key for key, _ in fields(schema)}
    groups = {key.rpartition(".")[0] for key in keys}
    private = marked(schema, Mark.PATH, Mark.STORE, Mark.OUTPUT, Mark.TEXT)
    private |= {key for key in keys if key.partition(".")[0] in PRIVATE}
    return [
        f"{key}={HIDDEN if key in private and not isinstance(value, int | float) else value}"
        for key, value in flat(settings)
        if key in keys - groups and value != defaults.get(key)
    ]
