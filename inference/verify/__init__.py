"""Verification rules as pure functions; each rule of a chain of drafts is in `chain`."""

from inference.verify.chain import Verdict, block, coupled, match, token

__all__ = ["Verdict", "block", "coupled", "match", "token"]
