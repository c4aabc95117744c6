"""The results of an engine: whole texts with counts and clocks, or events as rounds end."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

PHASES = ("prefill", "draft", "target", "verify", "other")


@dataclass
class Counts:
    """Counts of one row or several. tokens: number of tokens emitted. target_calls: one per row and round.

    drafted, accepted and tried have one entry per depth d (0-based). drafted[d]: rounds with a draft at depth d.
    accepted[d]: rounds that accepted drafts 0 to d. tried[d]: rounds that had a draft at depth d and accepted all
    drafts before it. starts: for each round, the number of tokens that the row had emitted before it; only in counts of
    single rows.
    """

    tokens: int = 0
    target_calls: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Return tokens per target call, counting the token emitted after the accepted drafts. nan before the first
        call."""
        return self.tokens / self.target_calls if self.target_calls else float("nan")

    @property
    def prefix(self) -> list[float]:
        """Return, for each depth, the measured probability that the drafts down to this depth are all accepted:
        accepted / drafted."""
        return [n / total for n, total in zip(self.accepted, self.drafted, strict=True)]

    @property
    def conditional(self) -> list[float]:
        """Return, for each depth, the measured probability that its draft is accepted given that all before it were:
        accepted / tried. nan if no draft was tried."""
        return [n / total if total else float("nan") for n, total in zip(self.accepted, self.tried, strict=True)]

    def add(self, tokens: int, drafted: int, accepted: int) -> None:
        """Add one round of one row. tokens: number of tokens that the row emitted. drafted, accepted: numbers of its
        drafts, and of its accepted drafts."""
        self.tokens += tokens
        self.target_calls += 1
        if not drafted:
            return
        self._deepen(drafted)
        for depth in range(drafted):
            self.drafted[depth] += 1
            self.accepted[depth] += depth < accepted
            self.tried[depth] += depth <= accepted

    def merge(self, other: "Counts") -> None:
        """Add other counts to these, except `starts`."""
        self.tokens += other.tokens
        self.target_calls += other.target_calls
        self._deepen(len(other.drafted))
        for depth, (drafted, accepted, tried) in enumerate(
            zip(other.drafted, other.accepted, other.tried, strict=True)
        ):
            self.drafted[depth] += drafted
            self.accepted[depth] += accepted
            self.tried[depth] += tried

    def _deepen(self, depths: int) -> None:
        if depths > len(self.drafted):
            for counts in (self.drafted, self.accepted, self.tried):
                counts += [0] * (depths - len(counts))


@dataclass
class Stats(Counts):
    """Counts added over all rows, and clocks. rows: the counts of each prompt, in order. seconds: wall seconds per
    phase. times: how often each phase ran. `times["target"]` is the number of rounds: a round counts once, however many
    rows it has."""

    rows: list[Counts] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    times: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Add the wall seconds of the `with` block to `seconds[phase]`, and 1 to `times[phase]`. phase: one of
        `PHASES`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start
            self.times[phase] += 1

    def count(self, row: int, tokens: int, drafted: int, accepted: int) -> None:
        """Add one round of one prompt, to the prompt's counts and to the sums. row: index of the prompt. tokens: number
        of tokens that the row emitted. drafted, accepted: numbers of its drafts, and of its accepted drafts."""
        own = self.rows[row]
        own.starts.append(own.tokens)
        self.add(tokens, drafted, accepted)
        own.add(tokens, drafted, accepted)


def pooled(parts: Sequence[Stats]) -> Stats:
    """Return one `Stats` for several calls. Counts, seconds and times are added, rows are concatenated."""
    whole = Stats()
    for part in parts:
        whole.merge(part)
        whole.rows += part.rows
        for phase in part.seconds:
            whole.seconds[phase] += part.seconds[phase]
            whole.times[phase] += part.times[phase]
    return whole


class RequestError(RuntimeError, ValueError):
    """A prompt ended in an error, and the caller needs complete texts (`Output.whole`, `Engine.stream`)."""


class TopLogprob(NamedTuple):
    """A likely token at some position: its id, and its log-probability (natural logarithm)."""

    token: int
    logprob: float


class TokenLogprob(NamedTuple):
    """An emitted token, with the fields of an entry of OpenAI's `logprobs.content`. token: its id. logprob: its
    log-probability (natural logarithm). top_logprobs: the likeliest tokens at its position, the likeliest first; tokens
    without mass are left out."""

    token: int
    logprob: float
    top_logprobs: list[TopLogprob]


class Logprobs(NamedTuple):
    """Log-probabilities under the target, one entry per emitted token. raw: before the sampling settings, the softmax
    of the target's logits. processed: after all settings, the distribution that plain decoding draws the token from.
    The names are those of vLLM's `logprobs_mode`."""

    raw: list[TokenLogprob]
    processed: list[TokenLogprob]

    def extend(self, other: "Logprobs") -> None:
        """Append the entries of the tokens that follow."""
        self.raw.extend(other.raw)
        self.processed.extend(other.processed)

    @classmethod
    def of_round(cls, values: Sequence[Sequence[Sequence[Sequence[float]]]], emitted: int, m: int) -> "Logprobs":
        """Return those of a row's first `emitted` tokens in a round, with at most the m likeliest tokens. values: the
        row's part of the result of `verify.logprobs.logprobs`, as lists on the host."""
        parts = (
            [_entry(*one, m) for one in zip(ids[:emitted], scores[:emitted], strict=True)] for ids, scores in values
        )
        return cls(*parts)


