"""What a forced round says of a proposer that drafts trees.

Every child of every node is the text's next token there, so that all nodes of one depth stand behind the same text: the
first of them has the distributions of the round that stays on the text that far, whatever the shape.
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
    """How deep each row's nodes go."""
    assert proposal.tree is not None
    if proposal.tree.shape is None:
        return [max(row[: nodes + 1]) for row, nodes in zip(proposal.tree.depths.tolist(), proposal.k, strict=True)]
    depths = (0, *depths_of(proposal.tree.shape))
    return [max(depths[: nodes + 1]) for nodes in proposal.k]


def reach_grown(proposal: Proposal, x: Tensor, inside: Tensor, nodes: Tensor) -> Tensor:
    """`reach_along` of trees that distributions decide (`proposers.growing`): the very tree of a round, since its nodes
    are the likeliest tokens, whatever follows. What the text goes on with is accepted as far as it is a path."""
    assert proposal.tree is not None
    tree, ids = proposal.tree.on(x.device), proposal.x.to(x.device)
    depths = tree.depths[:, 1:].expand(ids.shape)
    D = x.shape[1]
    met = (ids == x.gather(1, (depths - 1).clamp(max=D - 1))) & inside.gather(1, (depths - 1).clamp(max=D - 1))
    met &= torch.arange(ids.shape[1], device=x.device) < nodes.unsqueeze(1)
    along = ~(tree.ancestors & ~met.unsqueeze(1)).any(-1)  # (A, N) whether the node and all above it are the text's
    reach = torch.stack([(along & (depths == n)).any(1) for n in range(1, D + 1)], 1)
    return pad(reach.double(), (1, 0), value=1.0)


def reach_along(
    p: Tensor, drawn: Mapping[int, Tensor], offered: Mapping[int, Tensor], x: Tensor, inside: Tensor,
    shape: tuple[int, ...], nodes: Tensor, rule: Rule, certain: bool, seed: int,
) -> Tensor | None:  # fmt: skip
    """P(the round accepts at least n nodes | the text) -> (A, D+1) float64; None where that hangs on noise.

    p (A, N+1, V) of the target's pass; by depth, drawn (A, V): the distribution of the draft, offered (A, m): the
    children that it would have had, the likeliest ones where `certain`; x (A, D) the text's next tokens, inside (A, D)
    which of them there are; nodes (A,) in use.
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
    distributions = (
        torch.where(held, p[:, columns], 0).double(),
        torch.stack([drawn[j].to(p.device) for j in range(D)], 1),
    )
    return rule.branches(distributions[0], torch.where(held, distributions[1], 0).double(), x, shape, nodes, seed)


def close_ranks(scores: Tensor, m: int, gap: float) -> Tensor:
    """Whether rounding could change which are the m likeliest tokens, or their order: scores (A, V) -> (A,) bool."""
    if m == 1:
        return near_ties(scores, gap)
    top = scores.topk(min(m + 1, scores.shape[-1]), -1).values
    return ((top[:, :-1] - top[:, 1:]) < gap).any(-1)


def close_edge(scores: Tensor, kept: int, gap: float) -> Tensor:
    """Whether rounding could change which are the `kept` largest, in whatever order: scores (..., M) -> (...) bool."""
    if kept >= scores.shape[-1]:
        return torch.zeros(scores.shape[:-1], dtype=torch.bool, device=scores.device)
    top = scores.topk(kept + 1, -1).values
    return top[..., -1].isfinite() & (top[..., -2] - top[..., -1] < gap)
