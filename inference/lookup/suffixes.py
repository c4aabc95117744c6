"""Suffix structures for look-up: a suffix array for a fixed corpus, and a suffix automaton for a growing text."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.unsignedinteger]
CLIMB = 16  # most suffix links updated per token: enough for most texts, and a bound for texts like "aaaa..."


class Match(NamedTuple):
    """The result of a look-up. drafts: ids that followed an earlier occurrence of the matched suffix, at most as many
    as requested. length: number of tokens of this suffix, 0 without a match. stored: whether the match is in a
    datastore, not in the text itself."""

    drafts: list[int]
    length: int = 0
    stored: bool = False


NONE = Match([])


def suffix_array(ids: Ids, depth: int) -> NDArray[np.int64]:
    """Return an array (n,) of the positions 0 to n - 1 in ids (n,), sorted by the `depth` ids from each position on. If
    these ids are equal, the lower position comes first. If ids end before `depth`, the shorter sequence comes first.

    The method is prefix doubling (Manber and Myers 1993): ranks by 2 w ids follow from ranks by w ids, so log2(depth)
    sorts of n keys suffice. Construction needs about 40 bytes per position. Raises ValueError for depth < 1.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, not {depth}")
    rank = ids.astype(np.int64) + 1
    order, width = np.argsort(rank, kind="stable"), 1
    while width < depth:
        rank = _ranks(rank, order)
        next_rank = np.zeros_like(rank)  # 0: past the end
        step = min(width, depth - width)  # the last sort must not see more than `depth` ids
        next_rank[: len(rank) - step] = rank[step:]
        rank = rank * (len(rank) + 1) + next_rank
        order, width = np.argsort(rank, kind="stable"), width + step
        if len(rank) == 0 or (np.diff(rank[order]) > 0).all():
            break  # all differ
    return order


def _ranks(keys: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank of each key (n,), 1 for the smallest. Equal keys have equal ranks. order (n,): the indices that
    sort the keys."""
    sorted_keys = keys[order]
    rank = np.empty_like(keys)
    rank[order] = np.concatenate([[1], 1 + np.cumsum(np.diff(sorted_keys) > 0)]) if len(keys) else sorted_keys
    return rank


def first_place(
    ids: Ids,
    order: NDArray[np.integer],
    pattern: Sequence[int],
    low: int = 0,
    high: int | None = None,
    after: bool = False,
) -> int:
    """Return the first index of `order`, from low to high, at whose position the ids are not less than the pattern.
    With `after`, return the first at whose position the ids are greater than the pattern and do not begin with it.
    Return `high` if there is none (None means the end of `order`).

    ids (n,): an array. order: its suffix array, or a part of it. The binary search reads len(pattern) ids about log2(n)
    times.
    """
    wanted, length = list(pattern), len(pattern)
    high = len(order) if high is None else high
    while low < high:
        middle = (low + high) // 2
        position = int(order[middle])
        here = ids[position : position + length].tolist()
        if here < wanted or (after and here == wanted):
            low = middle + 1
        else:
            high = middle
    return low


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix of a and b."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


class SuffixAutomaton:
    """The substrings of a growing text (Blumer et al. 1985). In constant time per token, the automaton finds the text's
    longest suffix that occurred earlier. Drafts follow Hu et al. 2024, SAM decoding, 2411.10666.

    A state is a set of substrings that end at the same positions of the text. For each state, `longest` is the length
    of its longest substring s, and `link` is the state of the longest suffix of s that also ends at other positions.
    The link of the whole text's state is therefore the longest suffix that occurred earlier; no search is needed. n
    tokens need at most 2 n states; adding a token costs O(1) amortised.
    """

    def __init__(self, text: Sequence[int] = ()) -> None:
        self._clear()
        self.extend(text)

    def _clear(self) -> None:
        self.text: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.link, self.longest = [-1], [0]
        self.latest = [0]  # for each state, the latest end of its substrings, as a count of tokens
        self.last = 0  # the state of the whole text
        self.match, self.end = 0, 0  # length of the longest suffix that occurred earlier, and where that ended

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)

    def follow(self, text: Sequence[int]) -> None:
        """Change this automaton, in place, to the automaton of `text`. If `text` continues the present text, only its
        new tokens are appended; else the automaton is rebuilt."""
        known = len(self.text)
        if list(text[:known]) != self.text:
            self._clear()
            known = 0
        self.extend(text[known:])

    def look_up(self, k: int, shortest: int = 1) -> Match:
        """Return the match of the longest suffix that occurred earlier, with k drafts: the tokens that followed its
        latest earlier occurrence. Return `NONE` if this suffix has fewer than `shortest` tokens. If fewer than k tokens
        follow the occurrence, they are repeated up to k.

        In a text like "aaaa..." the occurrence may be an earlier one than the latest, since each new token updates the
        latest ends of at most `CLIMB` states.
        """
        if k < 1 or self.match < max(shortest, 1):
            return NONE
        drafts = self.text[self.end : self.end + k]
        while len(drafts) < k:
            drafts += drafts[: k - len(drafts)]
        return Match(drafts, self.match)

    def _append(self, token: int) -> None:
        self.text.append(token)
        new = self._state({}, self.longest[self.last] + 1, 0)
        state = self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        self.link[new] = 0 if state < 0 else self._suffix(state, token)
        self.last = new
        self._occurred(self.link[new], len(self.text))
        self.latest[new] = len(self.text)

    def _suffix(self, state: int, token: int) -> int:
        """Return the state of the string s + `token`, where s is the longest string of `state`. If the present state of
        s + `token` also contains longer strings, s + `token` gets a new state."""
        target = self.next[state][token]
        if self.longest[target] == self.longest[state] + 1:
            return target
        clone = self._state(dict(self.next[target]), self.longest[state] + 1, self.link[target])
        self.latest[clone] = self.latest[target]
        while state >= 0 and self.next[state].get(token) == target:
            self.next[state][token] = clone
            state = self.link[state]
        self.link[target] = clone
        return clone

    def _occurred(self, state: int, now: int) -> None:
        """Store, as `match` and `end`, the length of the longest suffix that occurred earlier and where it last ended.
        Then record that this suffix, and its own suffixes, end here too. state: of this suffix. now: number of tokens
        of the text."""
        self.match, self.end = self.longest[state], self.latest[state]
        for _ in range(CLIMB):
            if state <= 0:
                return
            self.latest[state] = now
            state = self.link[state]

    def _state(self, following: dict[int, int], longest: int, link: int) -> int:
        self.next.append(following)
        self.longest.append(longest)
        self.link.append(link)
        self.latest.append(0)
        return len(self.link) - 1
