"""Counter-based random numbers. They are pure functions of a key, so they do not depend on the order of calls or on the
batch.

A uniform is keyed by (seed, row, start, depth, stream). row is the row's id; start is the number of tokens that the row
had emitted when the round began. Block and traversal verification read numbers past the token at which they stop. If
the key lacked the start, the next round would use these numbers again, and the text would be biased. Gumbel noise is
keyed only by (seed, row, position, token), since the coupled rule needs the same noise for every start.

The hash is built from splitmix64 (Steele, Lea, Flood 2014) in wrapping int64, with the same bits on every device. B or
A rows, D depths, S streams, V vocabulary.
"""

import struct
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from inference.source import words

DRAFT, ACCEPT, RESIDUAL, NOISE = 1, 2, 3, 4
CHILDREN, REJECTED = 5, 6
INNER = (7, 8, 9)  # draft, acceptance and last-token streams of rounds that a proposer verifies itself


def _signed(word: int) -> int:
    """Return the int64 that has the bits of `word` modulo 2^64."""
    return (word + 2**63) % 2**64 - 2**63


GOLDEN = _signed(0x9E3779B97F4A7C15)
FIRST = _signed(0xBF58476D1CE4E5B9)
SECOND = _signed(0x94D049BB133111EB)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return x (int64) shifted right by `bits`, with zeros shifted in. The shift of int64 itself copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Return x (..., int64) after the last step of splitmix64, a bijection of 64-bit words."""
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def _absorb(state: Tensor, word: Tensor) -> Tensor:
    """Return the hash's state after one more word of the key. state and word are int64 and broadcast against each
    other."""
    return _mix((state ^ _mix(word + GOLDEN)) + GOLDEN)


def _start(seed: int, streams: Sequence[int], row: Tensor) -> Tensor:
    """Return the hash's states (S, B) after seed, stream and row. streams: S of them. row (B,): ids of the rows."""
    state = _absorb(row.new_zeros(1), row.new_full((1,), _signed(seed)))
    stream = torch.cat([row.new_full((1, 1), stream) for stream in streams])  # (S, 1), filled without a copy
    return _absorb(_absorb(state, stream), row)


def uniform(seed: int, row: Tensor, start: Tensor, depth: Tensor, stream: int) -> Tensor:
    """Return uniforms (B, D) in [0, 1), float64 with 53 bits, on row's device. They depend only on (seed, row, start,
    depth, stream).

    row (B,): ids of the rows. start (B,): number of tokens that the row had emitted when the round began. depth (D,):
    depths or nodes of a tree (0-based). All are int64. stream: DRAFT, ACCEPT, RESIDUAL or another stream of this
    module.
    """
    return uniforms(seed, row, start, depth, (stream,))[0]


def uniforms(seed: int, row: Tensor, start: Tensor, depth: Tensor, streams: Sequence[int]) -> Tensor:
    """Return uniforms (S, B, D) in [0, 1), float64, for S streams at once. Entry s equals `uniform` for streams[s]. One
    call takes no longer than a call for one stream.

    row (B,): ids of the rows. start (B,): number of tokens that the row had emitted when the round began. depth (D,):
    depths or nodes of a tree (0-based). All are int64. streams: DRAFT, ACCEPT, RESIDUAL or others of this module. seed:
    of the call.
    """
    state = _absorb(_start(seed, streams, row), start)  # (S, B)
    bits = _absorb(state.unsqueeze(-1), depth)  # (S, B, D)
    return _shifted(bits, 11).to(torch.float64) * 2.0**-53


