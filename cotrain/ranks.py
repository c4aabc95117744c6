"""The rank of this process, which can be read before the processes of a run are connected."""

import os
import re
import time
from collections.abc import Callable

from lightning.pytorch.utilities import rank_zero_only

from cotrain.errors import UserError

RESUMES = "its own message or the machine's log says why. What was saved is kept, and the same command resumes"
# in errors of gloo, of NCCL and of the store that the first process has
LOST = re.compile(r"onnection (was likely )?(closed|reset)|[Bb]roken pipe|remote process exited|Application timeout")


def rank() -> int:
    """Return this process's rank among all processes of the run, as its launcher (Lightning, torchrun, SLURM) set it; 0
    for a single process."""
    return int(getattr(rank_zero_only, "rank", None) or 0)


def local_rank() -> int:
    """Return this process's rank on its machine, from LOCAL_RANK (torchrun, Lightning) or SLURM_LOCALID; 0 if neither
    is set."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def awaited(ready: Callable[[], bool], first: str) -> None:
    """Wait until `ready()` returns true; it is called once a second. This is for a result that the first process of a
    run produces.

    first: a description of the first process for the error message, such as "the process that samples texts". Raises
    UserError if the parent of this process ends.
    """
    parent = os.getppid()
    while not ready():
        if os.getppid() != parent:
            raise UserError(f"{first} has ended; {RESUMES}")
        time.sleep(1)


def process_lost(error: BaseException) -> bool:
    """Return whether the error means that another process of the run has ended; torch's collectives then raise it."""
    return isinstance(error, RuntimeError) and bool(LOST.search(str(error)))
