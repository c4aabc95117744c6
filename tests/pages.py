"""Folders of runs for the page: a real report, made smaller or larger, and a record of a generation."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "outputs" / "results"
HOSTILE = (
    '</script><script>alert(1)</script><img src=x onerror="alert(2)"> '
    "<!-- & &lt; ' \" `${1}` \u202e\x00\u2028 \ud800 <b>"
)


def draft(text: str, parent: int, state: str, p: float | None = 0.4, u: float | None = 0.25) -> dict[str, Any]:
    ratio = None if p is None else p / 0.5
    return {"id": 1, "text": text, "parent": parent, "p": p, "q": 0.5, "u": u, "ratio": ratio, "state": state}


def record(word: str = "ab") -> dict[str, Any]:
    """Two rows; a round of chains, and one of a tree beside a row without drafts."""
    chain = [draft(word, -1, "accepted"), draft(" \n", 0, "refused", 0.1, 0.9), draft("z", 1, "unread", None, None)]
    full = [draft("x", -1, "accepted"), draft(word, 0, "accepted")]
    tree = [draft("l", -1, "refused"), draft("r", -1, "accepted"), draft("rr", 1, "accepted"), draft("ll", 0, "unread")]

    def row(number: int, start: int, drafts: list[dict[str, Any]], text: str, kind: str) -> dict[str, Any]:
        return {"row": number, "start": start, "drafts": drafts, "last": {"id": 2, "text": text, "kind": kind}}

    rounds = [
        [row(0, 0, chain, "c", "corrected"), row(1, 0, full, "b", "bonus")],
        [row(0, 2, tree, word, "bonus"), row(1, 3, [], "p", "bonus")],
    ]
    return {"format": 1, "rule": "token", "rows": [{"prompt": word}, {"prompt": "p"}], "rounds": rounds}


def differences(word: str = "ab") -> dict[str, Any]:
    tokens = [{"text": word, "p": 0.75, "q": 0.125}]
    worst = [{"tv": 0.875, "domain": word, "before": word, "next": word, "target": tokens, "draft": tokens}]
    return {"positions": 4, "mean": 0.25, "lorenz": [0.0, 0.5, 0.75, 0.875, 0.9375, 1.0], "worst": worst}


def full_report(word: str = "ab") -> dict[str, Any]:
    """The demo's, with a matrix and quantisations of others, and texts of models."""
    report, grid, bits = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("demo", "grid", "bits"))
    extra = report["extra"]
    extra |= {"matrix": grid["extra"]["matrix"], "bits": bits["extra"]["bits"], "divergence": differences(word)}
    extra["held_out"] |= {f"alpha_T1/{word}": 0.5, f"alpha_T0/{word}": 0.25}
    spans = {"by_draft_temperature": {"0": 0.5, "1": 0.75}, "by_context": {"1-1": 0.5, "2-3": 0.625}}
    extra |= {"profiles": {"1": spans}, "said": [word], "advice": None}
    report["environment"]["command"] = report["settings"]["draft"] = word
    return report


def folder(path: Path, report: dict[str, Any] | None, **files: Any) -> str:
    """A run's folder; files: names without `.json`."""
    path.mkdir(parents=True)
    for name, value in (({"report": report} if report else {}) | files).items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return str(path)


def marker(state: str, **settings: Any) -> dict[str, Any]:
    return {"cotrain": "0", "state": state, "settings": settings}


class Parsed(HTMLParser):
    """tags: every start tag with its names of attributes; found: (section, text, attributes) of each <data>; texts by
    section; blocks: JSON by id; cells: text of each <td> outside <data>, by section."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, ...]] = []
        self.found: list[tuple[str, str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.blocks: dict[str, Any] = {}
        self.cells: list[tuple[str, str]] = []
        self.section, self.stack, self.script = "", list[str](), ""
        self.feed(text)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        told = dict(attributes)
        self.tags.append((name, *told))
        if name == "section":
            self.section = str(told["id"])
        if name not in ("meta", "input", "br"):
            self.stack.append(name)
        self.script = str(told.get("id")) if name == "script" and told.get("type") == "application/json" else ""
        if name == "data":
            self.found.append((self.section, "", told))
        if name == "td":
            self.cells.append((self.section, ""))

    def handle_endtag(self, name: str) -> None:
        assert self.stack.pop() == name, name

    def handle_data(self, text: str) -> None:
        where = self.stack[-1] if self.stack else ""
        if self.script and where == "script":
            self.blocks[self.script] = json.loads(text)
        elif where not in ("script", "style"):
            self.texts[self.section] = self.texts.get(self.section, "") + text
        if where == "data":
            section, _, told = self.found[-1]
            self.found[-1] = (section, text, told)
        elif "td" in self.stack and where == "td":
            section, before = self.cells[-1]
            self.cells[-1] = (section, before + text)
