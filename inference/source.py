"""Texts of encoder-decoders. A text is a list of the decoder's ids. It carries its source, the encoder's input: token
ids, or the features (F, T) of a sound, F numbers for each of T frames."""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

from torch import Tensor

Source = tuple[int, ...] | Tensor
BETWEEN = -1  # no token id: it stands between the ids of a text and those of its source


class SourcedText(list[int]):
    """The decoder's ids of one text, with the text's source. Slices and sums are plain lists without the source."""

    __slots__ = ("source",)

    def __init__(self, ids: Sequence[int], source: Source) -> None:
        super().__init__(ids)
        self.source = source


def source_in_text(text: Sequence[int]) -> Source | None:
    """Return the source of a text, or None for a text without one."""
    return text.source if isinstance(text, SourcedText) else None


def like(text: Sequence[int], ids: Sequence[int]) -> list[int]:
    """Return `ids` as a list. If `text` has a source, the list carries that source."""
    source = source_in_text(text)
    return list(ids) if source is None else SourcedText(ids, source)


def source_ids(text: Sequence[int]) -> list[int]:
    """Return the token ids of a text's source; an empty list if the source is features, or if there is no source."""
    source = source_in_text(text)
    return [] if source is None or isinstance(source, Tensor) else list(source)


def searched(text: list[int]) -> list[int]:
    """Return the ids that look-up searches: the source's ids, then `BETWEEN`, then the text's ids. Return `text` itself
    if it has no source ids."""
    before = source_ids(text)
    return [*before, BETWEEN, *text] if before else text


def until_foreign(ids: list[int], vocabulary: float) -> list[int]:
    """Return the ids before the first outside [0, vocabulary), such as `BETWEEN`, or all ids if there is none."""
    return list(takewhile(lambda id: 0 <= id < vocabulary, ids))


def words(text: Sequence[int]) -> tuple[int, ...]:
    """Return whole numbers of 64 bits that identify a text and its source: the text's ids, then `BETWEEN`, then the
    source's ids (or two numbers, a hash of its features). For a text without a source: only the text's ids."""
    source = source_in_text(text)
    if source is None:
        return tuple(text)
    if isinstance(source, Tensor):
        values = source.detach().cpu().double().contiguous()
        hashed = blake2b(repr(tuple(values.shape)).encode() + values.numpy().tobytes(), digest_size=16)
        source = struct.unpack("<2q", hashed.digest())
    return *text, BETWEEN, *source
