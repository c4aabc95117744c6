"""Prompt look-up: the draft is what followed the last n tokens the last time they stood in the text."""

from collections.abc import Sequence

import torch

from inference.proposer import Proposal, Round


class NGram:
    """Drafts by n-gram look-up in the row's own text (Saxena 2023, prompt lookup decoding).

    Tries the longest n first, n = max_n .. 1, and the most recent earlier occurrence; certain drafts, no model.
    Raises ValueError when max_n < 1.
    """

    def __init__(self, max_n: int = 3) -> None:
        if max_n < 1:
            raise ValueError(f"NGram.max_n must be at least 1, not {max_n}")
        self.max_n = max_n

    def open(self, rows: int, vocabulary: int, context: int, spare: int = 0) -> None: ...

    def admit(self, low: int, prompts: Sequence[list[int]]) -> None: ...

    def stage(self, low: int, prompts: Sequence[list[int]]) -> None: ...

    def enter(self, source: int, target: int, prompt: list[int]) -> None: ...

    def commit(self, valid: Sequence[int]) -> None: ...

    def move(self, source: int, target: int) -> None: ...

    def propose(self, turn: Round) -> Proposal:
        drafts = [self.look_up(text, k) for text, k in zip(turn.texts, turn.k, strict=True)]
        lengths = [len(draft) for draft in drafts]
        width = max(lengths)
        padded = [draft + [0] * (width - len(draft)) for draft in drafts]
        return Proposal(torch.tensor(padded, dtype=torch.int64).view(len(drafts), width), None, lengths)

    def look_up(self, text: list[int], k: int) -> list[int]:
        """At most k tokens that followed the latest earlier occurrence of the text's longest matching suffix."""
        for n in range(min(self.max_n, len(text) - 1), 0, -1):
            suffix = text[-n:]
            for start in range(len(text) - n - 1, -1, -1):
                if text[start : start + n] == suffix:
                    return text[start + n : start + n + k]
        return []