def _entry(ids: Sequence[float], scores: Sequence[float], m: int) -> TokenLogprob:
    top = zip(ids[1 : 1 + m], scores[1 : 1 + m], strict=True)
    return TokenLogprob(int(ids[0]), scores[0], [TopLogprob(int(id), score) for id, score in top if score > -math.inf])


@dataclass
class Output:
    """The result of `generate` for B prompts. tokens: B lists of new ids: the end token is included, the prompt is not.
    text: B strings, None without a tokenizer. finish: for each prompt "stop", "length" or "error". stats: counts and
    clocks. errors: for each prompt the message of its error, or None. logprobs: for each prompt the log-probabilities
    of its new tokens, None if it did not ask for them."""

    tokens: list[list[int]]
    text: list[str] | None
    finish: list[str]
    stats: Stats
    errors: list[str | None] = field(default_factory=list)
    logprobs: list[Logprobs | None] = field(default_factory=list)

    def whole(self) -> "Output":
        """Return this output if all prompts were completed. Raises RequestError naming the first prompt that ended in
        an error."""
        for index, message in enumerate(self.errors):
            if message is not None:
                raise RequestError(f"prompt {index}: {message}")
        return self


@dataclass(frozen=True)
class Event:
    """The tokens that one row emitted in one round. row: index of the prompt. ids: the token ids. kinds: for each token
    "drafted" (an accepted draft), "corrected" (follows the accepted drafts after a rejected one) or "bonus" (all drafts
    were accepted, or there were none). logprobs: of these tokens, None if the row did not ask for them."""

    row: int
    ids: list[int]
    kinds: list[str]
    logprobs: Logprobs | None = None


class Emitted(NamedTuple):
    """Texts of several calls. Each list has one entry per prompt and repeat. prompts: the prompt's token ids. ids: the
    key of the row's random numbers. tokens: the new token ids. counts: the row's counts."""

    prompts: list[list[int]]
    ids: list[int]
    tokens: list[list[int]]
    counts: list[Counts]

    @property
    def lengths(self) -> Tensor:
        """Return the number of new tokens of each text, (B,) int64."""
        return torch.tensor([len(text) for text in self.tokens])


class IncrementalDecoder:
    """Decodes token ids one by one. decode: returns the text of a list of ids. Each call decodes only a few of the
    newest ids, so the time is linear in the length of the text."""

    CONTEXT = 8  # ids that stay, if a text goes on after 4 times as many without a whole character at its end

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.ids: list[int] = []  # the newest ones
        self.whole = 0  # so many of them end with a whole character
        self.text, self.shown = "", 0  # of these ids, and how much of it was returned

    def add(self, token: int) -> str:
        """Add one token id. Return the text that it completes, "" if there is none. An incomplete character is returned
        once a later token completes it."""
        self.ids.append(token)
        self.text = self.decode(self.ids)
        complete = self.text.rstrip("\ufffd")
        open_characters = len(self.text) - len(complete)
        long = len(self.ids) >= 4 * self.CONTEXT
        if long and open_characters > 3:  # more bytes than a character lacks: they are broken
            complete, open_characters = self.text[:-3], 3
        piece = complete[self.shown :]
        self.shown += len(piece)
        if not open_characters:  # the ids before are not needed to decode later ones
            self._keep(self.ids[self.whole :], 0)
            self.whole = len(self.ids)
        elif long:  # tokens that end inside characters, as some do of emoji and Hangul
            self._keep(self.ids[-self.CONTEXT :], open_characters)
            self.whole = 0
        return piece

    def _keep(self, ids: list[int], open_characters: int) -> None:
        self.ids, self.text = ids, self.decode(ids)
        self.shown = max(len(self.text) - open_characters, 0)

    def rest(self) -> str:
        """Return the incomplete character at the end of the text, "" if there is none."""
        return self.text[self.shown :]


def pieces(events: Iterable[Event], decode: Callable[[list[int]], str]) -> Iterator[tuple[str, str]]:
    """Yield pairs (kind, text) as the tokens of one row come. events: the row's. kind: "drafted", "corrected" or
    "bonus", as `Event` defines them. A character whose bytes are in several tokens has the kind of its last token; an
    incomplete character at the end of the text has the kind of the last token. decode: returns the text of a list of
    ids."""
    decoder, kind = IncrementalDecoder(decode), ""
    for event in events:
        for token, kind in zip(event.ids, event.kinds, strict=True):
            if piece := decoder.add(token):
                yield kind, piece
    if piece := decoder.rest():
        yield kind, piece
