"""The proposers, one file per kind of draft. `kinds.KINDS` lists them."""

from inference.proposers.independent import Independent
from inference.proposers.kinds import KINDS, kind_of
from inference.proposers.parallel import Parallel
from inference.proposers.retrieval import NGram

__all__ = ["KINDS", "Independent", "NGram", "Parallel", "kind_of"]
