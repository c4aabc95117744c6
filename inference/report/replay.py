"""The record of a generation, round by round: what was drafted, with which probabilities, and what became of it.

`SCHEMA` is the whole format. rule: of verification; rows: the prompts' texts, by their place in the call; rounds: of
each, the rows that were decoded in it. A row's drafts are nodes of a tree in their order: parent -1 is the text so far,
node i hangs on an earlier one; a chain is the tree whose node i hangs on i - 1. Of a draft: p and q, the distributions'
mass of its token where it was drafted; ratio, p / q, 0 where p is 0; u, the uniform that the rule tested it with, None
where the rule tests none (coupled) or the draft was none's turn; state, one of `STATES`. last: the token behind the
accepted ones, "corrected" behind a refusal and "bonus" where all drafts of a path were accepted, or none was made; None
where the row ended before it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inference.drafts.atomic import write_atomic
from inference.report.schema import Maybe, conform

FORMAT, FILE = 1, "replay.json"
STATES = ("accepted", "refused", "unread")  # unread: behind a refusal, or a sibling that was not asked for
KINDS = ("corrected", "bonus")
_DRAFT = {"id": int, "text": str, "parent": int, "p": Maybe(float), "q": Maybe(float), "u": Maybe(float),
          "ratio": Maybe(float), "state": str}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "format": int,
    "rule": str,
    "rows": [{"prompt": str}],
    "rounds": [[{"row": int, "start": int, "drafts": [_DRAFT], "last": Maybe({"id": int, "text": str, "kind": str})}]],
}


def validate(replay: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first key that is not as `SCHEMA` says, a state, kind, row or parent that cannot be,
    and an accepted draft that hangs on one that is not."""
    conform(replay, SCHEMA, "replay")
    if replay["format"] != FORMAT:
        raise ValueError(f"replay.format is {replay['format']}, this version reads {FORMAT}")
    for number, rows in enumerate(replay["rounds"]):
        for place, row in enumerate(rows):
            _validate_row(row, len(replay["rows"]), f"replay.rounds[{number}][{place}]")


def _validate_row(row: Mapping[str, Any], rows: int, name: str) -> None:
    if not 0 <= row["row"] < rows:
        raise ValueError(f"{name}.row is {row['row']}, there are {rows} rows")
    if row["last"] and row["last"]["kind"] not in KINDS:
        raise ValueError(f"{name}.last.kind is {row['last']['kind']!r}, not one of {', '.join(KINDS)}")
    for i, draft in enumerate(row["drafts"]):
        if not -1 <= draft["parent"] < i:
            raise ValueError(f"{name}.drafts[{i}].parent is {draft['parent']}: it must be -1 or an earlier draft")
        if draft["state"] not in STATES:
            raise ValueError(f"{name}.drafts[{i}].state is {draft['state']!r}, not one of {', '.join(STATES)}")
        above = row["drafts"][draft["parent"]]["state"] if draft["parent"] >= 0 else "accepted"
        if draft["state"] == "accepted" != above:
            raise ValueError(f"{name}.drafts[{i}] is accepted, draft {draft['parent']} before it is {above}")


def write(replay: Mapping[str, Any], path: str | Path) -> None:
    """Validate and write as JSON, wholly or not at all."""
    validate(replay)
    write_atomic(Path(path), json.dumps(replay, allow_nan=False, separators=(",", ":")) + "\n")
