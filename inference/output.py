"""What an engine returns: whole texts with their counts, or events as rounds end."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from inference.stats import Stats


class RequestError(RuntimeError, ValueError):
    """A prompt that ended in an error where whole texts are wanted."""


@dataclass
class Output:
    """tokens: B lists of new ids, prompt excluded, stop token included; text: B strings, None without a tokenizer;
    finish: B times "stop", "length" or "error"; errors: B messages, None for rows without an error."""

    tokens: list[list[int]]
    text: list[str] | None
    finish: list[str]
    stats: Stats
    errors: list[str | None] = field(default_factory=list)

    def whole(self) -> "Output":
        """Itself; raises RequestError naming the first prompt that ended in an error."""
        for index, message in enumerate(self.errors):
            if message is not None:
                raise RequestError(f"prompt {index}: {message}")
        return self


@dataclass(frozen=True)
class Event:
    """Tokens of one row that became certain in one round, and how: "drafted" (accepted), "corrected" (after a
    refusal) or "bonus" (after all drafts were accepted, or none was made)."""

    row: int
    ids: list[int]
    kinds: list[str]


def pieces(events: Iterable[Event], decode: Callable[[list[int]], str]) -> Iterator[tuple[str, str]]:
    """(kind, text) of one row as it comes; bytes that end inside a character wait for the rest of it, and what is left
    of one at the end is the last token's."""
    ids: list[int] = []
    shown = text = kind = ""
    for event in events:
        for token, kind in zip(event.ids, event.kinds, strict=True):
            ids.append(token)
            text = decode(ids)
            if not text.endswith("\ufffd"):
                piece, shown = text[len(shown) :], text
                yield kind, piece
    if text[len(shown) :]:
        yield kind, text[len(shown) :]
