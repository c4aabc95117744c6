"""Caches of what was read of the target: in memory by text key, and on disk by the text's ids, for later runs.

Both store records without knowing their contents, in the target's own dtype, so that training from a cache is training
from the live target. B texts, T tokens.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from cotrain.data.fingerprints import differences
from cotrain.teacher.target_model import Reader, Record
from inference.drafts.atomic import write_atomic
from inference.models.passes import LAST

MANIFEST = "teacher.json"
SUM = " checksum"  # suffix of an entry's checksum


class MemoryCache:
    """Reads each text once and stores its record on the host.

    read: ids (B, T) -> a record, (B, T, ...) each. limit: bytes to store, in the target's dtype; texts past it are read
    live.
    """

    def __init__(self, read: Reader, limit: int) -> None:
        self.read, self.room = read, limit
        self.records: dict[tuple[int, int], Record] = {}  # by text key and padded length
        self.widths: set[int] = set()

    def fill(
        self,
        ids: Tensor,
        keys: Tensor,
        batch: int = 16,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Read all texts (N, T) with their keys (N,) while there is room: cheaper than a few at a time."""
        for start in range(0, len(ids), batch):
            if progress:
                progress(start, len(ids))
            part = slice(start, start + batch)
            names, before = self._names(ids[part], keys[part]), len(self.records)
            if all(name in self.records for name in names):
                continue
            self._look_up(ids[part], names)
            if len(self.records) == before:
                break  # full
        if progress:
            progress(len(ids), len(ids))

    def __call__(self, ids: Tensor, keys: Tensor, position_ids: Tensor | None = None) -> Record:
        """ids (B, T), keys (B,), one a text, which names the same ids in every call -> (B, T, ...) each."""
        return self._look_up(ids, self._names(ids, keys), position_ids)

    def _names(self, ids: Tensor, keys: Tensor) -> list[tuple[int, int]]:
        """Names of the texts' records. Evicts records cached at another padded length, which are not read again."""
        width = ids.shape[1]
        for key in keys.tolist():
            for name in [(key, other) for other in self.widths - {width} if (key, other) in self.records]:
                self.room += nbytes(self.records.pop(name))
        self.widths.add(width)
        return [(key, width) for key in keys.tolist()]

    @torch.no_grad()
    def _look_up(self, ids: Tensor, names: list[tuple[int, int]], position_ids: Tensor | None = None) -> Record:
        if any(name not in self.records for name in names):
            record = self.read(ids, position_ids)
            self._store(names, record)
            return record
        return stacked([self.records[name] for name in names], ids.device)

    def _store(self, names: list[tuple[int, int]], record: Record) -> None:
        for name, row in zip(names, rows_of(record), strict=True):
            if name not in self.records and nbytes(row) <= self.room:
                self.records[name] = {part: values.to("cpu", copy=True) for part, values in row.items()}
                self.room -= nbytes(row)


def rows_of(record: Record) -> list[Record]:
    """A record of B texts as B records of one, (T, ...) each."""
    rows = zip(*(values.unbind() for values in record.values()), strict=True)
    return [dict(zip(record, row, strict=True)) for row in rows]


def stacked(records: Sequence[Record], device: torch.device) -> Record:
    """The inverse of `rows_of`."""
    return {part: torch.stack([row[part] for row in records]).to(device, non_blocking=True) for part in records[0]}


def nbytes(record: Record) -> int:
    """Bytes of all its tensors."""
    return sum(values.nbytes for values in record.values())


RENAMED = {"laws": "distributions"}  # a key of older files


