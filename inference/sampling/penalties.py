"""Settings that read the text so far: penalties, biases, banned words, minimum length, processors of the user.

A rows, n positions per row, V vocabulary, K drafted ids. They are applied in the order of transformers' generate: bias,
repetition, presence, frequency, banned, minimum length, processors. `process` is the reference, one position at a time.
`Penalties` computes the same for all active rows of an engine at once, on the device, except processors.
`apply_processors` calls these position by position, with ids read from the device.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from typing import Protocol

import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from inference.sampling.distributions import wide
from inference.sampling.parameters import Sampling

Step = Callable[[Tensor, Tensor, int], Tensor]  # ids (1, T), logits (1, V), tokens generated -> logits (1, V)


def needs_history(sampling: Sampling) -> bool:
    """Return whether some setting reads the text, so that the distribution depends on more than the model's logits."""
    return bool(
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or sampling.logit_bias
        or sampling.banned
        or sampling.banned_first
        or sampling.min_new_tokens
        or sampling.processors
    )


def process(logits: Tensor, histories: Sequence[Sequence[int]], new: Sequence[int], sampling: Sampling) -> Tensor:
    """Return logits (n, V) after the settings that read the text (penalties, biases, bans, minimum length, processors),
    as `sampling.probs` needs them. It is slow, and the reference for `Penalties`.

    logits (n, V): each row is for a position of some text. histories: for each row, the ids before it, prompt included.
    new: for each row, how many of these ids were generated, drafts included. sampling: the settings of all rows; of end
    tokens, only its `stop_ids` get no mass before min_new_tokens.

    The result has the logits' dtype, or float32 if that is wider; the input is not changed. Raises ValueError if
    lengths differ, if an id is outside the vocabulary, or if the settings forbid every token of a row.
    """
    if not len(logits) == len(histories) == len(new):
        lengths = f"{len(histories)} histories and {len(new)} counts"
        raise ValueError(f"there are {lengths} for {len(logits)} rows of logits; give one of each per row")
    steps, out = _chain(sampling), wide(logits).clone()
    for i, (history, count) in enumerate(zip(histories, new, strict=True)):
        ids = torch.tensor([list(history)], dtype=torch.int64, device=logits.device)
        row = out[i : i + 1].clone()
        for step in steps:
            row = step(ids, row, count)
        out[i] = row[0]
    _require_a_token(out)
    return out


def presence(ids: Tensor, logits: Tensor, penalty: float) -> Tensor:
    """Return logits (1, V), lowered by the penalty for each token that occurs in ids (T,)."""
    return logits - penalty * (_counts(ids, logits) > 0)


def frequency(ids: Tensor, logits: Tensor, penalty: float) -> Tensor:
    """Return logits (1, V), lowered for each token by the penalty times the number of its occurrences in ids (T,)."""
    return logits - penalty * _counts(ids, logits)


def _counts(ids: Tensor, logits: Tensor) -> Tensor:
    """Return how often each token occurs in ids (T,), (V,) in the dtype of logits (1, V)."""
    return torch.zeros_like(logits[0]).index_add_(0, ids, torch.ones_like(ids, dtype=logits.dtype))


def _generated(ids: Tensor, new: int) -> Tensor:
    return ids[0, ids.shape[1] - new :]


def _chain(sampling: Sampling) -> list[Step]:
    """Return the functions that apply the settings that are not neutral, in the order of the module."""
    steps: list[Step] = []
    if sampling.logit_bias:
        biases: list[list[list[int] | float]] = [[[t], b] for t, b in sampling.logit_bias.items()]
        steps.append(_plain(SequenceBiasLogitsProcessor(biases)))
    if sampling.repetition_penalty != 1:
        steps.append(_plain(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))))
    if sampling.presence_penalty != 0:
        steps.append(lambda ids, row, new: presence(_generated(ids, new), row, sampling.presence_penalty))
    if sampling.frequency_penalty != 0:
        steps.append(lambda ids, row, new: frequency(_generated(ids, new), row, sampling.frequency_penalty))
    if sampling.banned:
        # no eos ids are passed: transformers would drop bans of these ids
        steps.append(_plain(NoBadWordsLogitsProcessor([list(word) for word in sampling.banned])))
    if sampling.banned_first:
        steps.append(
            lambda ids, row, new: SuppressTokensAtBeginLogitsProcessor(
                list(sampling.banned_first), ids.shape[1] - new, device=str(row.device)
            )(ids, row)
        )
    ends = sorted(sampling.stop_ids)
    if sampling.min_new_tokens and ends:
        steps.append(
            lambda ids, row, new: MinNewTokensLengthLogitsProcessor(
                ids.shape[1] - new, sampling.min_new_tokens, ends, device=str(row.device)
            )(ids, row)
        )
    return steps + [_plain(processor) for processor in sampling.processors]


