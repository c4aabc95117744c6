"""What a run's folder holds for its page, and every number with the place it comes from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cotrain.board import tags
from cotrain.errors import UserError
from cotrain.evaluation.comparison import FIGURES
from cotrain.page import event_curves
from cotrain.run_folder import MARKER
from inference.report.build import validate
from inference.report.replay import FILE as REPLAY
from inference.report.replay import validate as validate_replay

REPORT = "report.json"


@dataclass(frozen=True)
class Number:
    """A value (None: not known), and where it stands: run and JSON pointer (RFC 6901) into `Run.documents`; times /
    over, another pointer, are what it is multiplied and divided by. source "": computed by the page."""

    value: float | None
    run: int = 0
    source: str = ""
    over: str = ""
    times: float = 1.0

    @property
    def shown(self) -> float | None:
        return self.value


@dataclass(frozen=True)
class Run:
    """A loaded folder. documents: `report` (report.json), `held_out` (held_out.json), `run` (run.json), `replay`
    (replay.json), each None where it is not there; curves by TensorBoard tag; number: its place on the page."""

    number: int
    path: Path
    documents: Mapping[str, Any]
    curves: Mapping[str, event_curves.Curve]

    @property
    def report(self) -> dict[str, Any] | None:
        return self.documents["report"]

    @property
    def partial(self) -> bool:
        """Whether the run has not come to its end: it was stopped, or goes on."""
        marker = self.documents["run"]
        return marker is not None and marker["state"] != "finished"

    @property
    def greedy(self) -> bool:
        """Whether its draft drafts its likeliest tokens, which are accepted with p(argmax q)."""
        return self.get("run", "settings", "objective") == "greedy_draft"

    @property
    def alpha(self) -> str:
        """What held-out figures call acceptance as it drafts."""
        return "alpha_greedy_draft" if self.greedy else "alpha"

    @cached_property
    def name(self) -> str:
        return self.path.name if self.path.name not in ("draft", REPORT) else self.path.parent.name

    @property
    def temperature(self) -> float:
        """Of the regime that was served, or is to be."""
        found = self.get("report", "settings", "sampling", "temperature")
        found = self.get("run", "settings", "regime", "temperature") if found is None else found
        return 1.0 if found is None else float(found)

    @property
    def tree(self) -> list[int] | None:
        """Parents of the nodes of the tree that was timed; None: chains."""
        found: list[int] | None = self.get("report", "extra", "planned_shape")
        return found

    @property
    def k(self) -> int | None:
        """The draft length that was planned, or that the timed policy had; None where trees were timed."""
        if self.tree:
            return None
        planned = self.get("report", "extra", "planned_k")
        policy = str(self.get("report", "settings", "policy") or "")
        digits = policy.removeprefix("Fixed(k=").removesuffix(")")
        return planned if planned is not None else int(digits) if digits.isdigit() else None

    def get(self, *path: str | int) -> Any:
        """What stands at a path of keys and places, None where there is nothing."""
        found: Any = self.documents
        for key in path:
            fits = isinstance(found, Mapping) or (isinstance(found, list) and isinstance(key, int) and key < len(found))
            found = (found.get(key) if isinstance(found, Mapping) else found[key]) if fits else None
        return found

    def at(self, *path: str | int, over: Sequence[str | int] = (), times: float = 1.0) -> Number:
        """The number at a path; with over or times, value * times / the number at `over`."""
        value = self.get(*path)
        divisor = self.get(*over) if over else 1.0
        known = isinstance(value, int | float) and isinstance(divisor, int | float) and divisor
        return Number(value * times / divisor if known else None, self.number, pointer(path), pointer(over), times)

    def all(self, *path: str | int) -> list[Number]:
        """The numbers of a list, or of a dict in its order."""
        found = self.get(*path) or []
        return [self.at(*path, key) for key in (found if isinstance(found, Mapping) else range(len(found)))]


def pointer(path: Sequence[str | int]) -> str:
    """JSON pointer of a path."""
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)


def load(paths: Sequence[str]) -> list[Run]:
    """The runs at these folders, or files named report.json.

    Raises UserError for none, for one that is not there, holds nothing of a run, or holds a report that cannot be read.
    """
    if not paths:
        raise UserError("name the folder of a run with run=, as in run=outputs/demo")
    runs = [_load(number, Path(path)) for number, path in enumerate(paths)]
    same = [run.path for run in runs if sum(run.path.resolve() == other.path.resolve() for other in runs) > 1]
    if same:
        raise UserError(f"run={same[0]} is named twice: name each run once")
    return runs


def _load(number: int, path: Path) -> Run:
    if not path.exists():
        raise UserError(f"run={path} is not there: name the folder that output= of cotrain train or bench named")
    place = path if path.is_dir() else path.parent
    report = _report(path if path.is_file() else next(filter(Path.is_file, (place / "draft" / REPORT, place / REPORT)), None))  # fmt: skip # noqa: E501
    marker, figures = (_json(place / name, name) for name in (MARKER, FIGURES))
    curves = event_curves.read(place / tags.CURVES)
    if path.is_file():
        marker, figures, curves = None, None, {}
    elif report is None and marker is None and figures is None and not curves:
        raise UserError(f"run={path} holds no {REPORT}, {MARKER} or {FIGURES}: name a folder that output= of cotrain "
                        "train or bench named")  # fmt: skip
    documents = {"report": report, "held_out": figures, "run": marker, "replay": _replay(place)}
    return Run(number, path, documents, curves)


def _report(file: Path | None) -> dict[str, Any] | None:
    found = None if file is None else _json(file, str(file))
    if found is None:
        return None
    if found.get("synthetic"):
        raise UserError(f"run={file} is of made-up weights (synthetic=): it has costs, but no acceptance to show")
    try:
        validate(found)
    except ValueError as error:
        raise UserError(f"run={file} is no report of this version: {error}; measure the draft anew with cotrain bench") from error  # fmt: skip # noqa: E501
    return found


def _replay(place: Path) -> dict[str, Any] | None:
    file = next(filter(Path.is_file, (place / REPLAY, place / "draft" / REPLAY)), None)
    found = None if file is None else _json(file, str(file))
    if found is not None:
        try:
            validate_replay(found)
        except ValueError as error:
            raise UserError(f"{file} is no replay of this version: {error}; delete it, or record it anew") from error
    return found


def _json(file: Path, name: str) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no JSON object: name a run of cotrain")
    return found
