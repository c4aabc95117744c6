"""What an engine returns: whole texts with their counts, or events as rounds end."""

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
