"""What a decoding round does for trees of drafts alone: distributions along paths, and the children of a level.

A rows, n nodes, m children, M nodes drafted so far, V vocabulary.
"""

from functools import cached_property, partial

import torch
from torch import Tensor

from inference.batched.batch import Batch
from inference.batched.children import children
from inference.models.passes import Tree
from inference.noise import Uniforms, gumbel_after, started
from inference.proposers.base import Siblings
from inference.settled import paths_of
from inference.verify.rules import Rule


class TreesOfRound:
    """Part of `round.DecodingRound`, which has what is named here."""

    batch: Batch
    rule: Rule
    noise: Uniforms
    vocabulary: int
    device: torch.device
    lengths: list[int]

    def send(self, k: list[int] | None = None) -> dict[str, Tensor]:
        raise NotImplementedError

    def _processed(self, logits: Tensor, x: Tensor, k: list[int], first: int) -> Tensor:
        raise NotImplementedError

    @cached_property
    def _gumbel(self) -> Tensor:
        raise NotImplementedError

    def _branched(self, logits: Tensor, x: Tensor, k: list[int], tree: Tree) -> Tensor:
        """As `_processed`, column by column: what stands before a node is the path to it."""
        columns = [self._processed(logits[:, :1], x[:, :0], [0] * len(k), 0)]
        if tree.shape is None:  # rows whose settings read history have drafted nothing
            return torch.cat((*columns, logits[:, 1:].to(columns[0].dtype)), 1)
        for node, path in enumerate(paths_of(tree)):
            before, needed = torch.stack([x[:, i] for i in path], 1), [len(path) if n > node else -1 for n in k]
            columns.append(self._processed(logits[:, node + 1 : node + 2], before, needed, len(path)))
        return torch.cat(columns, 1)

    def children(self, logits: Tensor, x: Tensor, siblings: Siblings, likeliest: bool = False) -> tuple[Tensor, Tensor]:
        """See `base.Round.children`."""
        scores = self.branch_scores(logits.to(self.device), x.to(self.device), siblings)
        keys, depth = siblings.keys.to(self.device), len(siblings.paths[0])
        noise = partial(self._gumbel_of, keys, depth)
        return children(self.batch.regimes, scores, siblings.most, noise, likeliest)

    def left_out(self, scores: Tensor, kept: int, levels: int) -> None:
        """See `base.Round.left_out`; serving has no use for it."""

    def branch_scores(self, logits: Tensor, x: Tensor, siblings: Siblings) -> Tensor:
        """Logits (A, n, V) behind nodes, as settings that read history leave them."""
        if not self.batch.history:
            return logits
        columns = []
        for node, (path, first) in enumerate(zip(siblings.paths, siblings.first, strict=True)):
            before = torch.stack([x[:, i] for i in path], 1) if path else x[:, :0]
            needed = [len(path) if n > first else -1 for n in self.lengths]
            columns.append(self._processed(logits[:, node : node + 1], before, needed, len(path)))
        return torch.cat(columns, 1)

    def _gumbel_of(self, keys: Tensor, depth: int) -> Tensor:
        """Noise that draws children of nodes keys (n,) of one depth -> (A, n or 1, V): of their own, or that of the
        place, shared with the target."""
        if self.rule.shared:
            depth = min(depth, self._gumbel.shape[1] - 1)  # deeper than any row drafts
            return self._gumbel[:, depth : depth + 1]
        return gumbel_after(self._children, keys.unsqueeze(0), self.vocabulary)

    @cached_property
    def _children(self) -> Tensor:
        return started(self._branches, self.send()["start"])

    @cached_property
    def _branches(self) -> Tensor:
        return self.batch.branch_states(self.noise.seed)
