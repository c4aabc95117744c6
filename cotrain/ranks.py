"""Which of several processes this one is, before they have met."""

import os
import time
from collections.abc import Callable

from lightning.pytorch.utilities import rank_zero_only


def rank() -> int:
    """0 where there is one process, or of the first; as its launcher (Lightning, torchrun, SLURM) tells it."""
    return int(getattr(rank_zero_only, "rank", None) or 0)


def local_rank() -> int:
    """Of this machine's processes; torchrun and Lightning tell the first of these, SLURM the second."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def awaited(ready: Callable[[], bool], first: str) -> None:
    """Wait for what the first of several processes makes. first: that process, in words; raises RuntimeError when what
    started this one has gone."""
    parent = os.getppid()
    while not ready():
        if os.getppid() != parent:
            raise RuntimeError(f"{first} has ended")
        time.sleep(1)
