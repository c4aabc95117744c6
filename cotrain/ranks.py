"""The rank of this process. It can be read before the processes of a run are connected."""

import os
import time
from collections.abc import Callable

from lightning.pytorch.utilities import rank_zero_only


def rank() -> int:
    """Return the rank of this process among all, as its launcher (Lightning, torchrun, SLURM) set it. A single process
    has rank 0."""
    return int(getattr(rank_zero_only, "rank", None) or 0)


def local_rank() -> int:
    """Return the rank of this process on its machine, from LOCAL_RANK (torchrun, Lightning) or SLURM_LOCALID. It is 0
    if neither is set."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def awaited(ready: Callable[[], bool], first: str) -> None:
    """Wait until `ready()` is true, because the first of several processes has produced a result.

    first: a description of that process, for the error message. Raises RuntimeError if the parent of this process ends.
    """
    parent = os.getppid()
    while not ready():
        if os.getppid() != parent:
            raise RuntimeError(f"{first} has ended")
        time.sleep(1)
