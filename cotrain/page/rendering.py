"""HTML from the templates in assets/: all text is escaped, and characters that a reader cannot see are made visible.

Texts of models and corpora may hold anything: markup, control characters, marks that turn the direction of writing.
Line breaks and indentation of a template are no part of the page.
"""

import html
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.ext import Extension
from markupsafe import Markup

from cotrain.page.loaded_run import LoadedRun, Number

ASSETS = Path(__file__).resolve().parent / "assets"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def visible(text: str) -> str:
    """Text with control characters as their pictures (U+2400 and on), direction marks and lone surrogates as their
    numbers."""

    def shown(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"

    return _CONTROL.sub(shown, text)


def escaped(value: object) -> Markup:
    """Any value as text of the page, None as none; markup as it is."""
    if isinstance(value, Markup):
        return value
    return Markup("" if value is None else html.escape(visible(str(value))))


def as_json(value: Any) -> Markup:
    """JSON for the page's scripts. No text in it can end its element or begin another: `<` and `&` are \\u003c."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: surrogates and U+2028 are \\u....
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


class _Compact(Extension):
    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return re.sub(r"\s*\n\s*", "", source)


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(ASSETS), autoescape=True, finalize=escaped, undefined=StrictUndefined, extensions=[_Compact]
)
_ENVIRONMENT.filters |= {"json": as_json, "formatted": format, "exact": repr}
_PARTS: Any = _ENVIRONMENT.get_template("parts.html").module


def render(template: str, **values: Any) -> Markup:
    """A template of assets/ with these values."""
    return Markup(_ENVIRONMENT.get_template(template).render(values))


def joined(*parts: object) -> Markup:
    """Markup and texts one after another."""
    return Markup("").join(map(escaped, parts))


def number(value: Number, spec: str = ".3f") -> Markup:
    """A number with its source; a dash if it is not known."""
    return Markup(_PARTS.number(value, spec))


def interval(ends: Sequence[Number], spec: str = ".2f", unit: str = "x") -> Markup:
    """`2.05x [1.70, 2.40]` of value, low and high; without an interval the value alone."""
    return Markup(_PARTS.interval(*ends, spec, unit))


def table(head: Sequence[object], rows: Sequence[Sequence[object]], caption: object = None) -> Markup:
    """A table whose first column names its rows; it scrolls by itself in a narrow window."""
    return Markup(_PARTS.table(head, rows, caption))


@dataclass(frozen=True)
class Section:
    """A part of the page. name: its anchor; body: None if the runs lack its figures; lacking: why, and what would bring
    them."""

    name: str
    title: str
    body: Markup | None
    lacking: str = ""


def by_run(runs: Sequence[LoadedRun], part: Callable[[LoadedRun], Markup | None]) -> Markup | None:
    """A part of each run that has it, under the run's name if there are several runs; None if no run has it."""
    bodies = [(run.name if len(runs) > 1 else None, body) for run in runs if (body := part(run)) is not None]
    return Markup(_PARTS.by_run(bodies)) if bodies else None
