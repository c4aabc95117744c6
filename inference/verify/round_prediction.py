"""What one round with a tree of drafts accepts, given the text, from the distributions of its own levels: of any kind
of draft.

`tree_prediction` says it of every round of a text whose distributions are known at once; here they come round by round.
A rows, D levels, C children, V vocabulary; parents as in `tree`.
"""

from torch import Tensor

from inference.sampling import wide
from inference.verify.traversal_prediction import summed, traversed
from inference.verify.tree import ranks_of
from inference.verify.tree_prediction import SAMPLES, by_draw, reached, strata


def reach_of_round(accept: Tensor, parents: tuple[int, ...], k: Tensor) -> Tensor:
    """`reach_tree` of one round a row -> (A, D+1), from the chances accept (A, D, C) of its next tokens by level; k
    (A,) nodes in use."""
    tables = [part.unsqueeze(1) for part in accept.unbind(1)]
    return reached(tables, accept.new_ones(len(accept), 1), parents, k).squeeze(1)


def by_levels(p: Tensor, q: Tensor, x: Tensor, parents: tuple[int, ...], k: Tensor, seed: int = 0) -> Tensor:
    """`reach_of_round` of sampled children -> (A, D+1): p, q (A, D, V) distributions of the next tokens x (A, D), which
    have no mass past the text's end; k (A,) nodes in use; seed: of the refused ones that are drawn, see `by_draw`."""
    return reach_of_round(by_draw(p, q, x, max(ranks_of(parents)) + 1, seed=seed), parents, k)


def traversal_by_levels(p: Tensor, q: Tensor, x: Tensor, parents: tuple[int, ...], k: Tensor, seed: int = 0) -> Tensor:
    """As `by_levels` under `tree.traversal`."""
    later = len(parents) - len(set(parents))
    u = strata(len(x), later, SAMPLES, seed, x.device).unsqueeze(1)
    distributions = [(wide(p[:, j : j + 1]), wide(q[:, j : j + 1]), x[:, j : j + 1, None]) for j in range(p.shape[1])]
    return summed(traversed(parents, False, distributions, u), parents, k.unsqueeze(1)).squeeze(1)
