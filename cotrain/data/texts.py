"""Tokenized texts for training and evaluation (`Texts`), and the order in which training reads them."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset, Sampler

COLUMNS = 32  # batches have few widths, so that a GPU finds free blocks of the same sizes
NO_ID = -1  # pads sources; padding is no token, whatever the target's padding id is


def short_hash(value: object) -> str:
    """Return a hash of a JSON value, of 12 digits."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class Texts:
    """N texts with at most T tokens each.

    Args:
        ids (N, T): token ids, padded with 0 on the right.
        prompt (N,), length (N,): the number of tokens in the prompt, and in the whole text.
        domain: the domain of each of the N texts.
        position_ids (N, T): if rows consist of several packed texts, the position of each token in its own text; None
            otherwise.
        temperature (N,), or () for one value: the target's temperature in the loss.
        whole: whether the tokens of prompts count in the loss too.
        source (N, S): the input of the encoder in an encoder-decoder, as token ids padded with `NO_ID` on the right.
            `ids` is then the text of the decoder, and its prompt the tokens with which every decoder text begins. None
            for other models.
    """

    ids: Tensor
    prompt: Tensor
    length: Tensor
    domain: list[str]
    position_ids: Tensor | None = None
    temperature: Tensor = field(default_factory=lambda: torch.tensor(1.0))
    whole: bool = False
    source: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, temperature: float, whole: bool = False) -> Self:
        """Return the same texts, all with this temperature. whole: whether tokens of prompts count in the loss too."""
        return replace(self, temperature=torch.tensor(float(temperature)), whole=whole)

    def in_turn(self, temperatures: Sequence[float]) -> Self:
        """Return the same texts; text i gets temperature number i modulo the number of `temperatures`. The tokens of
        prompts then do not count in the loss."""
        if len(temperatures) == 1:
            return self.at(temperatures[0])
        each = torch.tensor(temperatures, dtype=torch.float32)
        return replace(self, temperature=each[torch.arange(len(self)) % len(each)], whole=False)

    def evenly(self, count: int) -> list[int]:
        """Return the indices of `count` texts, in ascending order, or of all texts if there are fewer. Each domain gets
        its share of the count, rounded up or down, evenly spaced within the domain."""
        by_domain = sorted(range(len(self)), key=self.domain.__getitem__)
        count = min(count, len(self))
        return sorted(by_domain[i * len(self) // count] for i in range(count))

    def spread(self, count: int) -> Self:
        """Return `count` of the texts, evenly spaced within each domain, or all texts if there are fewer."""
        return self.rows(self.evenly(count))

    def rows(self, chosen: Sequence[int]) -> Self:
        """Return the texts with the indices `chosen`, in this order."""
        at = torch.tensor(chosen, dtype=torch.int64)
        ids, places, source, _ = self.read(at)
        return replace(
            self,
            ids=ids,
            prompt=self.prompt[at],
            length=self.length[at],
            position_ids=places,
            domain=[self.domain[row] for row in chosen],
            temperature=self.temperature.expand(len(self))[at],
            source=source,
        )

    def hashes(self) -> list[str]:
        """Return one hash per text, of its token ids and, with an encoder, of its encoder input."""
        rows = [row[:length].tolist() for row, length in zip(self.ids, self.length.tolist(), strict=True)]
        if self.source is not None:
            rows = [[*row, NO_ID, *source] for row, source in zip(rows, self.prompts, strict=True)]
        return list(map(short_hash, rows))

    def prompt_hashes(self) -> list[str]:
        """Return one hash per text, of the token ids of its prompt."""
        return list(map(short_hash, self.prompts))

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Return the inputs of a `Reader` for the texts with the indices `rows` (n,): ids (n, T), position_ids (n, T)
        and source (n, S), which are None if the texts have none, and length (n,)."""
        places, source = (None if part is None else part[rows] for part in (self.position_ids, self.source))
        return self.ids[rows], places, source, self.length[rows]

    @property
    def prompts(self) -> list[list[int]]:
        """Return the token ids of each prompt. For texts with an encoder input, this input is the prompt."""
        if self.source is not None:
            return [row[row != NO_ID].tolist() for row in self.source]
        return [row[:length].tolist() for row, length in zip(self.ids, self.prompt.tolist(), strict=True)]

    @property
    def sampled(self) -> Tensor:
        """Return (N, T-1) bool: entry t is True if token t+1 is after the prompt."""
        after = torch.arange(1, self.ids.shape[1])
        return (after >= self.prompt.unsqueeze(1)) & (after < self.length.unsqueeze(1))

    @property
    def predicted(self) -> Tensor:
        """Return (N, T-1) bool: entry t is True if token t+1 counts in the loss. Every token does if `whole`, otherwise
        only tokens after the prompt."""
        inside = torch.arange(1, self.ids.shape[1]) < self.length.unsqueeze(1)
        return inside if self.whole else self.sampled


def none() -> Texts:
    """Return an empty set of texts."""
    empty = torch.empty(0, dtype=torch.int64)
    return Texts(empty.view(0, 2), empty, empty, [])


def joined_texts(sets: Sequence[Texts]) -> Texts:
    """Return the texts of several sets as one set, in the order of the sets, padded on the right to the longest. All
    sets must have the same `whole`, and no packed texts: position_ids of the result is None."""
    ids = joined_rows([texts.ids for texts in sets], 0)
    prompt, length = (torch.cat([getattr(texts, name) for texts in sets]) for name in ("prompt", "length"))
    temperature = torch.cat([texts.temperature.expand(len(texts)) for texts in sets])
    domains = [domain for texts in sets for domain in texts.domain]
    sources = [texts.source for texts in sets if texts.source is not None]
    source = joined_rows(sources, NO_ID) if sources else None
    return Texts(ids, prompt, length, domains, None, temperature, sets[0].whole, source)


def joined_rows(rows: Sequence[Tensor], padding: int) -> Tensor:
    """Return the rows of several tensors as one tensor (N, S), padded on the right with the id `padding`. rows: token
    ids, tensors (Ni, Si) with different numbers of rows and columns."""
    width = max(part.shape[1] for part in rows)
    return torch.cat([pad(part, (0, width - part.shape[1]), value=padding) for part in rows])


def shared_texts(texts: Texts, shares: Mapping[str, float]) -> Texts:
    """Return the texts, thinned by domain. shares: domain -> the fraction of its texts that remain, which are its first
    ones. All texts of other domains remain.

    Raises ValueError for a share outside [0, 1], and if no text remains.
    """
    if not all(0 <= share <= 1 for share in shares.values()):
        raise ValueError(f"data.shares={dict(shares)}: each share must be a number from 0 to 1")
    seen: Counter[str] = Counter()
    chosen = []
    for row, domain in enumerate(texts.domain):
        seen[domain] += 1
        if seen[domain] <= shares.get(domain, 1.0) * texts.domain.count(domain):
            chosen.append(row)
    if not chosen:
        raise ValueError(f"data.shares={dict(shares)}: these shares leave no text to learn from: raise one of them")
    return texts.rows(chosen)


class Learnt(Dataset[dict[str, Tensor]]):
    """A data set of texts for training. first: the key (number) of the first text; the keys of the others follow.

    A batch is a dictionary with ids (B, T); predicted (B, T-1) bool, whether the loss counts token t+1; sampled (B,
    T-1) bool, whether the target sampled token t+1; temperature (B,); length (B,); and key (B,). It also has
    position_ids (B, T) if texts are packed, and source (B, S) if the target has an encoder.
    """

    def __init__(self, texts: Texts, first: int = 0) -> None:
        self.texts, self.first = texts, first
        self.predicted, self.sampled = texts.predicted, texts.sampled
        self.temperature = texts.temperature.float().expand(len(texts))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, places, source, length = self.texts.read(torch.tensor(index))
        packed = {} if places is None else {"position_ids": places.long()}
        packed |= {} if source is None else {"source": source}
        return {
            "ids": ids.long(),
            "predicted": self.predicted[index],
            "sampled": self.sampled[index],
            "key": torch.tensor(self.first + index),
            "temperature": self.temperature[index],
            "length": length,
        } | packed


def columns_of(T: int, length: Tensor | None) -> int:
    """Return how many of T columns have tokens, rounded up to a multiple of `COLUMNS`, at most T. length (B,): the
    number of tokens of each row; None: all columns have."""
    return T if length is None else min(T, -(-int(length.max()) // COLUMNS) * COLUMNS)


def shortened(batch: Mapping[str, Any], columns: int) -> dict[str, Any]:
    """Return a batch (`Learnt`) with the first `columns` of its T columns."""
    cut = {"ids": columns, "position_ids": columns, "predicted": columns - 1, "sampled": columns - 1}
    return {name: part[:, : cut[name]] if name in cut else part for name, part in batch.items()}


@dataclass(eq=False)
class SeededOrder(Sampler[int]):
    """Endless shuffled indices from 0 to `size` - 1; each epoch has all of them. They depend only on the seed and the
    epoch. start: how many indices are skipped at first."""

    size: int
    seed: int
    start: int = 0

    def __iter__(self) -> Iterator[int]:
        epoch, skip = divmod(self.start, self.size)
        while True:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            yield from torch.randperm(self.size, generator=generator)[skip:].tolist()
            epoch, skip = epoch + 1, 0


@dataclass(eq=False)
class Strided(Sampler[int]):
    """The indices that one process reads from an endless `order`: every `world`-th one, beginning with number `rank`
    (0-based). world: the number of processes."""

    order: Sampler[int]
    rank: int
    world: int

    def __iter__(self) -> Iterator[int]:
        return islice(self.order, self.rank, None, self.world)


@dataclass(eq=False)
class Curriculum(Sampler[int]):
    """Endless indices, in shuffled order, into two concatenated sets of texts. The first `first` indices are from the
    first set, all later ones from the second.

    sizes: the number of texts in each set. start: how many indices are skipped. The order depends on the seed alone, so
    a resumed run reads the same texts as an uninterrupted one.
    """

    sizes: tuple[int, int]
    first: int
    seed: int
    start: int = 0

    def __iter__(self) -> Iterator[int]:
        one = iter(SeededOrder(self.sizes[0], self.seed, self.start))
        for _ in range(max(self.first - self.start, 0)):
            yield next(one)
        for index in SeededOrder(self.sizes[1], self.seed + 1, max(self.start - self.first, 0)):
            yield self.sizes[0] + index
