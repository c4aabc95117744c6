"""Prompt look-up: the draft is what followed the last n tokens the last time they stood in the text."""

from pathlib import Path

import torch

from inference.proposers.base import Beside, Host, Proposal, Proposer, Round


class NGram(Proposer):
    """Drafts by n-gram look-up in the row's own text (Saxena 2023, prompt lookup decoding).

    Tries the longest n first, n = max_n .. 1, and the most recent earlier occurrence; certain drafts, no model.
    Raises ValueError when max_n < 1.
    """

    def __init__(self, max_n: int = 3) -> None:
        if max_n < 1:
            raise ValueError(f"NGram.max_n must be at least 1, not {max_n}")
        self.max_n = max_n
        self.seen: dict[int, Seen] = {}  # by id of a row's text, which is held there

    @classmethod
    def load(cls, folder: Path, beside: Beside) -> "NGram":
        """It keeps nothing."""
        return cls()

    def open(self, host: Host) -> None:
        self.seen = {}

    def propose(self, turn: Round) -> Proposal:
        self.seen = {id(text): self._seen(text) for text in turn.texts}
        drafts = [self.seen[id(text)].look_up(k) for text, k in zip(turn.texts, turn.k, strict=True)]
        lengths = [len(draft) for draft in drafts]
        width = max(lengths)
        # behind a draft stands the text's own last id, which the target has read already
        whole = [draft + text[-1:] * (width - len(draft)) for draft, text in zip(drafts, turn.texts, strict=True)]
        return Proposal(torch.tensor(whole, dtype=torch.int64).view(len(drafts), width), None, lengths)

    def _seen(self, text: list[int]) -> "Seen":
        found = self.seen.get(id(text))
        return found if found and found.text is text else Seen(text, self.max_n)

    def look_up(self, text: list[int], k: int) -> list[int]:
        """At most k tokens that followed the latest earlier occurrence of the text's longest matching suffix."""
        return Seen(text, self.max_n).look_up(k)


class Seen:
    """Where each n-gram of a text that only grows began last: a round adds the n-grams that end in its new tokens."""

    def __init__(self, text: list[int], max_n: int) -> None:
        self.text, self.max_n = text, max_n
        self.begins: dict[tuple[int, ...], int] = {}
        self.length = 1  # tokens whose n-grams are added, but for those that end in the last one

    def look_up(self, k: int) -> list[int]:
        """See `NGram.look_up`."""
        text = self.text
        for end in range(self.length, len(text)):  # n-grams of tokens before `end`
            for n in range(1, min(self.max_n, end) + 1):
                self.begins[tuple(text[end - n : end])] = end - n
        self.length = len(text)
        for n in range(min(self.max_n, len(text) - 1), 0, -1):
            start = self.begins.get(tuple(text[-n:]))
            if start is not None:
                return text[start + n : start + n + k]
        return []
