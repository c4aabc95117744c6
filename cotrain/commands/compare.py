"""Command `cotrain compare`. It prints confidence intervals of the paired differences between the runs in a folder."""

from dataclasses import asdict
from pathlib import Path

from cotrain.config.settings import CompareConfig
from cotrain.console import answering, write_answer
from cotrain.errors import UserError
from cotrain.evaluation.comparison import compare, gains_table, left_out, read_runs
from cotrain.run_folder import writable
from inference.measure.environment import environment


def run(cfg: CompareConfig) -> None:
    """Print the table of paired differences. With report=, also write all figures to a JSON file. Raises UserError if
    that file exists and `cotrain compare` did not write it."""
    if cfg.report:
        file = Path(cfg.report)
        if file.is_file() and '"gains"' not in file.read_text(encoding="utf-8", errors="replace"):
            raise UserError(f"report={file} is a file that cotrain compare did not write: name another file")
        writable("report", cfg.report)
    with answering(cfg.as_json) as answer:
        runs = read_runs(Path(cfg.folder))
        baseline = min(runs) if cfg.baseline is None else cfg.baseline
        gains, absent = compare(runs, baseline), left_out(runs, baseline)
        report = {
            "environment": environment(),
            "baseline": baseline,
            "gains": [asdict(gain) for gain in gains],
            "left_out": absent,
        }
        answer(report, gains_table(gains, baseline, absent))
    if cfg.report:
        write_answer(Path(cfg.report), report)
