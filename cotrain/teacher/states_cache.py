"""What the target says of texts, on disk, so that runs over the same texts read them once.

A shard holds what was read of the texts of one pass, each under a name that its own ids give it: a run that was
stopped, or the next one, finds what is there in whatever batches it asks. `teacher.json` says whose states they are.
States are kept in the target's own dtype: what is read back is what the target said, and the loss is the one of a live
target. A text's last states have its name alone, anything else its name and the layer or part.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from cotrain.data.fingerprints import differences
from cotrain.teacher.memory_cache import rows_of, stacked
from cotrain.teacher.target_distributions import Reader, Record
from inference.drafts.atomic import write_atomic
from inference.models.passes import LAST

MANIFEST = "teacher.json"
SUM = " checksum"  # behind the name of a text


class Shards:
    """read: ids (B, T) -> a record, asked for the texts that `folder` lacks. maker: what identifies the target and its
    tokenizer (JSON values). parts: layers, or other names, that a record has.

    Raises ValueError naming trainer.cache when the folder was made by another target or tokenizer.
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
        found, wanted = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(maker))
        if differ := differences(found, wanted):
            raise ValueError(f"trainer.cache={folder}: made by another target, its {', '.join(sorted(differ))} differ: "
                             "name another folder")  # fmt: skip
        self.places: dict[str, Path] = {}  # of each text and part, its shard
        for shard in sorted(folder.glob("*.safetensors")):
            self.places |= dict.fromkeys(_names(shard), shard)
        if LAST not in self.parts and any(" " not in place for place in self.places):
            print(
                f"trainer.cache={folder}: distributions that an earlier version kept are not read, they are made anew"
            )

    def estimate(self, texts: int, each: int) -> str:
        """What texts of `each` bytes take. Raises OSError, before anything is written, when the disk has less."""
        free, need = shutil.disk_usage(self.folder).free, texts * each
        said = f"trainer.cache={self.folder}: {need / 2**30:.2f} GiB for {texts} texts, {free / 2**30:.2f} GiB are free"
        if need > free:
            raise OSError(said)
        return said

    @torch.no_grad()
    def __call__(self, ids: Tensor, position_ids: Tensor | None = None) -> Record:
        """ids (B, T) -> (B, T, ...) each, from disk where they are; a damaged shard is made anew."""
        names = [_digest(ids[row], None if position_ids is None else position_ids[row]) for row in range(len(ids))]
        found = {name: record for name in names if (record := self._kept(name)) is not None}
        missing = [row for row, name in enumerate(names) if not self._whole(name)]
        if missing:
            places = None if position_ids is None else position_ids[missing]
            with torch.autocast(ids.device.type, enabled=False):  # a step's precision is the draft's
                record = self.read(ids[missing], places)
            found |= self._keep([names[row] for row in missing], record)
        return stacked([found[name] for name in names], ids.device)

    def _whole(self, name: str) -> bool:
        return all(_place(name, part) in self.places for part in self.parts)

    def _kept(self, name: str) -> Record | None:
        """What was read of a text; None where any part is not there. A damaged shard is forgotten."""
        record: dict[int | str, Tensor] = {}
        for part in self.parts:
            values = self._tensor(_place(name, part))
            if values is None:
                return None
            record[part] = values
        return record

    def _tensor(self, place: str) -> Tensor | None:
        if place not in self.places:
            return None
        try:
            with safe_open(self.places[place], "pt") as shard:
                values, checksum = shard.get_tensor(place), shard.get_tensor(place + SUM)
            if _checksum(values) == checksum.numpy().tobytes():
                return values
        except (SafetensorError, OSError):
            pass
        damaged = self.places[place]
        damaged.unlink(missing_ok=True)
        self.places = {other: shard for other, shard in self.places.items() if shard != damaged}
        return None

    def _keep(self, names: list[str], record: Record) -> dict[str, Record]:
        """Write a record of texts as one shard."""
        held = {part: record[part].detach().cpu() for part in self.parts}
        found = dict(zip(names, rows_of(held), strict=True))
        flat = {_place(name, part): one.contiguous() for name, row in found.items() for part, one in row.items()}
        sums = {
            name + SUM: torch.frombuffer(bytearray(_checksum(one)), dtype=torch.uint8) for name, one in flat.items()
        }
        shard = self.folder / f"{hashlib.blake2b(' '.join(flat).encode(), digest_size=16).hexdigest()}.safetensors"
        write_atomic(shard, save(flat | sums))
        self.places |= dict.fromkeys(flat, shard)
        return found


def _place(name: str, part: int | str) -> str:
    """Under which name a shard has a part of a text."""
    return name if part == LAST else f"{name} {part}"


def _names(shard: Path) -> list[str]:
    """The texts of a shard; none of one that is cut short."""
    try:
        with safe_open(shard, "pt") as found:
            return [name for name in found.keys() if not name.endswith(SUM)]
    except (SafetensorError, OSError):
        return []


def _digest(ids: Tensor, position_ids: Tensor | None) -> str:
    named = hashlib.blake2b(digest_size=16)
    for part in (ids, position_ids):
        named.update(b"" if part is None else part.long().cpu().numpy().tobytes())
        named.update(f"{len(ids)}".encode())
    return named.hexdigest()


def _checksum(values: Tensor) -> bytes:
    return hashlib.blake2b(values.contiguous().flatten().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
