"""What the figures are of: the verdict's lines, the machine, the command, the settings."""

from collections.abc import Sequence
from typing import Any

from cotrain.config.overrides import flat
from cotrain.page.loaded_run import Run
from cotrain.page.markup import Html, joined, table, tag
from cotrain.page.section import Section, by_run


def exactness(runs: Sequence[Run]) -> Section:
    """The verdict as it was printed."""
    lacking = "exactness was not checked in this run: cotrain bench checks it"
    return Section("exactness", "Exactness", by_run(runs, _verdict), lacking)


def _verdict(run: Run) -> Html | None:
    lines = run.get("report", "exactness", "lines")
    return tag("pre", "\n".join([*lines, *_parity(run)])) if lines else None


def _parity(run: Run) -> list[str]:
    line = run.get("report", "extra", "parity", "line")
    return [f"on more tokens: {line}"] if line else []


def origin(runs: Sequence[Run]) -> Section:
    """Machine, versions, date, commit, command and settings of each run."""
    return Section("origin", "Where the figures come from", by_run(runs, _origin), "nothing is known of the machine")


def _origin(run: Run) -> Html | None:
    environment = run.get("report", "environment") or run.get("held_out", "environment") or {}
    made: list[list[object]] = [["folder", str(run.path)], *_rows(environment)]
    said = [tag("p", line, class_="note") for line in run.get("report", "extra", "said") or []]
    if weights := run.get("report", "extra", "target_quantisation"):
        made.append(["the target's weight quantisation", weights])
    parts = [(name, found) for name, path in PARTS if (found := run.get(*path))]
    folded = [tag("details", tag("summary", name), table(["", ""], _rows(found))) for name, found in parts]
    return joined(table(["", ""], made), *said, *folded)


PARTS = (
    ("what was timed", ("report", "settings")),
    ("how the draft was made", ("report", "extra", "training")),
    ("settings of the run", ("run", "settings")),
)


def _rows(values: dict[str, Any]) -> list[list[object]]:
    return [[key, "–" if value is None else str(value)] for key, value in flat(values) if not isinstance(value, dict)]
