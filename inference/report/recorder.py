"""What an engine keeps of a call while it is asked to, and the replay made of it afterwards."""

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from inference.report.replay import FORMAT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from inference.proposers.base import Proposal
    from inference.request import Request

FIRST = 5  # columns of `DecodingRound.settle` before the drafts
TRACED = 3  # of every draft behind them: p, q, u


class _Row(NamedTuple):
    """A row's part of a round. place: of its prompt in the call; path: the nodes it accepted, in order; taken: how many
    tokens joined its text."""

    place: int
    start: int
    taken: int
    drafted: int
    path: Sequence[int]
    last: int
    drafts: Sequence[int]
    traced: Sequence[int]
    parents: Sequence[int]


class Recorder:
    """Give one to `Engine(record=)`: it holds the rounds of the engine's last call, the first `most` of them.

    While recording, a round's one read from the device is three numbers a draft longer, and nothing else is done but
    to keep it; texts are decoded in `replay`.
    """

    def __init__(self, most: int = 400) -> None:
        self.most, self.rule = most, ""
        self.prompts: list[list[int]] = []
        self.rounds: list[list[_Row]] = []

    def begin(self, rule: str, rows: Sequence["Request"]) -> None:
        """A call begins; what was kept of the one before it is forgotten."""
        self.rule, self.rounds = rule, []
        self.prompts = [row.text[: row.prompt] for row in rows]

    def note(
        self, rows: Sequence["Request"], starts: Sequence[int], proposal: "Proposal", table: Sequence[Sequence[int]],
        paths: Sequence[Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        """A round, after its tokens joined the texts. starts: tokens that each row had emitted before it; table: of
        `DecodingRound.settle`; paths: of a tree, the nodes that each row accepted, in order."""
        if len(self.rounds) >= self.most:
            return
        N = proposal.x.shape[1]
        parents = _parents(proposal, len(rows))
        found = []
        for slot, (row, start, line) in enumerate(zip(rows, starts, table, strict=True)):
            path = range(line[0]) if paths is None else paths[slot][: line[0]]
            found.append(_Row(row.index, start, row.emitted - start, line[2], path, line[1], line[FIRST : FIRST + N],
                              line[-TRACED * N :] if N else (), parents[slot]))  # fmt: skip
        self.rounds.append(found)

    def replay(self, tokenizer: "PreTrainedTokenizerBase | None" = None) -> dict[str, Any]:
        """The record as `inference.report.replay` describes it; without a tokenizer, texts are the ids."""
        texts = [list(prompt) for prompt in self.prompts]
        rounds = []
        for kept in self.rounds:
            rounds.append([_told(row, texts[row.place][-1], tokenizer) for row in kept])
            for row in kept:
                emitted = [*(row.drafts[node] for node in row.path), row.last][: row.taken]
                texts[row.place] += emitted
        rows = [{"prompt": _text(prompt, tokenizer)} for prompt in self.prompts]
        return {"format": FORMAT, "rule": self.rule, "rows": rows, "rounds": rounds}


def _parents(proposal: "Proposal", rows: int) -> Sequence[Sequence[int]]:
    """On which node each hangs, of every row."""
    if proposal.tree is None:
        return [range(-1, proposal.x.shape[1] - 1)] * rows
    found = proposal.tree.parents
    found = found.tolist() if hasattr(found, "tolist") else list(found)
    return found if found and isinstance(found[0], list) else [found] * rows


def _told(row: _Row, anchor: int, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, Any]:
    kept = set(row.path[: row.taken])
    refused = _refused(row) if row.taken > len(row.path) else set()
    drafts = []
    for i in range(row.drafted):
        token, parent = row.drafts[i], row.parents[i]
        p, q, u = (_number(row.traced[part * len(row.drafts) + i]) for part in range(TRACED))
        state = "accepted" if i in kept else "refused" if i in refused else "unread"
        ratio = None if p is None or q is None or (p and not q) else p / q if p else 0.0
        before = row.drafts[parent] if parent >= 0 else anchor
        drafts.append({"id": token, "text": _text([token], tokenizer, before), "parent": parent, "p": p, "q": q,
                       "u": u, "ratio": ratio, "state": state})  # fmt: skip
    last = None
    if row.taken > len(row.path):
        kind = "corrected" if any(row.parents[i] == (row.path[-1] if row.path else -1) for i in refused) else "bonus"
        before = row.drafts[row.path[-1]] if row.path else anchor
        last = {"id": row.last, "text": _text([row.last], tokenizer, before), "kind": kind}
    return {"row": row.place, "start": row.start, "drafts": drafts, "last": last}


def _refused(row: _Row) -> set[int]:
    """Nodes that were asked for in vain: those that hang on the end of the accepted path, of a chain the first behind
    it, and of a tree the siblings before each accepted node too."""
    above = [-1, *row.path]
    behind = dict(zip(above, [*row.path, row.drafted], strict=True))
    return {i for i in range(row.drafted) if row.parents[i] in behind and i < behind[row.parents[i]]}


def _number(bits: int) -> float | None:
    """The float64 of these bits; None for NaN, which stands for what there is not."""
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value if value == value else None


def _text(ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase | None", before: int | None = None) -> str:
    """As it is read behind the token `before`: some tokenizers leave a space out at the beginning of a text."""
    if tokenizer is None:
        return " ".join(map(str, ids))
    if before is None:
        return str(tokenizer.decode(list(ids)))
    alone, both = str(tokenizer.decode([before])), str(tokenizer.decode([before, *ids]))
    return both[len(alone) :] if both.startswith(alone) else str(tokenizer.decode(list(ids)))
