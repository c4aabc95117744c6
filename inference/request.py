"""One request as it is decoded: its text, its limits and when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from inference.sampling import Sampling


@dataclass
class Request:
    """prompt and emitted tokens in one list, with what ends the row.

    index: its place among the prompts of the call; id: the key of its random numbers; limit: most new tokens;
    ends: token ids that end it; finish: "stop", "length" or "error" once it has ended, error: its message then.
    alone: nothing is drafted for it any more; stained: NaN may stand in its slot.
    """

    index: int
    id: int
    text: list[int]
    limit: int
    sampling: Sampling
    ends: frozenset[int]
    tokenizer: PreTrainedTokenizerBase | None = None
    finish: str | None = None
    error: str | None = None
    alone: bool = False
    stained: bool = False
    prompt: int = field(init=False)  # its length

    def __post_init__(self) -> None:
        self.prompt = len(self.text)

    @property
    def new(self) -> list[int]:
        return self.text[self.prompt :]

    @property
    def emitted(self) -> int:
        return len(self.text) - self.prompt

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Append tokens up to the one that ends the row; returns those that were taken."""
        for count, token in enumerate(tokens, 1):
            self.text.append(token)
            if token in self.ends or self._stopped():
                self.finish = "stop"
            elif self.emitted >= self.limit:
                self.finish = "length"
            if self.finish:
                return list(tokens[:count])
        return list(tokens)

    def fail(self, message: str) -> None:
        """End here, with a message."""
        self.finish, self.error = "error", message

    def _stopped(self) -> bool:
        """A stop string stands in the new text, at its end or across its last tokens."""
        if not self.sampling.stop or self.tokenizer is None:
            return False
        text = self.tokenizer.decode(self.new)
        return any(stop in text for stop in self.sampling.stop)
