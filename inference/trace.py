"""The drafts of a round for a recorder, with p, q and u of each draft. They travel in the round's one copy to the host:
`trace` packs them on the device, `traced_rows` unpacks them on the host.

A rows, N drafts, D drafts on the longest accepted path, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from inference.proposers.base import Proposal
    from inference.request import Request

COLUMNS = 6  # of a table before its drafts, see `verification.RoundResult`
PARTS = 3  # floats of a draft: p, q, u


class RoundRecorder(Protocol):
    """Hooks that an engine calls while it decodes, if it was made with `Engine(record=)`. The hooks must not change
    their arguments."""

    def begin(self, rule: str, rows: Sequence["Request"]) -> None:
        """Begin a call with these rows. rule: the name of the verification rule."""

    def note(
        self, rows: Sequence["Request"], starts: Sequence[int], proposal: "Proposal", table: Sequence[Sequence[int]]
    ) -> None:
        """Record a round that has ended. Its tokens are already appended to the texts of `rows`, the rows that were
        active in it.

        starts: for each row, the number of tokens that it had emitted before the round. proposal: the drafts. table:
        the table of `verification.RoundResult`, one line per row, as lists on the host; its last columns have p, q and
        u of each draft (`trace`).
        """


class TracedRow(NamedTuple):
    """One row of a round. prompt: index of the row's prompt in the call. start: number of tokens that the row had
    emitted before the round. emitted: number of tokens that the round added. drafted: number of the row's drafts, the
    first ones of `drafts`. path: the accepted drafts, as indices of `drafts`, in order. last: the token after them.
    drafts: ids of all drafts (N). floats: p of the N drafts, then q, then u, each the bits of a float64 (3N). parents:
    for each draft, the index of its parent, -1 for the text (N)."""

    prompt: int
    start: int
    emitted: int
    drafted: int
    path: Sequence[int]
    last: int
    drafts: Sequence[int]
    floats: Sequence[int]
    parents: Sequence[int]


def trace(p: Tensor, proposal: "Proposal", u: Tensor | None, length: Tensor, path: Tensor | None) -> Tensor:
    """Return a table (A, ...) of int64 that describes the drafts of a round. Its columns are: the number of drafts that
    had distributions; the ids of the drafts (N); p, q and u of each draft (3N), as the bits of float64. For a tree, the
    parents of its nodes (N) and the accepted nodes (D), padded with -1, follow.

    p (A, N+1, V): the target's probabilities. u (A, N or fewer): the uniforms that the drafts are tested with; None if
    the rule uses no uniforms. length (A,): number of each row's drafts that had distributions. path (A, D): the
    accepted nodes of a tree, None for a chain. Entries after a row's last draft have no meaning. proposal: the drafts,
    N per row.
    """
    x, rows = proposal.x, torch.arange(len(p), device=p.device).unsqueeze(1)
    ids, node = x.clamp(0, p.shape[-1] - 1), torch.arange(x.shape[1], device=p.device)
    parents = node.unsqueeze(0) - 1 if proposal.tree is None else proposal.tree.on(p.device).parents.view(-1, len(node))
    px = p[rows, parents + 1, ids]
    qx = torch.ones_like(px) if proposal.q is None else proposal.q[rows, node, ids]
    tested = px.new_zeros(len(x), 0) if u is None else u[:, : len(node)]
    tested = torch.nn.functional.pad(tested, (0, len(node) - tested.shape[1]), value=math.nan)  # rows may have fewer
    bits = [part.double().contiguous().view(torch.int64) for part in (px, qx, tested)]
    tree = [] if path is None else [parents.expand(len(x), -1), path]
    return torch.cat((length.unsqueeze(1), x, *bits, *tree), 1)


def traced_rows(
    rows: Sequence["Request"], starts: Sequence[int], proposal: "Proposal", table: Sequence[Sequence[int]]
) -> list[TracedRow]:
    """Return the rows of a round, one `TracedRow` per active row. starts: for each row, the number of tokens that it
    had emitted before the round. proposal: the drafts. table: one line per row, as lists on the host, with the columns
    of `trace` at the end."""
    N, tree, traced = proposal.x.shape[1], proposal.tree is not None, []
    end = 1 + (1 + PARTS) * N  # of the columns that chains have too
    for row, start, line in zip(rows, starts, table, strict=True):
        accepted, last = line[0], line[1]
        depth = (len(line) - COLUMNS - end - N) // 2 if tree else N  # columns of the path
        columns = line[COLUMNS + depth :]
        drafts, floats, rest = columns[1 : 1 + N], columns[1 + N : end], columns[end:]
        path, parents = (rest[N : N + accepted], rest[:N]) if tree else (range(accepted), range(-1, N - 1))
        emitted = row.emitted - start
        traced.append(TracedRow(row.index, start, emitted, columns[0], path, last, drafts, floats, parents))
    return traced
