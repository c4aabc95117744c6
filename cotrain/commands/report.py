"""Command `cotrain report`. It writes the page of one run, or of several side by side."""

from pathlib import Path

from cotrain.config.settings import ReportConfig
from cotrain.page.html_page import PAGE, refuse_path, write_page
from cotrain.page.loaded_run import load_runs
from cotrain.run_folder import writable


def run(cfg: ReportConfig) -> None:
    """Write the page and print its path."""
    runs = load_runs(cfg.run)
    first = runs[0].path
    path = Path(cfg.page) if cfg.page else (first if first.is_dir() else first.parent) / PAGE
    refuse_path(path)
    writable("page", path)
    write_page(runs, path)
    for one in runs:
        print(f"{one.path}: the run is not finished, so the page is marked as partial") if one.partial else None
    print(f"page: {path}")
