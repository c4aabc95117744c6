"""Caches for the target's states: in memory by text key, and on disk by the text's ids, for later runs.

Both store records (states by layer) in the target's own dtype, so training from a cache equals training with the live
target.

N texts in all, B texts of a batch, T tokens, S tokens of an encoder input, D width.
"""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from cotrain.data.fingerprints import differences
from cotrain.data.texts import columns_of
from cotrain.losses.guess import sent
from cotrain.teacher.target_model import ENCODER, Reader, Record
from inference.drafts.atomic import write_atomic, write_json
from inference.drafts.weight_files import read_json
from inference.models.passes import LAST

MANIFEST = "teacher.json"
SUM = " checksum"  # suffix of an entry's checksum
READERS = ThreadPoolExecutor(1)  # which read ahead
Width = tuple[int, int]  # padded lengths of a text and of its source; 0 without one
TextKey = tuple[int, Width]  # of a record: the text's number, and the padded lengths


class MemoryCache:
    """A cache in main memory, with which each text is read once.

    read: ids (B, T) -> record, states (B, T, D) by layer. limit: bytes to store. Texts that do not fit are read every
    time.
    """

    def __init__(self, read: Reader, limit: int) -> None:
        self.read, self.room = read, limit
        self.records: dict[TextKey, Record] = {}
        self.widths: set[Width] = set()
        self.early: dict[tuple[TextKey, ...], Future[Record]] = {}  # reads in other threads
        self.waited = 0.0  # seconds in which a call waited for such a read
        self.began = math.inf  # when the first such read did

    def begin(self, batch: Mapping[str, Any]) -> None:
        """Begin to read the states of a later batch in another thread, unless they are stored. The later call for this
        batch waits for that read. batch: ids (B, T), key (B,), and position_ids, source or length if it has them,
        as in a training step."""
        self.began = min(self.began, time.perf_counter())
        ids, source = batch["ids"], batch.get("source")
        names = self._names(ids, batch["key"], source)
        if (*names,) not in self.early and any(name not in self.records for name in names):
            self.early[*names] = READERS.submit(self.read, ids, batch.get("position_ids"), source, batch.get("length"))

    def lines(self) -> list[str]:
        """Return a line for the user about the time in which training waited for reads in other threads; [] if there
        were none."""
        if not self.waited:
            return []
        return [f"the training waited {self.waited:.1f} s of {time.perf_counter() - self.began:.1f} s for the teacher"]

    def fill(
        self,
        ids: Tensor,
        keys: Tensor,
        batch: int = 16,
        progress: Callable[[int, int], None] | None = None,
        source: Tensor | None = None,
        length: Tensor | None = None,
    ) -> None:
        """Read and store texts until the memory is full. A pass over a whole batch takes less time than later passes
        over a few missing texts.

        ids (N, T): token ids. keys (N,): the number of each text. source (N, S): only if the target has an encoder.
        length (N,): the number of tokens of each text; None: all rows are whole texts. batch: texts per pass.
        progress: a function that is called with the number of texts done and N.
        """
        for start in range(0, len(ids), batch):
            if progress:
                progress(start, len(ids))
            part = slice(start, start + batch)
            sources, lengths = (None if one is None else one[part] for one in (source, length))
            names, before = self._names(ids[part], keys[part], sources), len(self.records)
            if all(name in self.records for name in names):
                continue
            self._look_up(ids[part], names, source=sources, length=lengths)
            if len(self.records) == before:
                break  # full
        if progress:
            progress(len(ids), len(ids))

    def add(self, states: dict[tuple[int, ...], Record], ids: Tensor, keys: Tensor, length: Tensor) -> None:
        """Store states of texts, and remove them from `states`. states: (T, D) by layer, keyed by a text's ids. ids (N,
        T): token ids. keys (N,): the number of each text. length (N,): the number of tokens of each text."""
        for name, row, size in zip(self._names(ids, keys, None), ids, length, strict=True):
            if record := states.pop((*row[: int(size)].tolist(),), None):
                rest = columns_of(len(row), size.view(1)) - int(size)
                self._keep(name, {layer: pad(values, (0, 0, 0, rest)) for layer, values in record.items()})

    def __call__(
        self,
        ids: Tensor,
        keys: Tensor,
        position_ids: Tensor | None = None,
        source: Tensor | None = None,
        length: Tensor | None = None,
    ) -> Record:
        """Return the states of texts, (B, T, D) each, keyed by layer. They are read from the target if not all texts of
        the batch are stored.

        ids (B, T): token ids. keys (B,): the number of each text, which must stand for the same ids and the same
        encoder input in every call. position_ids (B, T): only if texts are packed. source (B, S): only if the target
        has an encoder. length (B,): the number of tokens of each text; None: all rows are whole texts.
        """
        return self._look_up(ids, self._names(ids, keys, source), position_ids, source, length)

    def _names(self, ids: Tensor, keys: Tensor, source: Tensor | None) -> list[TextKey]:
        """Return the names of the records for texts ids (B, T) with keys (B,) and encoder inputs source (B, S), or
        None. Records of these texts at other padded lengths are evicted, since they are not used again."""
        width = ids.shape[1], 0 if source is None else source.shape[1]
        numbers = keys.tolist()
        for key in numbers:
            for name in [(key, other) for other in self.widths - {width} if (key, other) in self.records]:
                self.room += nbytes(self.records.pop(name))
        self.widths.add(width)
        return [(key, width) for key in numbers]

    @torch.no_grad()
    def _look_up(
        self,
        ids: Tensor,
        names: list[TextKey],
        position_ids: Tensor | None = None,
        source: Tensor | None = None,
        length: Tensor | None = None,
    ) -> Record:
        if any(name not in self.records for name in names):
            early, clock = self.early.pop((*names,), None), time.perf_counter()
            record = early.result() if early else self.read(ids, position_ids, source, length)
            self.waited += time.perf_counter() - clock if early else 0.0
            self._store(names, record, length)
            return record
        record = stacked([self.records[name] for name in names], ids.device)
        T = ids.shape[1]  # the columns that are padding in every text are not stored
        return {
            part: states if part == ENCODER else pad(states, (0, 0, 0, T - states.shape[1]))
            for part, states in record.items()
        }

    def _store(self, names: list[TextKey], record: Record, length: Tensor | None) -> None:
        """Store the states of each text, without columns that are padding. length (B,): tokens of each, or None."""
        if not self.room:
            return
        on_cpu = {part: values.cpu() for part, values in record.items()}
        for place, (name, row) in enumerate(zip(names, rows_of(on_cpu), strict=True)):
            end = columns_of(len(row[LAST]), None if length is None else length[place : place + 1])
            self._keep(name, {part: values if part == ENCODER else values[:end] for part, values in row.items()})

    def _keep(self, name: TextKey, record: Record) -> None:
        if name not in self.records and nbytes(record) <= self.room:
            self.records[name] = {part: values.clone() for part, values in record.items()}
            self.room -= nbytes(record)


