"""The rank of this process. It can be read before the processes of a run are connected."""

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
    """Return the rank of this process among all, as its launcher (Lightning, torchrun, SLURM) set it. A single process
    has rank 0."""
    return int(getattr(rank_zero_only, "rank", None) or 0)


def local_rank() -> int:
    """Return the rank of this process on its machine, from LOCAL_RANK (torchrun, Lightning) or SLURM_LOCALID. It is 0
    if neither is set."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def awaited(ready: Callable[[], bool], first: str) -> None:
    """Wait until `ready()` is true, which is called once a second. It is for a result that the first of several
    processes produces.

    first: a description of that process, for the error message. Raises UserError if the parent of this process ends.
    """
    parent = os.getppid()
    while not ready():
        if os.getppid() != parent:
            raise UserError(f"{first} has ended; {RESUMES}")
        time.sleep(1)


def process_lost(error: BaseException) -> bool:
    """Return whether an error of torch's collectives says that another process of the run has ended."""
    return isinstance(error, RuntimeError) and bool(LOST.search(str(error)))
