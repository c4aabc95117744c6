"""What an engine keeps of a call while it is asked to, and the replay made of it afterwards."""

import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from inference.report.replay import FORMAT
from inference.settled import COLUMNS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from inference.proposers.base import Proposal
    from inference.request import Request

PARTS = 3  # floats of a draft: p, q, u


def trace(p: Tensor, proposal: "Proposal", u: Tensor | None, length: Tensor, path: Tensor | None) -> Tensor:
    """What a record needs of a round, in whole numbers (A, ...): length, the drafts that had distributions; the drafts
    (N); p, q and u of each (3N), the bits of float64; of a tree the nodes that they hang on (N) and those accepted (D),
    -1 past the last.

    p (A, N+1, V), u (A, N or fewer), None where the rule tests none; length (A,); path (A, D), None of a chain. Past a
    row's drafts it says nothing.
    """
    x, rows = proposal.x, torch.arange(len(p), device=p.device).unsqueeze(1)
    ids, node = x.clamp(0, p.shape[-1] - 1), torch.arange(x.shape[1], device=p.device)
    parents = node.unsqueeze(0) - 1 if proposal.tree is None else proposal.tree.on(p.device).parents.view(-1, len(node))
    px = p[rows, parents + 1, ids]
    qx = torch.ones_like(px) if proposal.q is None else proposal.q[rows, node, ids]
    tested = px.new_zeros(len(x), 0) if u is None else u[:, : len(node)]
    tested = torch.nn.functional.pad(tested, (0, len(node) - tested.shape[1]), value=math.nan)  # where rows have fewer
    floats = (px, qx, tested)
    bits = [part.double().contiguous().view(torch.int64) for part in floats]
    shape = [] if path is None else [parents.expand(len(x), -1), path]
    return torch.cat((length.unsqueeze(1), x, *bits, *shape), 1)


class _Row(NamedTuple):
    """A row's part of a round. place: of its prompt in the call; start: tokens it had emitted; path: the nodes it
    accepted, in order; taken: how many tokens joined its text; drafted: how many of the drafts are its own; floats:
    bits of p, q and u of the drafts."""

    place: int
    start: int
    taken: int
    drafted: int
    path: Sequence[int]
    last: int
    drafts: Sequence[int]
    floats: Sequence[int]
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
        self, rows: Sequence["Request"], starts: Sequence[int], proposal: "Proposal", table: Sequence[Sequence[int]]
    ) -> None:  # fmt: skip
        """A round, after its tokens joined the texts. starts: tokens that each row had emitted before it; table: of
        `DecodingRound.settle`, `trace` at its end."""
        if len(self.rounds) < self.most:
            N, tree = proposal.x.shape[1], proposal.tree is not None
            lines = zip(rows, starts, table, strict=True)
            self.rounds.append(
                [_row(row.index, start, row.emitted - start, line, N, tree) for row, start, line in lines]
            )

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


def _row(place: int, start: int, taken: int, line: Sequence[int], N: int, tree: bool) -> _Row:
    """line: of the table, its first columns the number of accepted drafts and the token after them."""
    accepted, last = line[0], line[1]
    deep = (len(line) - COLUMNS - 1 - (1 + PARTS) * N - N) // 2 if tree else N  # the drafts' columns and the path's
    told = line[COLUMNS + deep :]
    drafts, floats, rest = told[1 : 1 + N], told[1 + N : 1 + (1 + PARTS) * N], told[1 + (1 + PARTS) * N :]
    path, parents = (rest[N : N + accepted], rest[:N]) if tree else (range(accepted), range(-1, N - 1))
    return _Row(place, start, taken, told[0], path, last, drafts, floats, parents)


def _told(row: _Row, anchor: int, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, Any]:
    kept = set(row.path[: row.taken])
    refused = _refused(row) if row.taken > len(row.path) else set()
    drafts = []
    for i in range(row.drafted):
        token, parent = row.drafts[i], row.parents[i]
        p, q, u = (_number(row.floats[part * len(row.drafts) + i]) for part in range(PARTS))
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
