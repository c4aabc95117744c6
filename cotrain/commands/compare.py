"""`cotrain compare`: paired intervals between the runs below a folder."""

import json
from dataclasses import asdict
from pathlib import Path

from cotrain.compare import compare, read, table
from cotrain.config import CompareConfig
from cotrain.folders import writable
from inference.atomic import write_atomic
from inference.report import environment


def run(cfg: CompareConfig) -> None:
    """Print the table; with `report=`, keep it with all figures as JSON."""
    if cfg.report:
        writable("report", cfg.report)
    gains = compare(read(Path(cfg.folder)), cfg.baseline)
    print(table(gains, cfg.baseline))
    if cfg.report:
        found = {"environment": environment(), "baseline": cfg.baseline, "gains": [asdict(gain) for gain in gains]}
        write_atomic(Path(cfg.report), json.dumps(found, indent=2) + "\n")
