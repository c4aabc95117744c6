"""One request as it is decoded: its text, its limits and when it ends; and requests made of what a call gives."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.noise import row_ids
from inference.sampling import Sampling

Prompt = str | Sequence[int]


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


class Holds(Protocol):
    """What runs the texts: ids in [0, vocabulary), at most `context` of them."""

    vocabulary: int
    context: int


@dataclass(frozen=True)
class Accepts:
    """What an engine takes: texts that its target holds, strings where there is a tokenizer; ends: ids that end one."""

    target: Holds
    ends: frozenset[int]
    tokenizer: PreTrainedTokenizerBase | None

    def requests(
        self,
        prompts: Sequence[Prompt],
        limits: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling],
        ids: Sequence[int] | None,
        ignore_eos: bool,
    ) -> list[Request]:
        """One request a prompt; arguments and errors as of `Engine.generate`."""
        if isinstance(prompts, str):
            raise ValueError("prompts: a list is wanted, not one string")
        texts = [self._encode(prompt) for prompt in prompts]
        limits = _each("max_new_tokens", limits, len(texts))
        regimes = _each("sampling", sampling, len(texts))
        keys = _each("ids", row_ids(texts) if ids is None else ids, len(texts))
        ends = frozenset() if ignore_eos else self.ends
        rows = []
        for index, (text, limit, regime, key) in enumerate(zip(texts, limits, regimes, keys, strict=True)):
            self._refuse(f"prompt {index}", text, limit, regime)
            limit = min(limit, self.target.context - len(text))
            stops = ends | frozenset(regime.stop_ids)
            rows.append(Request(index, key, text, limit, regime, stops, self.tokenizer))
        return rows

    def _refuse(self, who: str, text: list[int], limit: int, sampling: Sampling) -> None:
        """Raise ValueError for a prompt that cannot be continued."""
        if not text or len(text) >= self.target.context or limit < 1:
            raise ValueError(f"{who}: {len(text)} tokens and max_new_tokens={limit} do not fit a context of "
                             f"{self.target.context}")  # fmt: skip
        if min(text) < 0 or max(text) >= self.target.vocabulary:
            raise ValueError(f"{who}: ids from {min(text)} to {max(text)} are not all in [0, {self.target.vocabulary})")
        named = {*(sampling.logit_bias or ()), *chain(*sampling.banned)}
        foreign = [token for token in named if not 0 <= token < self.target.vocabulary]
        if foreign:
            raise ValueError(f"{who}: Sampling.logit_bias or banned has ids {sorted(foreign)[:5]}, the vocabulary size "
                             f"is {self.target.vocabulary}")  # fmt: skip
        if sampling.stop and self.tokenizer is None:
            raise ValueError("Sampling.stop: stop strings need a tokenizer")

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ValueError("prompts: strings need a tokenizer; give Engine(tokenizer=...) or lists of ids")
        return list(self.tokenizer(prompt)["input_ids"])


def _each(name: str, value: Any, count: int) -> list[Any]:
    """One value a prompt; raises ValueError naming the argument when a list has another length."""
    values = list(value) if isinstance(value, Sequence) else [value] * count
    if len(values) != count:
        raise ValueError(f"{name}: {len(values)} values for {count} prompts")
    return values


def vocabulary_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Ids that can be emitted: padded rows of the embedding have none of the mass."""
    size = int(model.config.get_text_config().vocab_size)
    return min(size, 1 + max(tokenizer.get_vocab().values())) if tokenizer else size


def ends_of(model: PreTrainedModel) -> frozenset[int]:
    """Ids that end a text, by the generation config, else the model's."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    ends = model.config.eos_token_id if ends is None else ends
    return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)
