"""What was read of the target, kept in memory, so that texts that come again are read once."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cotrain.teacher.target_distributions import Reader, Record


class Remembering:
    """What is read of the target, kept by text: a text that is seen again is not read again.

    read: ids (B, T) -> a record, (B, T, ...) each. limit: bytes kept, in the target's dtype on the host; what comes
    after is read live.
    """

    def __init__(self, read: Reader, limit: int) -> None:
        self.read, self.room = read, limit
        self.kept: dict[tuple[int, int], Record] = {}  # by text and the width that it was padded to
        self.widths: set[int] = set()

    def fill(
        self,
        ids: Tensor,
        keys: Tensor,
        batch: int = 16,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Read all texts (N, T) with their keys (N,) at once, as far as there is room: cheaper than few at a time."""
        for start in range(0, len(ids), batch):
            if progress:
                progress(start, len(ids))
            part = slice(start, start + batch)
            names, known = self._names(ids[part], keys[part]), len(self.kept)
            if all(name in self.kept for name in names):
                continue
            self._looked_up(ids[part], names)
            if len(self.kept) == known:
                break  # full
        if progress:
            progress(len(ids), len(ids))

    def __call__(self, ids: Tensor, keys: Tensor, position_ids: Tensor | None = None) -> Record:
        """ids (B, T), keys (B,) one a text, the same ids whenever it comes -> (B, T, ...) each."""
        return self._looked_up(ids, self._names(ids, keys), position_ids)

    def _names(self, ids: Tensor, keys: Tensor) -> list[tuple[int, int]]:
        """States of a text that was padded to another width are given up: they will not be asked for again."""
        width = ids.shape[1]
        for key in keys.tolist():
            for name in [(key, other) for other in self.widths - {width} if (key, other) in self.kept]:
                self.room += nbytes(self.kept.pop(name))
        self.widths.add(width)
        return [(key, width) for key in keys.tolist()]

    @torch.no_grad()
    def _looked_up(self, ids: Tensor, names: list[tuple[int, int]], position_ids: Tensor | None = None) -> Record:
        if any(name not in self.kept for name in names):
            record = self.read(ids, position_ids)
            self._keep(names, record)
            return record
        return stacked([self.kept[name] for name in names], ids.device)

    def _keep(self, names: list[tuple[int, int]], record: Record) -> None:
        for name, one in zip(names, rows_of(record), strict=True):
            if name not in self.kept and nbytes(one) <= self.room:
                self.kept[name] = {part: values.to("cpu", copy=True) for part, values in one.items()}
                self.room -= nbytes(one)


def rows_of(record: Record) -> list[Record]:
    """A record of B texts as B records of one, (T, ...) each."""
    rows = zip(*(one.unbind() for one in record.values()), strict=True)
    return [dict(zip(record, row, strict=True)) for row in rows]


def stacked(records: Sequence[Record], device: torch.device) -> Record:
    """Undoes `rows_of`."""
    return {part: torch.stack([one[part] for one in records]).to(device, non_blocking=True) for part in records[0]}


def nbytes(record: Record) -> int:
    """Bytes of all it holds."""
    return sum(values.nbytes for values in record.values())
