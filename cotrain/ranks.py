"""Which of several processes this one is, before they have met."""

from lightning.pytorch.utilities import rank_zero_only


def rank() -> int:
    """0 where there is one process, or of the first; as its launcher (Lightning, torchrun, SLURM) tells it."""
    return int(getattr(rank_zero_only, "rank", None) or 0)