def rows_of(record: Record) -> list[Record]:
    """Return the record of B texts, states (B, T, D) by layer, as B records, each with states (T, D) by layer."""
    rows = zip(*(values.unbind() for values in record.values()), strict=True)
    return [dict(zip(record, row, strict=True)) for row in rows]


def stacked(records: Sequence[Record], device: torch.device) -> Record:
    """Return B records of one text each, states (T, D) by layer, as one record, states (B, T, D) by layer, on a device.
    This is the inverse of `rows_of`. Texts with fewer states get zeros."""
    return {part: sent(pad_sequence([row[part] for row in records], True), device) for part in records[0]}


def nbytes(record: Record) -> int:
    """Return the size of a record in bytes."""
    return sum(values.nbytes for values in record.values())


class DiskCache:
    """A cache in `folder`, with which several runs over the same texts read them once.

    A shard is a file with the texts of one pass. Each text is stored under a digest of its ids, so a later run finds it
    whatever its batches are. The digest is the name of the last layer's states; entries of other layers append the
    layer. The file `MANIFEST` identifies the target.

    read: ids (B, T) -> record, states (B, T, D) by layer. maker: JSON values that identify the target and its
    tokenizer. layers: the layers in a record. Raises ValueError, which names trainer.cache, if the folder belongs to
    another target or tokenizer.
    """

    def __init__(self, read: Reader, folder: Path, maker: Mapping[str, Any], layers: Sequence[int] = (LAST,)) -> None:
        self.layers = tuple(layers)
        self.read, self.folder = read, folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / MANIFEST
        if not path.exists():
            write_json(path, maker, 2)
        stored, current = read_json(path), json.loads(json.dumps(maker))
        if differ := differences(stored, current):
            raise ValueError(
                f"trainer.cache={folder}: it was made with another target (differences: "
                f"{', '.join(sorted(differ))}): set trainer.cache= to another folder"
            )
        self.shards: dict[str, Path] = {}  # entry -> shard file
        for shard in sorted(folder.glob("*.safetensors")):
            self.shards |= dict.fromkeys(_entries(shard), shard)

    def estimate(self, texts: int, each: int) -> str:
        """Return a line for the user about the disk space that the texts need. each: bytes per text. Raises OSError
        with this line if the disk has less."""
        free, need = shutil.disk_usage(self.folder).free, texts * each
        line = f"trainer.cache={self.folder}: {need / 2**30:.2f} GiB for {texts} texts, {free / 2**30:.2f} GiB are free"
        if need > free:
            raise OSError(f"{line}: name a folder on another disk, or set trainer.cache=null")
        return line

    @torch.no_grad()
    def __call__(
        self,
        ids: Tensor,
        position_ids: Tensor | None = None,
        source: Tensor | None = None,
        length: Tensor | None = None,
    ) -> Record:
        """Return the states of texts, (B, T, D) each, keyed by layer. Texts that are missing, or whose shard is
        damaged, are read from the target and stored.

        ids (B, T): token ids. position_ids (B, T): only if texts are packed. source (B, S): only if the target has an
        encoder. length (B,): the number of tokens of each text; None: all rows are whole texts.
        """
        inputs = (ids, position_ids, source, length)
        names = [_digest(*(None if part is None else part[row] for part in inputs)) for row in range(len(ids))]
        records = {name: record for name in names if (record := self._load(name)) is not None}
        # a damaged shard is gone with all its texts; another thread may have stored a text since
        missing = [row for row, name in enumerate(names) if name not in records or not self._whole(name)]
        if missing:
            with torch.autocast(ids.device.type, enabled=False):  # mixed precision is for the draft only
                record = self.read(*(None if part is None else part[missing] for part in inputs))
            records |= self._store([names[row] for row in missing], record)
        return stacked([records[name] for name in names], ids.device)

    def _whole(self, name: str) -> bool:
        return all(_entry(name, layer) in self.shards for layer in self.layers)

    def _load(self, name: str) -> Record | None:
        """Return the stored record of a text, or None if any layer is missing."""
        record: dict[int, Tensor] = {}
        for layer in self.layers:
            values = self._tensor(_entry(name, layer))
            if values is None:
                return None
            record[layer] = values
        return record

    def _tensor(self, entry: str) -> Tensor | None:
        """Return the states of an entry, or None if it is missing or damaged. A damaged shard is deleted."""
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
        """Write the records of texts as one shard, and return them as one record per text, keyed by name. names: the
        digest of each text. record: states (B, T, D) by layer."""
        records = dict(zip(names, rows_of({layer: record[layer].detach().cpu() for layer in self.layers}), strict=True))
        flat = {
            _entry(name, layer): values.contiguous() for name, row in records.items() for layer, values in row.items()
        }
        sums = {
            entry + SUM: torch.frombuffer(bytearray(_checksum(values)), dtype=torch.uint8)
            for entry, values in flat.items()
        }
        shard = self.folder / f"{hashlib.blake2b(' '.join(flat).encode(), digest_size=16).hexdigest()}.safetensors"
        write_atomic(shard, save(flat | sums))
        self.shards |= dict.fromkeys(flat, shard)
        return records


def _entry(name: str, layer: int) -> str:
    """Return the name, in a shard, of a text's states after a layer. name: digest of the text."""
    return name if layer == LAST else f"{name} {layer}"


def _entries(shard: Path) -> list[str]:
    """Return the names of all entries in a shard; [] if the file is damaged."""
    try:
        with safe_open(shard, "pt") as tensors:
            return [name for name in tensors.keys() if not name.endswith(SUM)]
    except (SafetensorError, OSError):
        return []


def _digest(ids: Tensor | None, position_ids: Tensor | None, source: Tensor | None, length: Tensor | None) -> str:
    assert ids is not None
    digest = hashlib.blake2b(digest_size=16)
    for part in (ids, position_ids, *(() if source is None else (source,))):  # caches of causal LMs keep their names
        digest.update(b"" if part is None else part.long().cpu().numpy().tobytes())
        digest.update(f"{len(ids)}".encode())
    size = len(ids) if length is None else int(length)
    if not ids[size - 1]:  # else the length follows from the ids
        digest.update(f"length {size}".encode())
    return digest.hexdigest()


def _checksum(values: Tensor) -> bytes:
    return hashlib.blake2b(values.contiguous().flatten().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