class Uniforms:
    """A table of `uniforms` for the rows of a batch. It is filled for many starts at a time, since the time of a call
    depends mostly on its kernel launches and hardly on its size.

    seed: the call's seed. device: the table's device. A round calls `offsets` on the host, then `fill` if `offsets`
    returned True, then `at` on the device. So only one number per row is copied to the device.
    """

    STARTS = 64  # filled at once
    STARTS_ON_GPU = 512  # on a GPU the time of a call is that of its launches

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self.span = self.STARTS if device.type == "cpu" else self.STARTS_ON_GPU
        self.rows: list[int] = []
        self.first: list[int] = []
        self.table = torch.empty(3, 0, self.span, 0, dtype=torch.float64, device=device)  # (S, A, span, D)

    def offsets(self, rows: list[int], starts: list[int], depths: int) -> tuple[list[int], bool]:
        """Return, for each row, the offset of its numbers in the table; and whether `fill` must be called first. rows:
        each row's id. starts: for each row, the number of tokens that it had emitted when the round began. depths:
        number of depths needed."""
        covered = rows == self.rows and depths <= self.table.shape[-1]
        since = [start - first for start, first in zip(starts, self.first, strict=True)] if covered else [-1]
        fresh = min(since) < 0 or max(since) >= self.span
        if fresh:
            self.rows, self.first, since = list(rows), list(starts), [0] * len(rows)
        return [row * self.span + start for row, start in enumerate(since)], fresh

    def fill(self, rows: Tensor, starts: Tensor, depths: int) -> None:
        """Fill the table. rows (A,): each row's id. starts (A,): for each row, the first start that the table covers.
        depths: number of depths needed."""
        row = rows.repeat_interleave(self.span)
        start = starts.unsqueeze(1) + torch.arange(self.span, device=self.device)
        depth = torch.arange(max(depths, self.table.shape[-1]), device=self.device)
        numbers = uniforms(self.seed, row, start.flatten(), depth, (DRAFT, ACCEPT, RESIDUAL))
        self.table = numbers.view(3, len(rows), self.span, -1)

    def at(self, offsets: Tensor, depths: int) -> Tensor:
        """Return the uniforms (S, A, depths) of the streams DRAFT, ACCEPT and RESIDUAL. offsets (A,): each row's offset
        in the table, from the method `offsets`."""
        return self.table.flatten(1, 2).index_select(1, offsets)[..., :depths]


def gumbel(seed: int, row: Tensor, position: Tensor, V: int) -> Tensor:
    """Return standard Gumbel noise -log(-log u), (B, n, V) float64 on row's device. It depends only on (seed, row,
    position, token), and is always finite.

    row (B,): ids of the rows. position (B, n): in the generated text, int64. V: size of the vocabulary.
    """
    return gumbel_after(gumbel_states(seed, row), position, V)


def gumbel_states(seed: int, row: Tensor) -> Tensor:
    """Return the states (B,) of `gumbel`'s hash after seed and row. row (B,): ids of the rows."""
    return _start(seed, (NOISE,), row)[0]


def gumbel_after(states: Tensor, position: Tensor, V: int) -> Tensor:
    """Return standard Gumbel noise (B, n, V), float64. states (B,): the hash's states after seed and row, from
    `gumbel_states` or `states_at`. position (B, n): the last words of the key, int64: positions, or keys of nodes."""
    state = _absorb(states.unsqueeze(-1), position)  # (B, n)
    bits = _absorb(state.unsqueeze(-1), torch.arange(V, device=states.device))  # (B, n, V)
    u = (_shifted(bits, 12).to(torch.float64) + 0.5) * 2.0**-52  # in [2^-53, 1 - 2^-53]
    return u.log_().neg_().log_().neg_()


def branch_states(seed: int, row: Tensor) -> Tensor:
    """Return the hash's states (B,) after seed and row, for the noise that draws children of trees (`states_at` adds
    the start of the round). row (B,): ids of the rows."""
    return _start(seed, (CHILDREN,), row)[0]


def states_at(states: Tensor, start: Tensor) -> Tensor:
    """Return the hash's states (B,) after seed, row and start, for the noise that draws the children of a tree's nodes.
    states (B,): the result of `branch_states`. start (B,): number of tokens that the row had emitted when the round
    began. `gumbel_after(states_at(...), keys, V)` is the noise at each node; keys (B, n): 0 for the text's last token
    (the anchor), i + 1 for node i."""
    return _absorb(states, start)


def row_ids(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return a stable id in [0, 2^63) for each prompt: a blake2b hash of its token ids, its source if it has one, and
    the number of equal prompts before it."""
    seen: Counter[tuple[int, ...]] = Counter()
    ids = []
    for prompt in map(words, prompts):
        key = struct.pack(f"<{len(prompt) + 1}q", seen[prompt], *prompt)
        ids.append(int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1)
        seen[prompt] += 1
    return ids