def _plain(processor: Callable[[Tensor, Tensor], Tensor]) -> Step:
    return lambda ids, row, new: processed(processor, ids, row)


def processed(processor: Callable[[Tensor, Tensor], Tensor], ids: Tensor, scores: Tensor) -> Tensor:
    """Return the result (1, V) of a user's processor. ids (1, T): the text. scores (1, V): its logits. Raises
    ValueError if the result is not (1, V), since torch would broadcast another shape silently."""
    result = processor(ids, scores)
    if not isinstance(result, Tensor) or result.shape != scores.shape:
        what = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(f"a processor must return logits of the shape that it got, {tuple(scores.shape)}, not {what}")
    return result


def _require_a_token(logits: Tensor) -> None:
    empty = ~(logits > -math.inf).any(-1)
    if empty.any():
        row = int(empty.nonzero()[0])
        raise ValueError(
            f"row {row} has no token left: Sampling.banned, banned_first, logit_bias, min_new_tokens or processors "
            "forbid every token whose logit is finite; allow one of them"
        )


class Row(Protocol):
    """The attributes of a row (`inference.request.Request`) that settings read: the ids of its text, the number of its
    prompt's tokens, its new ids, its settings, and the ids that end it."""

    @property
    def text(self) -> list[int]: ...
    @property
    def prompt(self) -> int: ...
    @property
    def new(self) -> list[int]: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def ends(self) -> frozenset[int]: ...


