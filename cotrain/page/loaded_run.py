"""The content of a run's folder for the page: reports, training curves, and numbers with their source."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cotrain.board import tags
from cotrain.errors import UserError
from cotrain.evaluation.comparison import FIGURES, read_figures
from cotrain.run_folder import MARKER, read_marker
from inference.drafts.draft_folder import read
from inference.report.build import validate
from inference.report.replay import FILE as REPLAY
from inference.report.replay import validate_replay

REPORT = "report.json"
Curve = list[tuple[int, float]]  # (step, value), steps ascending
MOST = 400  # most points of a curve that are drawn


@dataclass(frozen=True)
class Number:
    """A number on the page with its source. The value is the number at `source`, multiplied by `times` and divided by
    the number at `over`.

    Args:
        value: None if it is not known.
        run: the run's position on the page (0-based).
        source: a JSON pointer (RFC 6901) into `LoadedRun.documents`, or "" if the page computed the value.
        over: a JSON pointer to the divisor, or "" without one.
    """

    value: float | None
    run: int = 0
    source: str = ""
    over: str = ""
    times: float = 1.0


@dataclass(frozen=True)
class LoadedRun:
    """The content of a run's folder.

    Args:
        number: the run's position on the page (0-based).
        path: the run's folder, or its report.json.
        documents: `report` (report.json), `held_out` (held_out.json), `run` (run.json) and `replay` (replay.json); None
            for a missing file.
        curves: training curves, keyed by TensorBoard tag.
    """

    number: int
    path: Path
    documents: Mapping[str, Any]
    curves: Mapping[str, Curve]

    @property
    def report(self) -> dict[str, Any] | None:
        return self.documents["report"]

    @property
    def partial(self) -> bool:
        """Return whether the run is not finished: it was stopped, or it is still running."""
        marker = self.documents["run"]
        return marker is not None and marker["state"] != "finished"

    @property
    def greedy(self) -> bool:
        """Return whether the draft drafts its most probable tokens. Their acceptance is p(argmax q)."""
        return self.get("run", "settings", "objective") == "greedy_draft"

    @property
    def alpha(self) -> str:
        """Return the name of the run's acceptance among the held-out figures."""
        return "alpha_greedy_draft" if self.greedy else "alpha"

    @cached_property
    def name(self) -> str:
        return self.path.name if self.path.name not in ("draft", REPORT) else self.path.parent.name

    @property
    def temperature(self) -> float:
        """Return the temperature at which the run was measured or, if it was not measured, the temperature of its
        settings."""
        value = self.get("report", "settings", "sampling", "temperature")
        value = self.get("run", "settings", "regime", "temperature") if value is None else value
        return 1.0 if value is None else float(value)

    @property
    def tree(self) -> list[int] | None:
        """Return the timed tree as a list with the parent of each node, or None if chains were timed."""
        return self.get("report", "extra", "planned_shape")

    @property
    def k(self) -> int | None:
        """Return the planned draft length or, without a plan, the draft length that was timed. Return None if trees
        were timed, or if neither is known."""
        if self.tree:
            return None
        planned = self.get("report", "extra", "planned_k")
        policy = str(self.get("report", "settings", "policy") or "")
        digits = policy.removeprefix("Fixed(k=").removesuffix(")")
        return planned if planned is not None else int(digits) if digits.isdigit() else None

    def get(self, *path: str | int) -> Any:
        """Return the value in `documents` at a path of keys and indices, the first of which names the document. Return
        None if there is no such value."""
        value: Any = self.documents
        try:
            for key in path:
                value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
        return value

    def at(self, *path: str | int, over: Sequence[str | int] = (), times: float = 1.0) -> Number:
        """Return the number in `documents` at `path`, multiplied by `times` and divided by the number at the path
        `over` (() for no divisor). The number's value is None if one of them is missing."""
        value = self.get(*path)
        divisor = self.get(*over) if over else 1.0
        known = isinstance(value, int | float) and isinstance(divisor, int | float) and divisor
        return Number(value * times / divisor if known else None, self.number, pointer(path), pointer(over), times)

    def ends(self, *path: str | int) -> list[Number]:
        """Return three numbers: value, low and high of the interval at `path`."""
        return [self.at(*path, end) for end in ("value", "low", "high")]

    @property
    def held_out(self) -> Mapping[str, float]:
        """Return the report's figures on held-out texts by name; {} without a report."""
        return self.get("report", "extra", "held_out") or {}

    def judged(self, key: str) -> Number:
        """Return the figure on held-out texts with the name `key`."""
        return self.at("report", "extra", "held_out", key)

    def all(self, *path: str | int) -> list[Number]:
        """Return all numbers in the list or dictionary at `path`, in its order; [] if there is none."""
        values = self.get(*path) or []
        return [self.at(*path, key) for key in (values if isinstance(values, Mapping) else range(len(values)))]


