"""Verification rules as pure functions; each rule of a chain of drafts is in `chain`, of a tree in `tree`."""

from inference.verify.chain import Verification, block, coupled, match, token
from inference.verify.tree import TreeVerification, traversal, tree

__all__ = ["TreeVerification", "Verification", "block", "coupled", "match", "token", "traversal", "tree"]