class Penalties:
    """The active rows' settings that read the text, except processors. rows: the active rows. vocabulary: V.

    Occurrences of generated ids are counted on the device; a round copies only the newest ids there. When rows come or
    go, a new `Penalties` is made, and its tables are copied to the device.
    """

    # tensors that `apply` reads
    READ = ("bias", "ends", "first", "repetition", "presence", "frequency", "least", "words", "prompt", "generated")

    def __init__(self, rows: Sequence[Row], vocabulary: int, device: torch.device) -> None:
        self.rows, self.vocabulary, self.device = list(rows), vocabulary, device
        settings = [row.sampling for row in rows]
        self.bias = self._table([s.logit_bias or {} for s in settings])  # (A, V)
        self.ends = self._marked([row.ends if row.sampling.min_new_tokens else frozenset() for row in rows])  # (A, V)
        self.first = self._marked([frozenset(s.banned_first) for s in settings])  # (A, V)
        penalties = [
            [s.repetition_penalty, s.presence_penalty, s.frequency_penalty, s.min_new_tokens] for s in settings
        ]
        self.penalised = any(row[:3] != [1, 0, 0] for row in penalties)
        table = torch.tensor(penalties, dtype=torch.float64, device=device)
        self.repetition, self.presence, self.frequency, self.least = table.view(-1, 4, 1, 1).unbind(1)
        self.words = self._words()
        self.width = 0 if self.words is None else self.words.shape[1] - 2  # ids before a position that bans read
        self.counted = [len(row.text) for row in rows]
        self.prompt = self.generated = None
        if self.penalised:
            self.prompt = self._counts([row.text[: row.prompt] for row in rows]) > 0  # (A, V)
            self.generated = self._counts([row.new for row in rows])  # (A, V)

    def newest(self) -> list[list[int]]:
        """Return, for each text, its ids that are not counted yet, padded with -1 on the right to one width. They then
        count as counted."""
        if not self.penalised:
            return [[] for _ in self.rows]
        ids = [row.text[count:] for row, count in zip(self.rows, self.counted, strict=True)]
        self.counted = [len(row.text) for row in self.rows]
        return _padded(ids)

    def tails(self) -> list[list[int]]:
        """Return, for each text, its last `width` ids, as many as the longest banned sequence needs, padded with -1 on
        the left."""
        return [_last(row.text, self.width) for row in self.rows]

    def count(self, newest: Tensor) -> None:
        """Add ids to the counts on the device, in place. newest (A, m): each row's ids, padded with -1."""
        if newest.shape[1] and self.generated is not None:
            self.generated.scatter_add_(1, newest.clamp(min=0), (newest >= 0).to(self.generated.dtype))

    def apply(self, logits: Tensor, x: Tensor, first: int, tails: Tensor, emitted: Tensor) -> Tensor:
        """Return logits (A, n, V), in float32 or wider, after these settings. Column i comes after the text and the
        first `first + i` drafts of x (A, K). tails (A, L): each text's last L ids, padded with -1 on the left. emitted
        (A,): number of tokens that were generated before the drafts."""
        out, n = wide(logits), logits.shape[1]
        if self.bias is not None:
            out = out + self.bias.unsqueeze(1)
        if self.generated is not None:
            out = self._penalise(out, self.generated.unsqueeze(1) + self._drafted(x, first, n))
        if self.words is not None:
            out = self._ban(out, torch.cat((tails, x), 1), first, self.words)
        new = emitted.unsqueeze(1) + torch.arange(first, first + n, device=out.device)  # (A, n)
        for ids, early in ((self.first, new < 1), (self.ends, new < self.least.squeeze(-1))):
            if ids is not None:
                out = out.masked_fill(early.unsqueeze(-1) & ids.unsqueeze(1), -math.inf)
        return out

    @property
    def key(self) -> Hashable:
        """Return a hashable value: for two objects with the same value, `apply` does the same operations. Only its
        arguments and the values in `tensors` may differ."""
        return self.penalised

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that `apply` reads, by name: the rows' settings, their banned sequences, and the counts of
        their ids."""
        return {name: tensor for name in self.READ if (tensor := vars(self)[name]) is not None}

    def on(self, tensors: Mapping[str, Tensor]) -> "Penalties":
        """Return a `Penalties` that reads `tensors`, by the names and with the shapes that the method `tensors`
        gives."""
        other = copy(self)
        vars(other).update({name: tensors.get(name) for name in self.READ})
        return other

    def _penalise(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return logits (A, n, V) after the repetition, presence and frequency penalties. counts (A, n, V): how often
        each id occurs among the generated ids before each position."""
        assert self.prompt is not None
        there, dtype = counts > 0, logits.dtype
        factor = self.repetition.to(dtype)
        repeated = torch.where(logits < 0, logits * factor, logits / factor)
        logits = torch.where(there | self.prompt.unsqueeze(1), repeated, logits)
        logits = logits - self.presence.to(torch.float32) * there
        return logits - self.frequency.to(dtype) * counts.to(dtype)

    def _drafted(self, x: Tensor, first: int, n: int) -> Tensor:
        """Return how often each id occurs among the drafts before each of n positions, (A, n, V). Position i comes
        after the first `first + i` drafts of x (A, K)."""
        A, K = x.shape
        counts = torch.zeros(A, n, self.vocabulary, dtype=torch.float32, device=x.device)
        position = torch.arange(first, first + n, device=x.device).unsqueeze(1)
        before = (torch.arange(K, device=x.device) < position).to(counts.dtype)  # (n, K)
        return counts.scatter_add_(2, x.unsqueeze(1).expand(A, n, K), before.expand(A, n, K))

    def _ban(self, logits: Tensor, text: Tensor, first: int, words: Tensor) -> Tensor:
        """Return logits (A, n, V) in which ids that would complete a banned sequence are -inf. text (A, L + K): each
        text's last L ids, then its drafts. first: number of drafts before the first position. words (M, 2 + L): the
        banned sequences (`_words`)."""
        rows, last, prefixes = words[:, 0], words[:, 1], words[:, 2:]
        n, L = logits.shape[1], prefixes.shape[1]
        if L:
            read = text.unfold(1, L, 1)[:, first : first + n][rows]  # (M, n, L)
            wanted = prefixes.unsqueeze(1)
            completes = ((read == wanted) | (wanted < 0)).all(-1)
        else:
            completes = torch.ones(len(rows), n, dtype=torch.bool, device=text.device)
        flat = (rows.unsqueeze(1) * n + torch.arange(n, device=text.device)) * logits.shape[2] + last.unsqueeze(1)
        ban = torch.zeros_like(completes, dtype=logits.dtype).masked_fill_(completes, -math.inf)
        return logits.flatten().scatter_add(0, flat.flatten(), ban.flatten()).view_as(logits)

    def _words(self) -> Tensor | None:
        """Return the M banned sequences of all rows, (M, 2 + L), or None if there are none. Each line has the row, the
        sequence's last id, and the ids before it, padded with -1 on the left."""
        words = [(a, word) for a, row in enumerate(self.rows) for word in row.sampling.banned]
        if not words:
            return None
        width = max(len(word) for _, word in words) - 1
        prefixes = [_last(list(word[:-1]), width) for _, word in words]
        rows = zip(words, prefixes, strict=True)
        return torch.tensor([[a, word[-1], *prefix] for (a, word), prefix in rows], device=self.device)

    def _marked(self, ids: list[frozenset[int]]) -> Tensor | None:
        """Return a bool table (A, V) that is True at each row's ids, or None if no row has ids."""
        table = self._table([dict.fromkeys((id for id in some if id < self.vocabulary), 1.0) for some in ids])
        return None if table is None else table > 0

    def _table(self, entries: Sequence[Mapping[int, float]]) -> Tensor | None:
        """Return a float32 table (A, V) of the rows' values, 0 elsewhere; None if there are no values. entries: for
        each row, its values by id."""
        numbers = [(a, id, value) for a, row in enumerate(entries) for id, value in row.items()]
        if not numbers:
            return None
        a, ids = (torch.tensor([entry[i] for entry in numbers], device=self.device) for i in (0, 1))
        values = torch.tensor([entry[2] for entry in numbers], dtype=torch.float32, device=self.device)
        table = torch.zeros(len(entries), self.vocabulary, dtype=torch.float32, device=self.device)
        return table.index_put_((a, ids), values)

    def _counts(self, texts: list[list[int]]) -> Tensor:
        ids = torch.tensor(_padded(texts), dtype=torch.int64, device=self.device).view(len(texts), -1)
        counts = torch.zeros(len(texts), self.vocabulary, dtype=torch.float32, device=self.device)
        return counts.scatter_add_(1, ids.clamp(min=0), (ids >= 0).to(counts.dtype))


