"""The tree of drafts that a folder was planned with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference.models.passes import Tree
from inference.verify.rules import rule_of
from inference.verify.tree import depths_of


@dataclass(frozen=True)
class PlannedTree:
    """What a round drafts in place of a chain.

    parents: node i hangs on parents[i] < i, on the text where that is -1, as `shape=` of a proposer takes it. rule:
    tree or traversal, what verifies it. likeliest: whether children are the likeliest tokens, or sampled.
    Raises ValueError naming the key for anything else.
    """

    parents: Sequence[int]
    rule: str
    likeliest: bool = False

    def __post_init__(self) -> None:
        listed = isinstance(self.parents, Sequence) and not isinstance(self.parents, str)
        if not listed or any(isinstance(node, bool) or not isinstance(node, int) for node in self.parents):
            raise ValueError(f"tree.parents must be a list of whole numbers, not {self.parents!r}")
        object.__setattr__(self, "parents", tuple(self.parents))
        try:
            Tree(self.parents)
            rule = rule_of(self.rule)
        except (ValueError, TypeError) as error:
            raise ValueError(f"tree.{error}") from error
        if rule.branches is None:
            raise ValueError(f"tree.rule must be one that verifies trees, tree or traversal, not {self.rule!r}")
        if not isinstance(self.likeliest, bool):
            raise ValueError(f"tree.likeliest must be true or false, not {self.likeliest!r}")

    @classmethod
    def read(cls, values: Any) -> "PlannedTree | None":
        """From JSON, None of null. Raises ValueError naming the key."""
        if values is None:
            return None
        if not isinstance(values, Mapping) or set(values) != {"parents", "rule", "likeliest"}:
            raise ValueError(f"tree must hold parents, rule and likeliest, or be null, not {values!r}")
        return cls(**values)

    @property
    def depth(self) -> int:
        """Its levels, the most drafts of a round that may be accepted."""
        return max(depths_of(tuple(self.parents)))

    @property
    def most_children(self) -> int:
        """Of any node, the text's end included."""
        return max(map(self.parents.count, self.parents))