class DiskCache:
    """Reads texts that `folder` lacks and stores them there, so that runs over the same texts read them once.

    A shard holds the texts of one pass, each under a digest of its ids, so that a later run finds them whatever its
    batches. The last layer's states have the text's digest as name; other entries append the layer or part. `MANIFEST`
    identifies the target.

    read: ids (B, T) -> a record. maker: what identifies the target and its tokenizer (JSON values). parts: layers, or
    other names, of a record. Raises ValueError naming trainer.cache if the folder belongs to another target or
    tokenizer.
    """

    def __init__(
        self, read: Reader, folder: Path, maker: Mapping[str, Any], parts: Sequence[int | str] = (LAST,)
    ) -> None:
        self.parts = tuple(parts)
        self.read, self.folder = read, folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / MANIFEST
        if not path.exists():
            write_atomic(path, json.dumps(maker, indent=2) + "\n")
        stored, current = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(maker))
        stored = {RENAMED.get(key, key): value for key, value in stored.items()}
        if differ := differences(stored, current):
            raise ValueError(f"trainer.cache={folder}: made by another target, its {', '.join(sorted(differ))} differ: "
                             "name another folder")  # fmt: skip
        self.shards: dict[str, Path] = {}  # of each entry, its shard
        for shard in sorted(folder.glob("*.safetensors")):
            self.shards |= dict.fromkeys(_entries(shard), shard)
        if LAST not in self.parts and any(" " not in entry for entry in self.shards):
            print(f"trainer.cache={folder}: distributions of an earlier version are not read, they are computed anew")

    def estimate(self, texts: int, each: int) -> str:
        """The space that texts of `each` bytes take. Raises OSError, before anything is written, if the disk has
        less."""
        free, need = shutil.disk_usage(self.folder).free, texts * each
        line = f"trainer.cache={self.folder}: {need / 2**30:.2f} GiB for {texts} texts, {free / 2**30:.2f} GiB are free"
        if need > free:
            raise OSError(line)
        return line

    @torch.no_grad()
    def __call__(self, ids: Tensor, position_ids: Tensor | None = None) -> Record:
        """ids (B, T) -> (B, T, ...) each, from disk if stored; damaged shards are read anew from the target."""
        names = [_digest(ids[row], None if position_ids is None else position_ids[row]) for row in range(len(ids))]
        records = {name: record for name in names if (record := self._load(name)) is not None}
        missing = [row for row, name in enumerate(names) if not self._whole(name)]
        if missing:
            positions = None if position_ids is None else position_ids[missing]
            with torch.autocast(ids.device.type, enabled=False):  # a step's precision is the draft's
                record = self.read(ids[missing], positions)
            records |= self._store([names[row] for row in missing], record)
        return stacked([records[name] for name in names], ids.device)

    def _whole(self, name: str) -> bool:
        return all(_entry(name, part) in self.shards for part in self.parts)

    def _load(self, name: str) -> Record | None:
        """The record of a text; None if any part is missing."""
        record: dict[int | str, Tensor] = {}
        for part in self.parts:
            values = self._tensor(_entry(name, part))
            if values is None:
                return None
            record[part] = values
        return record

    def _tensor(self, entry: str) -> Tensor | None:
        """An entry's values; None if it is missing or damaged. A damaged shard is deleted."""
        if entry not in self.shards:
            return None
        try:
            with safe_open(self.shards[entry], "pt") as shard:
                values, checksum = shard.get_tensor(entry), shard.get_tensor(entry + SUM)
            if _checksum(values) == checksum.numpy().tobytes():
                return values
        except (SafetensorError, OSError):
            pass
        damaged = self.shards[entry]
        damaged.unlink(missing_ok=True)
        self.shards = {other: shard for other, shard in self.shards.items() if shard != damaged}
        return None

    def _store(self, names: list[str], record: Record) -> dict[str, Record]:
        """Write the records of texts as one shard; returns them by name."""
        rows = rows_of({part: record[part].detach().cpu() for part in self.parts})
        records = dict(zip(names, rows, strict=True))
        flat = {
            _entry(name, part): values.contiguous() for name, row in records.items() for part, values in row.items()
        }
        sums = {
            entry + SUM: torch.frombuffer(bytearray(_checksum(values)), dtype=torch.uint8)
            for entry, values in flat.items()
        }
        shard = self.folder / f"{hashlib.blake2b(' '.join(flat).encode(), digest_size=16).hexdigest()}.safetensors"
        write_atomic(shard, save(flat | sums))
        self.shards |= dict.fromkeys(flat, shard)
        return records


def _entry(name: str, part: int | str) -> str:
    """A shard's name for a part of a text."""
    return name if part == LAST else f"{name} {part}"


def _entries(shard: Path) -> list[str]:
    """The entries of a shard; none of a truncated one."""
    try:
        with safe_open(shard, "pt") as tensors:
            return [name for name in tensors.keys() if not name.endswith(SUM)]
    except (SafetensorError, OSError):
        return []


def _digest(ids: Tensor, position_ids: Tensor | None) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in (ids, position_ids):
        digest.update(b"" if part is None else part.long().cpu().numpy().tobytes())
        digest.update(f"{len(ids)}".encode())
    return digest.hexdigest()


def _checksum(values: Tensor) -> bytes:
    return hashlib.blake2b(values.contiguous().flatten().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
