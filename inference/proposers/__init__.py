"""Proposer kinds, one class a file."""

from inference.proposers.independent import Independent
from inference.proposers.retrieval import NGram

__all__ = ["Independent", "NGram"]