def _padded(rows: list[list[int]]) -> list[list[int]]:
    width = max(map(len, rows))
    return [row + [-1] * (width - len(row)) for row in rows]


def _last(ids: list[int], width: int) -> list[int]:
    """Return the last `width` ids, padded with -1 on the left."""
    tail = ids[len(ids) - width :] if width < len(ids) else ids
    return [-1] * (width - len(tail)) + tail


def apply_processors(
    logits: Tensor,
    rows: Sequence[Row],
    own: Sequence[int],
    x: Tensor,
    k: Sequence[int],
    first: int,
    messages: dict[int, str],
    results: dict[tuple[int, ...], Tensor | None],
) -> Tensor:
    """Return a new tensor of logits (A, n, V) after the users' processors. own: indices of the rows that have
    processors. Column i comes after the text and the first `first + i` drafts of x (A, K). k: number of drafts of each
    row. results: the newest logits (V,) of this round by row and drafts, None after a draft without mass; changed in
    place.

    A processor is not called on a text that cannot occur: past a row's k, after an end token, or after a draft without
    mass. If a processor raises, its error is stored in `messages` by row, in place, and every token at that position
    gets -inf.
    """
    logits, drafts = logits.clone(), x.tolist()
    for a in own:
        for i in range(logits.shape[1]):
            draft = drafts[a][: first + i]
            if len(draft) > k[a] or not rows[a].ends.isdisjoint(draft):
                break
            if draft and (a, *draft[:-1]) in results:
                before = results[a, *draft[:-1]]
                if before is None or not bool(before[draft[-1]] > -math.inf):
                    results[a, *draft] = None
                    break
            _apply(logits[a, i : i + 1], rows[a], draft, a, messages)
            results[a, *draft] = logits[a, i]
    return logits


def _apply(scores_here: Tensor, row: Row, draft: list[int], a: int, messages: dict[int, str]) -> None:
    """Call the processors of one row, and write the result into `scores_here` (1, V), in place. draft: the drafts
    before the position. a: the row's index. If a processor raises, its message is added to `messages` by the row's
    index, unless the row already has one, and every token gets -inf."""
    ids = torch.tensor([row.text + draft], dtype=torch.int64, device=scores_here.device)
    scores = scores_here.clone()
    try:
        for processor in row.sampling.processors:
            scores = processed(processor, ids, scores)
        scores_here.copy_(scores)
    except Exception as error:  # an error in a user's code ends only the row that it belongs to
        messages.setdefault(a, f"Sampling.processors: {type(error).__name__}: {error}")
        scores_here.fill_(-math.inf)
