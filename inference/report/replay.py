"""The replay of a generation: for each round, the drafts, their probabilities and their outcome.

`SCHEMA` is the whole format. rule: the verification rule. rows: the text of each prompt, in the order of the call.
rounds: for each round, the rows that were decoded in it. The drafts of a row are the nodes of a tree. A node's parent
is an earlier node, or -1 for the text so far; in a chain node i has parent i - 1.

Each draft has: p and q, its probability under target and draft; ratio, p / q, or 0 if p is 0, or None if unknown; u,
the uniform of its test, None if the rule uses no uniforms (coupled) or has none for this draft; state, one of `STATES`.
last: the token after the accepted drafts, None if the row ended before it. Its kind is "corrected" after a rejection,
else "bonus" (a whole path was accepted, or nothing was drafted).
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.drafts.atomic import write_atomic
from inference.report.schema import Maybe, conform
from inference.trace import PARTS, TracedRow, traced_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from inference.proposers.base import Proposal
    from inference.request import Request

FORMAT, FILE = 1, "replay.json"
STATES = ("accepted", "refused", "unread")  # unread: after a rejection, or a sibling that was not tested
KINDS = ("corrected", "bonus")
_DRAFT = {
    "id": int,
    "text": str,
    "parent": int,
    "p": Maybe(float),
    "q": Maybe(float),
    "u": Maybe(float),
    "ratio": Maybe(float),
    "state": str,
}
SCHEMA: dict[str, Any] = {
    "format": int,
    "rule": str,
    "rows": [{"prompt": str}],
    "rounds": [[{"row": int, "start": int, "drafts": [_DRAFT], "last": Maybe({"id": int, "text": str, "kind": str})}]],
}


class Recorder:
    """A recorder for `Engine(record=)`. It stores the first `most` rounds of the engine's last call.

    While it records, the one copy of each round from the device has more numbers: p, q and u of each draft. The method
    `replay` decodes the texts after the call.
    """

    def __init__(self, most: int = 400) -> None:
        self.most, self.rule = most, ""
        self.prompts: list[list[int]] = []
        self.rounds: list[list[TracedRow]] = []

    def begin(self, rule: str, rows: Sequence["Request"]) -> None:
        """Begin a call, and drop the rounds of the previous call. rule: the name of the verification rule. rows: the
        requests of the call."""
        self.rule, self.rounds = rule, []
        self.prompts = [row.text[: row.prompt] for row in rows]

    def note(
        self, rows: Sequence["Request"], starts: Sequence[int], proposal: "Proposal", table: Sequence[Sequence[int]]
    ) -> None:
        """Record a round that has ended, if fewer than `most` are recorded. rows: the requests that were active in it.
        starts: for each row, the number of tokens that it had emitted before the round. proposal: the drafts. table:
        the round's table as lists on the host (`trace.RoundRecorder`)."""
        if len(self.rounds) < self.most:
            self.rounds.append(traced_rows(rows, starts, proposal, table))

    def replay(self, tokenizer: "PreTrainedTokenizerBase | None" = None) -> dict[str, Any]:
        """Return the record in the format `SCHEMA`. tokenizer: decodes the texts; without one, the texts show the
        ids."""
        texts = [list(prompt) for prompt in self.prompts]
        rounds = []
        for traced in self.rounds:
            rounds.append([_replayed(row, texts[row.prompt][-1], tokenizer) for row in traced])
            for row in traced:
                texts[row.prompt] += [*(row.drafts[node] for node in row.path), row.last][: row.emitted]
        rows = [{"prompt": _text(prompt, tokenizer)} for prompt in self.prompts]
        return {"format": FORMAT, "rule": self.rule, "rows": rows, "rounds": rounds}