def pointer(path: Sequence[str | int]) -> str:
    """Return the JSON pointer for a path of keys and indices."""
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)


def load_runs(paths: Sequence[str]) -> list[LoadedRun]:
    """Load the runs in these folders. A path may also be a report.json.

    Raises UserError for an empty list, a repeated path, a missing path, a folder that has no run, and a report that
    cannot be read.
    """
    if not paths:
        raise UserError("name the folder of a run with run=, as in run=outputs/demo")
    runs = [_load(number, Path(path)) for number, path in enumerate(paths)]
    same = [run.path for run in runs if sum(run.path.resolve() == other.path.resolve() for other in runs) > 1]
    if same:
        raise UserError(f"run={same[0]} is named twice: name each run once")
    return runs


def _load(number: int, path: Path) -> LoadedRun:
    if not path.exists():
        several = (
            "several runs are typed one by one, as in run=a run=b"
            if set("[,") & set(str(path))
            else "name a folder that was output= of cotrain train or bench"
        )
        raise UserError(f"run={path} does not exist: {several}")
    folder = path if path.is_dir() else path.parent
    reports = [path] if path.is_file() else [folder / "draft" / REPORT, folder / REPORT]
    with suppress(OSError, ValueError):  # it may be in no draft folder
        read(next(filter(Path.is_file, reports), folder / REPORT).parent)  # warns if the report was changed
    report = _valid(
        reports,
        validate,
        "run={file} is no report of this version ({error}): measure the draft again with cotrain bench",
    )
    marker = read_marker(folder) if _json(folder / MARKER) else None
    figures = read_figures(folder / FIGURES) if (folder / FIGURES).is_file() else None
    curves = read_curves(folder / tags.CURVES)
    if path.is_file():
        marker, figures, curves = None, None, {}
    elif report is None and marker is None and figures is None and not curves:
        raise UserError(
            f"run={path} has no {REPORT}, {MARKER} or {FIGURES}: name a folder that was output= of "
            "cotrain train or bench"
        )
    replay = _valid(
        [folder / REPLAY, folder / "draft" / REPLAY],
        validate_replay,
        "{file} is no replay of this version ({error}): delete it, or measure the draft again",
    )
    return LoadedRun(number, path, {"report": report, "held_out": figures, "run": marker, "replay": replay}, curves)


def _valid(files: Sequence[Path], check: Callable[[Any], object], wrong: str) -> dict[str, Any] | None:
    """Return the content of the first existing file among `files`, or None if none exists. check: raises ValueError for
    a wrong content. wrong: the message of the UserError that is then raised."""
    file = next(filter(Path.is_file, files), None)
    document = None if file is None else _json(file)
    if document is not None:
        try:
            check(document)
        except ValueError as error:
            raise UserError(wrong.format(file=file, error=error)) from error
    return document


def _json(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error}): restore it, or name another run= folder") from error
    if not isinstance(document, dict):
        raise UserError(f"{file} is no JSON object, so it is not of cotrain: name another run with run=")
    return document


def read_curves(folder: Path) -> dict[str, Curve]:
    """Return all finite scalars in the TensorBoard event files, keyed by tag; {} without files. For a step that a
    resumed run repeated, the later value counts. An incomplete record at the end of a file is ignored."""
    files = sorted(folder.rglob("*tfevents*"), key=lambda file: file.name)  # names begin with the time
    if not files:
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars: dict[str, dict[int, float]] = {}
    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            scalars.setdefault(name, {}).update({event.step: event.value for event in events.Scalars(name)})
    return {
        name: [(step, value) for step, value in sorted(values.items()) if math.isfinite(value)]
        for name, values in scalars.items()
    }


def thinned(curve: Curve, most: int = MOST) -> Curve:
    """Return at most `most` points of a curve, evenly spaced, with the last point among them."""
    return curve[::-1][:: max(-(-len(curve) // most), 1)][::-1]
