"""Verification rules as pure functions. The rules for chains of drafts are in `chain`, those for trees in `tree`."""

from inference.verify.chain import Verification, block, coupled, match, token
from inference.verify.tree import TreeVerification, traversal, tree

__all__ = ["TreeVerification", "Verification", "block", "coupled", "match", "token", "traversal", "tree"]
