"""Which of several processes this one is, before they have met."""

import os

from lightning.pytorch.utilities import rank_zero_only


def rank() -> int:
    """0 where there is one process, or of the first; as its launcher (Lightning, torchrun, SLURM) tells it."""
    return int(getattr(rank_zero_only, "rank", None) or 0)


def local_rank() -> int:
    """Of this machine's processes; torchrun and Lightning tell the first of these, SLURM the second."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
