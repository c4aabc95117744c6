"""The data of a report. It is a plain dict that can be written as JSON.

`SCHEMA` is the whole format. A report has

    format        1
    environment   the machine, versions, date, commit and command, see `environment`
    settings      target, draft, proposer, verify, policy, rows, prompts, max_new_tokens, repeats, sampling,
                  dtypes of the models
    arms          each timed arm: tokens, seconds and tokens per second, with prefill and decode only; tau;
                  rounds; seconds by phase; None for figures that an arm does not count
    speedup       of arm `of` over arm `over`: value and 95 % interval, with prefill and decode only
    acceptance    tau measured and predicted; by depth: counts, prefix and conditional acceptance, measured
                  and predicted; None without a prediction, or for an arm that counts nothing
    exactness     figures and lines of the verdict (`inference.exactness.verdict`), None if it was not checked
    extra         further entries of the caller, by name

Seconds are wall seconds. NaN and infinity become None.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inference.drafts.atomic import write_atomic
from inference.engine import Engine
from inference.exactness.verdict import Verdict
from inference.measure.environment import environment
from inference.measure.timing import Timing
from inference.report.schema import Many, Maybe, conform, strict
from inference.sampling import Sampling

FORMAT = 1
Report = dict[str, Any]

_INTERVAL = {"value": float, "low": Maybe(float), "high": Maybe(float)}
_BY_DEPTH = {"measured": [Maybe(float)], "predicted": Maybe([Maybe(float)])}
SCHEMA: dict[str, Any] = {
    "format": int,
    "environment": {
        "cpu": str,
        "cores": int,
        "threads": int,
        "memory_gib": Maybe(float),
        "accelerator": Maybe(str),
        "python": str,
        "torch": str,
        "transformers": str,
        "date": str,
        "commit": Maybe(str),
        "dirty": Maybe(bool),
        "command": str,
    },
    "settings": {
        "target": str,
        "draft": Maybe(str),
        "proposer": Maybe(str),
        "verify": str,
        "policy": str,
        "rows": int,
        "prompts": int,
        "max_new_tokens": int,
        "repeats": int,
        "target_dtype": str,
        "draft_dtype": Maybe(str),
        "sampling": Many(object),
    },
    "arms": Many(
        {
            "tokens": int,
            "seconds": float,
            "speed": float,
            "decode_tokens": int,
            "decode_seconds": float,
            "decode_speed": float,
            "tau": Maybe(float),
            "target_calls": Maybe(int),
            "rounds": Maybe(int),
            "phases": Maybe(Many(float)),
        }
    ),
    "speedup": Maybe({"of": str, "over": str, "whole": _INTERVAL, "decode": _INTERVAL}),
    "acceptance": Maybe(
        {
            "tau": {"measured": float, "predicted": Maybe(float)},
            "drafted": [int],
            "accepted": [int],
            "prefix": _BY_DEPTH,
            "conditional": _BY_DEPTH,
        }
    ),
    "exactness": Maybe({"passed": bool, "lines": [str], "figures": Many(object)}),
    "extra": Many(object),
}


def validate(report: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first key of a report that is missing, unknown or not of the type in `SCHEMA`, and
    for another format version."""
    conform(report, SCHEMA, "report")
    if report["format"] != FORMAT:
        raise ValueError(
            f"report.format is {report['format']}, but this version of cotrain reads {FORMAT}: measure again with this "
            "version, or use the version that wrote it"
        )


def write(report: Mapping[str, Any], path: str | Path) -> None:
    """Check that the report fits `SCHEMA`, then write it as JSON atomically. Raises ValueError naming the first wrong
    key, and OSError if the file cannot be written."""
    validate(report)
    write_atomic(Path(path), json.dumps(report, indent=2, allow_nan=False) + "\n")


def build(
    timing: Timing,
    engine: Engine,
    arm: str,
    over: str,
    *,
    sampling: Sampling,
    max_new_tokens: int,
    target: str,
    draft: str | None = None,
    verdict: Verdict | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Report:
    """Return the report of a timed run in which `engine` was the arm named `arm`, compared with the arm named `over`.

    sampling, max_new_tokens: the settings and the limit of the run. target, draft: names to print; None for no draft.
    verdict: the result of the exactness checks, None if exactness was not checked. extra: further entries, by name.
    timing: of both arms. Raises ValueError for names of arms that were not timed.
    """
    values = {
        "format": FORMAT,
        "environment": environment(),
        "settings": {
            "target": target,
            "draft": draft,
            **_of_engine(engine),
            "prompts": sum(len(prompts) for prompts, _ in timing.batches),
            "max_new_tokens": max_new_tokens,
            "repeats": len(timing.runs[0]),
            "sampling": vars(sampling),
        },
        "arms": {name: _arm(timing, name) for name in timing.arms},
        "speedup": {
            "of": arm,
            "over": over,
            "whole": timing.ratio(arm, over)._asdict(),
            "decode": timing.ratio(arm, over, decode=True)._asdict(),
        },
        "acceptance": _acceptance(timing, arm, verdict),
        "exactness": (
            {"passed": verdict.passed, "lines": verdict.lines(), "figures": verdict.figures} if verdict else None
        ),
        "extra": dict(extra or {}),
    }
    report = json.loads(json.dumps(strict(values), default=str))
    validate(report)
    return report


def _of_engine(engine: Engine) -> dict[str, Any]:
    proposer = engine.proposer
    return {
        "proposer": type(proposer).__name__ if proposer else None,
        "verify": engine.rule.name,
        "policy": repr(engine.policy),
        "rows": engine.rows,
        "target_dtype": engine.target.weights,
        "draft_dtype": proposer.weights if proposer else None,
    }


def _arm(timing: Timing, name: str) -> dict[str, Any]:
    whole, decode = (
        [sum(part) for part in zip(*(r.paid(only) for r in timing.results(name)), strict=True)]
        for only in (False, True)
    )
    stats = timing.stats(name)
    rounds = stats.times["target"] if stats else 0
    return {
        "tokens": whole[0],
        "seconds": whole[1],
        "speed": timing.speed(name),
        "decode_tokens": decode[0],
        "decode_seconds": decode[1],
        "decode_speed": timing.speed(name, decode=True),
        "tau": stats.tau if stats else None,
        "target_calls": stats.target_calls if stats else None,
        "rounds": rounds or None,
        "phases": dict(stats.seconds) if stats and rounds else None,
    }


def _acceptance(timing: Timing, arm: str, verdict: Verdict | None) -> dict[str, Any] | None:
    stats = timing.stats(arm)
    if stats is None or not stats.target_calls:
        return None
    calls = verdict.calls if verdict else None
    return {
        "tau": {"measured": stats.tau, "predicted": calls.tau if calls else None},
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "prefix": {"measured": stats.prefix, "predicted": calls.prefix if calls else None},
        "conditional": {"measured": stats.conditional, "predicted": calls.conditional if calls else None},
    }
