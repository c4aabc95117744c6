"""The target's hidden states on disk, so that runs over the same texts read them once.

A shard holds the states of a batch of texts under a name that its ids give it: a run that was stopped, or the next one,
finds what is there. `teacher.json` says whose states they are. States are kept in the target's own dtype: what is read
back is what the target said, and the loss is the one of a live target.
"""

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from cotrain.evaluate import Read
from inference.atomic import write_atomic

MANIFEST = "teacher.json"


class Shards:
    """read: ids (B, T) -> hidden states (B, T, D), asked where `folder` lacks them. maker: what identifies the target
    and its tokenizer (JSON values).

    Raises ValueError naming trainer.cache when the folder was made by another target or tokenizer.
    """

    def __init__(self, read: Read, folder: Path, maker: dict[str, str | None]) -> None:
        self.read, self.folder = read, folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / MANIFEST
        if not path.exists():
            write_atomic(path, json.dumps(maker, indent=2) + "\n")
        found = json.loads(path.read_text(encoding="utf-8"))
        differ = [key for key in {**found, **maker} if found.get(key) != maker.get(key)]
        if differ:
            raise ValueError(f"trainer.cache={folder}: made by another target, its {', '.join(sorted(differ))} differ")

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
        path = self.folder / f"{_digest(ids, position_ids)}.safetensors"
        if path.exists():
            try:
                kept = load_file(path)
            except (SafetensorError, OSError):
                kept = {}
            if kept and _checksum(kept["states"]) == kept["checksum"].numpy().tobytes():
                return kept["states"].to(ids.device)
        states = self.read(ids, position_ids)
        held = states.detach().cpu().contiguous()
        checksum = torch.frombuffer(bytearray(_checksum(held)), dtype=torch.uint8)
        write_atomic(path, save({"states": held, "checksum": checksum}))
        return states


def _digest(ids: Tensor, position_ids: Tensor | None) -> str:
    named = hashlib.blake2b(repr(tuple(ids.shape)).encode(), digest_size=16)
    for part in (ids, position_ids):
        named.update(b"" if part is None else part.long().cpu().numpy().tobytes())
    return named.hexdigest()


def _checksum(states: Tensor) -> bytes:
    return hashlib.blake2b(states.flatten().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
