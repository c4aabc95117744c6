"""Verification rules as pure functions; each rule of a chain of drafts is in `chain`, of a tree in `tree`."""

from inference.verify.chain import Verdict, block, coupled, match, token
from inference.verify.tree import TreeVerdict, traversal, tree

__all__ = ["TreeVerdict", "Verdict", "block", "coupled", "match", "token", "traversal", "tree"]
