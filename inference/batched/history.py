"""Penalties, biases, banned words and minimum lengths of several rows at once, on their device.

A rows, n places a row, V vocabulary, K drafted ids. `processors.process` is the reference, row by row and in the same
order: bias, repetition, presence, frequency, banned, minimum length. Own processors come after these.
"""

import math
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from inference.request import Request
from inference.sampling import wide


class History:
    """What the settings of the active rows need to know of their texts.

    How often each id was generated is counted here and kept up with the texts, from copies of the newest ids alone.
    Made when rows come or go: making it copies to the device.
    """

    def __init__(self, rows: Sequence[Request], vocabulary: int, device: torch.device) -> None:
        self.rows, self.vocabulary, self.device = list(rows), vocabulary, device
        settings = [row.sampling for row in rows]
        self.bias = self._table([s.logit_bias or {} for s in settings])
        self.held = self._held([row.ends if row.sampling.min_new_tokens else frozenset() for row in rows])
        penalties = [[s.repetition_penalty, s.presence_penalty, s.frequency_penalty, s.min_new_tokens]
                     for s in settings]  # fmt: skip
        self.penalised = any(row[:3] != [1, 0, 0] for row in penalties)
        table = torch.tensor(penalties, dtype=torch.float64, device=device)
        self.repetition, self.presence, self.frequency, self.least = table.view(-1, 4, 1, 1).unbind(1)
        self.words = self._words()
        self.width = 0 if self.words is None else self.words.shape[1] - 2  # ids before a place that bans read
        self.counted = [len(row.text) for row in rows]
        if self.penalised:
            self.prompt = self._counts([row.text[: row.prompt] for row in rows]) > 0  # (A, V)
            self.generated = self._counts([row.new for row in rows])  # (A, V)

    def newest(self) -> list[list[int]]:
        """Ids of each text that are not counted yet, padded with -1 to one width."""
        if not self.penalised:
            return [[] for _ in self.rows]
        found = [row.text[count:] for row, count in zip(self.rows, self.counted, strict=True)]
        self.counted = [len(row.text) for row in self.rows]
        return _padded(found, -1)

    def tails(self) -> list[list[int]]:
        """The last ids of each text that bans read, padded with -1 on the left."""
        return [_last(row.text, self.width) for row in self.rows]

    def count(self, newest: Tensor) -> None:
        """Add `newest` (A, m) to the counts."""
        if newest.shape[1]:
            self.generated.scatter_add_(1, newest.clamp(min=0), (newest >= 0).to(self.generated.dtype))

    def __call__(self, logits: Tensor, x: Tensor, first: int, tails: Tensor, emitted: Tensor) -> Tensor:
        """logits (A, n, V) of the places after first, first + 1, ... drafted ids x (A, K) -> (A, n, V), float32 at
        least. tails (A, L) as `tails`; emitted (A,) tokens generated before the drafts."""
        out, n = wide(logits), logits.shape[1]
        if self.bias is not None:
            out = out + self.bias.unsqueeze(1)
        if self.penalised:
            out = self._penalise(out, self.generated.unsqueeze(1) + self._drafted(x, first, n))
        if self.words is not None:
            out = self._ban(out, torch.cat((tails, x), 1), first, self.words)
        if self.held is not None:
            new = emitted.unsqueeze(1) + torch.arange(first, first + n, device=out.device)  # (A, n)
            early = new < self.least.squeeze(-1)
            out = out.masked_fill(early.unsqueeze(-1) & self.held.unsqueeze(1), -math.inf)
        return out

    @property
    def key(self) -> Hashable:
        """All that `__call__` depends on but its arguments and tensors."""
        return self.penalised

    def _penalise(self, logits: Tensor, made: Tensor) -> Tensor:
        """made (A, n, V): how often each id was generated before each place."""
        there, dtype = made > 0, logits.dtype
        factor = self.repetition.to(dtype)
        repeated = torch.where(logits < 0, logits * factor, logits / factor)
        logits = torch.where(there | self.prompt.unsqueeze(1), repeated, logits)
        logits = logits - self.presence.to(torch.float32) * there
        return logits - self.frequency.to(dtype) * made.to(dtype)

    def _drafted(self, x: Tensor, first: int, n: int) -> Tensor:
        """How often each id stands among the drafts before each place: (A, n, V), or 0 where none is drafted."""
        A, K = x.shape
        found = torch.zeros(A, n, self.vocabulary, dtype=torch.float32, device=x.device)
        place = torch.arange(first, first + n, device=x.device).unsqueeze(1)
        before = (torch.arange(K, device=x.device) < place).to(found.dtype)  # (n, K)
        return found.scatter_add_(2, x.unsqueeze(1).expand(A, n, K), before.expand(A, n, K))

    def _ban(self, logits: Tensor, text: Tensor, first: int, words: Tensor) -> Tensor:
        """-inf on ids that would complete a word: text (A, L + K), tails and drafts; words as
        `_words`."""
        rows, last, prefixes = words[:, 0], words[:, 1], words[:, 2:]
        n, L = logits.shape[1], prefixes.shape[1]
        if L:
            read = text.unfold(1, L, 1)[:, first : first + n][rows]  # (M, n, L)
            wanted = prefixes.unsqueeze(1)
            completes = ((read == wanted) | (wanted < 0)).all(-1)
        else:
            completes = torch.ones(len(rows), n, dtype=torch.bool, device=text.device)
        flat = (rows.unsqueeze(1) * n + torch.arange(n, device=text.device)) * logits.shape[2] + last.unsqueeze(1)
        lost = torch.zeros_like(completes, dtype=logits.dtype).masked_fill_(completes, -math.inf)
        return logits.flatten().scatter_add(0, flat.flatten(), lost.flatten()).view_as(logits)

    def _words(self) -> Tensor | None:
        """All banned words of all rows (M, 2 + L): row, last id, and the ids before it, padded with -1 on the left."""
        found = [(a, word) for a, row in enumerate(self.rows) for word in row.sampling.banned]
        if not found:
            return None
        width = max(len(word) for _, word in found) - 1
        prefixes = [_last(list(word[:-1]), width) for _, word in found]
        rows = zip(found, prefixes, strict=True)
        return torch.tensor([[a, word[-1], *prefix] for (a, word), prefix in rows], device=self.device)

    def _held(self, ends: list[frozenset[int]]) -> Tensor | None:
        """Which ids (A, V) end a row that must go on for a while."""
        table = self._table([dict.fromkeys((id for id in some if id < self.vocabulary), 1.0) for some in ends])
        return None if table is None else table > 0

    def _table(self, entries: Sequence[Mapping[int, float]]) -> Tensor | None:
        """Numbers by id of each row, laid out (A, V) in float32; None where no row has any."""
        found = [(a, id, value) for a, row in enumerate(entries) for id, value in row.items()]
        if not found:
            return None
        a, ids = (torch.tensor([entry[i] for entry in found], device=self.device) for i in (0, 1))
        values = torch.tensor([entry[2] for entry in found], dtype=torch.float32, device=self.device)
        table = torch.zeros(len(entries), self.vocabulary, dtype=torch.float32, device=self.device)
        return table.index_put_((a, ids), values)

    def _counts(self, texts: list[list[int]]) -> Tensor:
        ids = torch.tensor(_padded(texts, -1), dtype=torch.int64, device=self.device).view(len(texts), -1)
        counts = torch.zeros(len(texts), self.vocabulary, dtype=torch.float32, device=self.device)
        return counts.scatter_add_(1, ids.clamp(min=0), (ids >= 0).to(counts.dtype))


def _padded(rows: list[list[int]], fill: int) -> list[list[int]]:
    width = max(map(len, rows))
    return [row + [fill] * (width - len(row)) for row in rows]


def _last(ids: list[int], width: int) -> list[int]:
    """The last `width` ids, -1 where there are none."""
    kept = ids[len(ids) - width :] if width < len(ids) else ids
    return [-1] * (width - len(kept)) + kept
