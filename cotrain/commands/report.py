"""Command `cotrain report`. It writes the page of one run, or of several side by side."""

from pathlib import Path

from cotrain.config.settings import ReportConfig
from cotrain.errors import UserError, first_line
from cotrain.page.html_page import PAGE, refuse_path, write_page
from cotrain.page.loaded_run import load_runs
from cotrain.run_folder import writable


def run(cfg: ReportConfig) -> None:
    """Write the page and print its path. Raises UserError if a file of a run has a value of another type than cotrain
    writes: what is under `extra` in a report has no schema."""
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
