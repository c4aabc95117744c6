"""The suffix automaton of a text that only grows: its longest end that stood earlier, in constant time a token.

A state is a set of substrings that end at the same places of the text; `longest` is the length of the longest of them,
`link` the state of its longest suffix that ends at more places. So the link of the whole text's state is the longest
end of the text that stood earlier, and no search is needed to find it.
"""

from collections.abc import Sequence

from inference.lookup.match import NONE, Match

CLIMB = 16  # links whose latest place is brought up to date a token: all of them in most texts, a bound in "aaaa..."


class SuffixAutomaton:
    """Substrings of a text (Blumer et al. 1985), as drafts are looked up by Hu et al. 2024, SAM decoding, 2411.10666.

    At most 2 n states for n tokens; adding one costs O(1) amortised.
    """

    def __init__(self, text: Sequence[int] = ()) -> None:
        self.text: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.link, self.longest = [-1], [0]
        self.latest = [0]  # where the substrings of a state ended last, as a count of tokens
        self.last = 0  # the state of the whole text
        self.match, self.end = 0, 0  # length of the longest end that stood earlier, and where it ended
        self.extend(text)

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens behind the text."""
        for token in tokens:
            self._append(token)

    def follow(self, text: Sequence[int]) -> None:
        """Become the automaton of `text`: tokens are added where it goes on, else all is made again."""
        known = len(self.text)
        if list(text[:known]) == self.text:
            self.extend(text[known:])
        else:
            self.__init__(text)  # type: ignore[misc]

    def look_up(self, k: int, shortest: int = 1) -> Match:
        """k tokens behind the latest earlier place of the text's longest end, if that has at least `shortest` tokens.
        Where they reach the text's own end, they begin again: what repeats is drafted as often as k allows.

        In text like "aaaa..." an earlier place may be taken for the latest one, see `CLIMB`.
        """
        if k < 1 or self.match < max(shortest, 1):
            return NONE
        drafts = self.text[self.end : self.end + k]
        while len(drafts) < k:
            drafts += drafts[: k - len(drafts)]
        return Match(drafts, self.match, 1, 1.0)

    def _append(self, token: int) -> None:
        self.text.append(token)
        new = self._state({}, self.longest[self.last] + 1, 0)
        state = self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        self.link[new] = 0 if state < 0 else self._suffix(state, token)
        self.last = new
        self._stood(self.link[new], len(self.text))
        self.latest[new] = len(self.text)

    def _suffix(self, state: int, token: int) -> int:
        """The state of the longest string of `state`, then `token`: split off where its state has longer ones too."""
        found = self.next[state][token]
        if self.longest[found] == self.longest[state] + 1:
            return found
        clone = self._state(dict(self.next[found]), self.longest[state] + 1, self.link[found])
        self.latest[clone] = self.latest[found]
        while state >= 0 and self.next[state].get(token) == found:
            self.next[state][token] = clone
            state = self.link[state]
        self.link[found] = clone
        return clone

    def _stood(self, state: int, now: int) -> None:
        """Note where the longest end that stood earlier ended last, then that it and its suffixes end here."""
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
