"""What a forced round says of a proposer that drafts trees.

Every child of every node is the text's next token there, so that all nodes of one depth stand behind the same text: the
first of them has the laws of the round that stays on the text that far, whatever the shape.
A rows, D levels, C children, V vocabulary.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from inference.exactness.ties import near_ties
from inference.proposers.base import Proposal
from inference.verify.round_prediction import reach_of_round
from inference.verify.rules import Rule
from inference.verify.tree import depths_of, ranks_of


def levels_of(proposal: Proposal) -> list[int]:
    """How deep each row's nodes go. Raises ValueError for trees whose shape the host does not know."""
    tree = proposal.tree
    if tree is None or tree.shape is None:
        raise ValueError("exactness: forced rounds predict trees of one shape for all rows, known on the host")
    depths = (0, *depths_of(tree.shape))
    return [max(depths[: nodes + 1]) for nodes in proposal.k]


def reach_along(
    p: Tensor, drawn: Mapping[int, Tensor], offered: Mapping[int, Tensor], x: Tensor, inside: Tensor,
    shape: tuple[int, ...], nodes: Tensor, rule: Rule, certain: bool, seed: int,
) -> Tensor | None:  # fmt: skip
    """P(the round accepts at least n nodes | the text) -> (A, D+1) float64; None where that hangs on noise.

    p (A, N+1, V) of the target's pass; by depth, drawn (A, V): the law of the draft, offered (A, m): the children that
    it would have had, the likeliest ones where `certain`; x (A, D) the text's next tokens, inside (A, D) which of them
    there are; nodes (A,) in use.
    """
    if rule.branches is None:
        return None
    depths = depths_of(shape)
    D = max(depths)
    if certain:
        C = max(ranks_of(shape)) + 1
        met = [pad(offered[j] == x[:, j : j + 1], (0, C - offered[j].shape[1])) for j in range(D)]
        accept = (torch.stack(met, 1) & inside.unsqueeze(-1)).double()
        return reach_of_round(accept, shape, nodes)
    columns = [0, *(1 + depths.index(depth) for depth in range(1, D))]
    held = inside.unsqueeze(-1)
    laws = torch.where(held, p[:, columns], 0).double(), torch.stack([drawn[j].to(p.device) for j in range(D)], 1)
    return rule.branches(laws[0], torch.where(held, laws[1], 0).double(), x, shape, nodes, seed)


def close_ranks(scores: Tensor, m: int, gap: float) -> Tensor:
    """Whether rounding could change which are the m likeliest tokens, or their order: scores (A, V) -> (A,) bool."""
    if m == 1:
        return near_ties(scores, gap)
    top = scores.topk(min(m + 1, scores.shape[-1]), -1).values
    return ((top[:, :-1] - top[:, 1:]) < gap).any(-1)
