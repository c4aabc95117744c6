"""The search for a shape against every shape there is."""

import pytest
import torch

from inference.measure.tree_shapes import calls_left, candidates, gains, grow
from inference.verify import predict_chain
from inference.verify.predict_tree import of_rounds, reach_tree
from inference.verify.tree import chain, from_paths, paths_of
from tests.exact import F64
from tests.trees import depth, siblings_before, topologies

ALL = [parents for N in range(6) for parents in topologies(N)]


def shapes(C: int) -> list[tuple[int, ...]]:
    """One tuple of parents for each tree of up to five nodes with at most C children a node."""
    result = {from_paths(paths_of(parents)) for parents in ALL}
    return [p for p in result if all(len(siblings_before(p, node)) < C for node in range(len(p)))]


def accepts(B: int, T: int, C: int) -> torch.Tensor:
    """Chances of children whose sum is below 1 and that come in runs, as those of texts do."""
    hard = torch.rand(B, T, 1, dtype=F64).repeat_interleave(3, 1)[:, :T]
    share = torch.rand(B, T, C + 1, dtype=F64).softmax(-1) * torch.tensor([4.0, 2.0, 1.0][:C] + [1.0], dtype=F64)
    return share[..., :C] / share.sum(-1, keepdim=True) * (1 - hard / 2)


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_grown_trees_save_what_the_best_of_all_trees_do(levels):
    lengths = torch.tensor([30, 7, 22, 30])
    accept = accepts(4, 30, 2)
    reaches = {parents: reach_tree(accept, parents, lengths) for parents in shapes(2)}
    calls = {parents: float(predict_chain.calls_from(reach, lengths).sum()) for parents, reach in reaches.items()}
    whole = grow(accept, 5, levels, lengths)
    assert depth(whole) <= levels
    for n in range(len(whole) + 1):
        least = min(c for parents, c in calls.items() if len(parents) == n and depth(parents) <= levels)
        own = calls[from_paths(paths_of(whole[:n]))]
        assert own <= least * 1.005, (n, whole[:n])
    if levels == 1:
        assert whole == (-1, -1)  # there are no more children


def test_growth_chooses_the_better_of_siblings_and_levels():
    """Texts that always follow the first child want a chain, texts that never do want the second child."""
    first, second = torch.tensor([0.9, 0.02]).expand(2, 12, 2), torch.tensor([0.3, 0.6]).expand(2, 12, 2)
    assert grow(first.double(), 3, 4) == (-1, 0, 1)
    assert grow(second.double(), 3, 4) == (-1, -1, 1)


def test_growth_continues_from_the_given_nodes():
    result = grow(accepts(3, 20, 2), 6, 4, start=chain(3))
    assert len(result) == 6 and result[:3] == chain(3) and depth(result) <= 4


def test_first_order_gains_are_derivatives_of_the_calls():
    """A node that is there with a small chance saves that share of its gain."""
    accept, lengths, small = accepts(3, 20, 2), torch.tensor([20, 9, 15]), 1e-6
    parents = (-1, 0, -1, 0)
    tables = [of_rounds(accept, level, lengths) for level in range(3)]
    result = candidates(parents, tables, torch.ones(3, 20, dtype=F64))
    assert {node: level for node, (level, _) in result.items()} == {1: 3, 2: 2, 3: 3}  # the anchor and node 0 have two
    for node, gain in gains(accept, parents, result, lengths).items():
        level, chance = result[node]
        reach = torch.nn.functional.pad(reach_tree(accept, parents, lengths), (0, 1))
        more = reach.clone()
        more[..., level] += small * chance
        saved = (predict_chain.calls_from(reach, lengths) - predict_chain.calls_from(more, lengths)).sum() / small
        assert gain == pytest.approx(float(saved), rel=1e-4)


def test_calls_left_are_those_of_the_rest_of_the_text():
    accept, lengths = accepts(3, 12, 2), torch.tensor([12, 5, 1])
    reach = reach_tree(accept, (-1, -1, 0), lengths)
    left = calls_left(reach, lengths)
    for t in range(12):
        rest = predict_chain.calls_from(reach[:, t:], (lengths - t).clamp(min=0))
        torch.testing.assert_close(left[:, t], rest, rtol=0, atol=1e-12)