def _replayed(row: TracedRow, anchor: int, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, Any]:
    """Return one row of a round in the format of `SCHEMA`. anchor: the id of its text's last token before the round."""
    accepted = set(row.path[: row.emitted])
    rejected = _rejected(row) if row.emitted > len(row.path) else set()
    drafts = []
    for i in range(row.drafted):
        token, parent = row.drafts[i], row.parents[i]
        p, q, u = (_number(row.floats[part * len(row.drafts) + i]) for part in range(PARTS))
        state = "accepted" if i in accepted else "refused" if i in rejected else "unread"
        ratio = None if p is None or q is None or (p and not q) else p / q if p else 0.0
        before = row.drafts[parent] if parent >= 0 else anchor
        drafts.append(
            {
                "id": token,
                "text": _text([token], tokenizer, before),
                "parent": parent,
                "p": p,
                "q": q,
                "u": u,
                "ratio": ratio,
                "state": state,
            }
        )
    last = None
    if row.emitted > len(row.path):
        kind = "corrected" if any(row.parents[i] == (row.path[-1] if row.path else -1) for i in rejected) else "bonus"
        before = row.drafts[row.path[-1]] if row.path else anchor
        last = {"id": row.last, "text": _text([row.last], tokenizer, before), "kind": kind}
    return {"row": row.prompt, "start": row.start, "drafts": drafts, "last": last}


def _rejected(row: TracedRow) -> set[int]:
    """Return the nodes that were tested and rejected: children of the last accepted node, and siblings that come before
    an accepted node."""
    accepted_child = dict(zip([-1, *row.path], [*row.path, row.drafted], strict=True))
    return {i for i in range(row.drafted) if row.parents[i] in accepted_child and i < accepted_child[row.parents[i]]}


def _number(bits: int) -> float | None:
    """Return the float64 with these bits, or None for NaN."""
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value if value == value else None


def _text(ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase | None", before: int | None = None) -> str:
    """Return the text of ids. before: the token before them, None at the beginning of a text; it matters because some
    tokenizers drop a space at the beginning."""
    if tokenizer is None:
        return " ".join(map(str, ids))
    if before is None:
        return str(tokenizer.decode(list(ids)))
    alone, both = str(tokenizer.decode([before])), str(tokenizer.decode([before, *ids]))
    return both[len(alone) :] if both.startswith(alone) else str(tokenizer.decode(list(ids)))


def validate_replay(replay: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first key of a replay that does not fit `SCHEMA`, or has an impossible state, kind,
    row or parent; also if an accepted draft has a parent that is not accepted."""
    conform(replay, SCHEMA, "replay")
    if replay["format"] != FORMAT:
        raise ValueError(
            f"replay.format is {replay['format']}, but this version of cotrain reads {FORMAT}: record it again with "
            "this version"
        )
    for number, rows in enumerate(replay["rounds"]):
        for index, row in enumerate(rows):
            _validate_row(row, len(replay["rows"]), f"replay.rounds[{number}][{index}]")


def _validate_row(row: Mapping[str, Any], rows: int, name: str) -> None:
    if not 0 <= row["row"] < rows:
        raise ValueError(f"{name}.row is {row['row']}, but there are {rows} rows, numbered from 0")
    if row["last"] and row["last"]["kind"] not in KINDS:
        raise ValueError(f"{name}.last.kind is {row['last']['kind']!r}, not one of {', '.join(KINDS)}")
    for i, draft in enumerate(row["drafts"]):
        if not -1 <= draft["parent"] < i:
            raise ValueError(f"{name}.drafts[{i}].parent is {draft['parent']}: it must be -1 or an earlier draft")
        if draft["state"] not in STATES:
            raise ValueError(f"{name}.drafts[{i}].state is {draft['state']!r}, not one of {', '.join(STATES)}")
        above = row["drafts"][draft["parent"]]["state"] if draft["parent"] >= 0 else "accepted"
        if draft["state"] == "accepted" != above:
            raise ValueError(f"{name}.drafts[{i}] is accepted, but its parent, draft {draft['parent']}, is {above}")


def write_replay(replay: Mapping[str, Any], path: str | Path) -> None:
    """Check that the replay fits `SCHEMA`, then write it as JSON atomically. Raises ValueError naming the first wrong
    key, and OSError if the file cannot be written."""
    validate_replay(replay)
    write_atomic(Path(path), json.dumps(replay, allow_nan=False, separators=(",", ":")) + "\n")
