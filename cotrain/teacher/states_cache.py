"""What the target says of texts, on disk, so that runs over the same texts read them once.

A shard holds the states of the texts of one pass, each under a name that its own ids give it: a run that was stopped,
or the next one, finds what is there in whatever batches it asks. `teacher.json` says whose states they are. States are
kept in the target's own dtype: what is read back is what the target said, and the loss is the one of a live target.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from cotrain.evaluation.held_out import Read
from cotrain.rollout.fingerprints import differences
from inference.drafts.atomic import write_atomic

MANIFEST = "teacher.json"
SUM = " checksum"  # behind the name of a text


class Shards:
    """read: ids (B, T) -> hidden states (B, T, D), asked for the texts that `folder` lacks. maker: what identifies the
    target and its tokenizer (JSON values).

    Raises ValueError naming trainer.cache when the folder was made by another target or tokenizer.
    """

    def __init__(self, read: Read, folder: Path, maker: Mapping[str, Any]) -> None:
        self.read, self.folder = read, folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / MANIFEST
        if not path.exists():
            write_atomic(path, json.dumps(maker, indent=2) + "\n")
        found, wanted = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(maker))
        if differ := differences(found, wanted):
            raise ValueError(f"trainer.cache={folder}: made by another target, its {', '.join(sorted(differ))} differ: "
                             "name another folder")  # fmt: skip
        self.places: dict[str, Path] = {}  # of each text, its shard
        for shard in sorted(folder.glob("*.safetensors")):
            self.places |= dict.fromkeys(_names(shard), shard)

    def estimate(self, texts: int, each: int) -> str:
        """What texts of `each` bytes take. Raises OSError, before anything is written, when the disk has less."""
        free, need = shutil.disk_usage(self.folder).free, texts * each
        said = f"trainer.cache={self.folder}: {need / 2**30:.2f} GiB for {texts} texts, {free / 2**30:.2f} GiB are free"
        if need > free:
            raise OSError(said)
        return said

    @torch.no_grad()
    def __call__(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """ids (B, T) -> (B, T, D), from disk where they are; a damaged shard is made anew."""
        names = [_digest(ids[row], None if position_ids is None else position_ids[row]) for row in range(len(ids))]
        found = {name: states for name in names if (states := self._kept(name)) is not None}
        missing = [row for row, name in enumerate(names) if name not in self.places]
        if missing:
            places = None if position_ids is None else position_ids[missing]
            with torch.autocast(ids.device.type, enabled=False):  # a step's precision is the draft's
                states = self.read(ids[missing], places).detach().cpu()
            found |= self._keep([names[row] for row in missing], states)
        return torch.stack([found[name] for name in names]).to(ids.device)

    def _kept(self, name: str) -> Tensor | None:
        """States of a text; None where there are none. A damaged shard is forgotten."""
        if name not in self.places:
            return None
        try:
            with safe_open(self.places[name], "pt") as shard:
                states, checksum = shard.get_tensor(name), shard.get_tensor(name + SUM)
            if _checksum(states) == checksum.numpy().tobytes():
                return states
        except (SafetensorError, OSError):
            pass
        damaged = self.places[name]
        damaged.unlink(missing_ok=True)
        self.places = {other: place for other, place in self.places.items() if place != damaged}
        return None

    def _keep(self, names: list[str], states: Tensor) -> dict[str, Tensor]:
        """Write states (B, T, D) of texts as one shard."""
        found = {name: one.contiguous() for name, one in zip(names, states, strict=True)}
        sums = {
            name + SUM: torch.frombuffer(bytearray(_checksum(one)), dtype=torch.uint8) for name, one in found.items()
        }
        shard = self.folder / f"{hashlib.blake2b(' '.join(found).encode(), digest_size=16).hexdigest()}.safetensors"
        write_atomic(shard, save(found | sums))
        self.places |= dict.fromkeys(found, shard)
        return found


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


def _checksum(states: Tensor) -> bytes:
    return hashlib.blake2b(states.flatten().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
