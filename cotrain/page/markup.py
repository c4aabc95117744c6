"""HTML from Python values: all text is escaped here, and what a reader cannot see is made visible.

Texts of models and corpora may hold anything: markup, control characters, marks that turn the direction of writing.
"""

import html as library
import json
import re
from collections.abc import Sequence
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
VOID = frozenset({"meta", "br", "input"})


class Html(str):
    """Markup that is safe: nothing else is put on a page unescaped."""


def visible(text: str) -> str:
    """Control characters as their pictures (U+2400 and on), direction marks and lone surrogates as their numbers."""

    def shown(found: re.Match[str]) -> str:
        code = ord(found[0])
        return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"

    return _CONTROL.sub(shown, text)


def escaped(value: object) -> Html:
    """Any value as text of a page; `Html` as it is."""
    return value if isinstance(value, Html) else Html(library.escape(visible(str(value))))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. Names of attributes: `class_` is class, `data_run` data-run; True is an attribute without a value,
    None and False none. Children: text is escaped; lists are laid out; None is left out."""
    written = "".join(_attribute(key.strip("_").replace("_", "-"), value) for key, value in attributes.items())
    if name in VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: object) -> Html:
    """Elements and texts one after another."""
    parts = []
    for child in children:
        if isinstance(child, list | tuple):
            parts.append(joined(*child))
        elif child is not None:
            parts.append(escaped(child))
    return Html("".join(parts))


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escaped(str(value))}"'


def data_block(name: str, value: Any) -> Html:
    """JSON for the page's script. No text in it can end the element or begin another: `<` and `&` stand as \\u003c."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: surrogates and U+2028 stand as \\u....
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Html(f'<script type="application/json" id="{escaped(name)}">{text}</script>')


def table(head: Sequence[object], rows: Sequence[Sequence[object]], caption: object = None) -> Html:
    """A table whose first column names its rows; it scrolls by itself where the window is narrow."""
    cells = [tag("th", cell, scope="col") for cell in head]
    body = [tag("tr", tag("th", row[0], scope="row"), *[tag("td", cell) for cell in row[1:]]) for row in rows]
    inner = (tag("caption", caption) if caption else None, tag("thead", tag("tr", *cells)), tag("tbody", *body))
    return tag("div", tag("table", *inner), class_="scrolls", tabindex=0, role="region", aria_label="table")
