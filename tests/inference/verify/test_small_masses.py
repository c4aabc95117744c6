"""Distributions so peaked that what they differ by is lost beside 1 in float32, as at low temperatures."""

import pytest
import torch

from inference.verify import block
from inference.verify.predict_tree import chances_traversal
from inference.verify.tree import traversal

TINY = 6e-8  # 1 + TINY is 1 + 2 TINY in float32
SURE = [1.0, 0.0, 0.0]
P, Q = [1 - TINY, TINY, 0.0], [1 - TINY, 0.0, TINY]


def distributions() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A first draft that both are sure of, and a second, which the target has no mass for."""
    return torch.tensor([[SURE, P, SURE]]), torch.tensor([[SURE, Q]]), torch.tensor([[0, 2]])


@pytest.mark.parametrize("u", [0.6, 0.9, 0.999])
def test_a_draft_is_accepted_if_only_the_next_one_is_wrong(u: float) -> None:
    """R = TINY and w = 1, so that h = 1: the first draft is kept, and the text goes on with what the target has more
    mass of."""
    p, q, x = distributions()
    verification = block(p, q, x, torch.full((1, 2), u))
    assert verification.accepted.tolist() == [1] and verification.probs[0].tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("u", [0.6, 0.9, 0.999])
def test_a_node_is_accepted_if_only_its_child_is_wrong(u: float) -> None:
    p, q, x = distributions()
    verification = traversal(p, q, x, (-1, 0), torch.full((1, 2), u))
    assert verification.accepted.tolist() == [1] and verification.probs[0].tolist() == [0.0, 1.0, 0.0]


def test_calls_of_peaked_distributions_are_those_of_float64() -> None:
    """Of every node a chance, of third children too."""
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(4, 24, 512, generator=draw) * 2.5
    n, tables = z + torch.randn(4, 24, 512, generator=draw) * 1.2, []
    x = torch.multinomial((z / 0.15).flatten(0, 1).double().softmax(-1), 1, generator=draw).view(4, 24)
    for dtype in (torch.float32, torch.float64):
        p, q = ((logits / 0.15).to(dtype).softmax(-1) for logits in (z, n))
        tables.append(chances_traversal(p, q, x, (-1, -1, -1, -1, 0, 0, 0, 1), torch.full((4,), 24), samples=2))
    assert all(bool(chances.isfinite().all()) for chances in tables)
    torch.testing.assert_close(tables[0][..., :2].double(), tables[1][..., :2], atol=1e-3, rtol=0)  # others are drawn
