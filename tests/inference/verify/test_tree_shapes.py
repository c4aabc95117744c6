"""Shapes of trees; children drawn without replacement, with the distribution of their order."""

import itertools

import pytest
import torch

from inference.sampling.noise import branch_states, gumbel_after, states_at
from inference.verify.predict_tree import rank_of
from inference.verify.tree import (
    chain,
    from_paths,
    full,
    levels,
    likeliest,
    paths_of,
    sampled,
)
from tests.exact import F64, chi_square
from tests.trees import depth, topologies


def test_shapes():
    assert chain(3) == (-1, 0, 1) and chain(0) == ()
    assert full((2, 1)) == (-1, -1, 0, 1) and full(()) == () and full((1, 3)) == (-1, 0, 0, 0)
    assert from_paths([(1,), (0, 1, 0)]) == (-1, -1, 0, 0, 3)  # (0,) (1,) (0,0) (0,1) (0,1,0)
    assert paths_of((-1, -1, 0, 0, 3)) == [(0,), (1,), (0, 0), (0, 1), (0, 1, 0)]
    for parents in topologies(4):
        assert sorted(paths_of(from_paths(paths_of(parents)))) == sorted(paths_of(parents))


def test_levels_give_each_node_its_parent_and_rank():
    """Nodes whose id is their path: level by level, every child gets its parent's path and its own rank."""
    for parents in [*topologies(4), full((2, 3, 2)), (-1, 0, -1, 2, 1, 2, 0)]:
        paths, above = {}, [()]
        for nodes, indices, ranks in levels(parents):
            above = [(*above[index], rank) for index, rank in zip(indices, ranks, strict=True)]
            paths |= dict(zip(nodes, above, strict=True))
        assert [paths[node] for node in range(len(parents))] == paths_of(parents)
        assert len(levels(parents)) == depth(parents)


def orders(probs: torch.Tensor, m: int):
    """Ordered draws without replacement and their probabilities, one by one."""
    for ids in itertools.permutations(range(len(probs)), m):
        chance, left = 1.0, 1.0
        for token in ids:
            chance, left = chance * float(probs[token]) / left, left - float(probs[token])
        yield ids, chance


@pytest.mark.parametrize("part", ["row", "start", "node"])
def test_children_come_in_the_order_of_draws_one_by_one(part):
    """Chi-square of the ordered triples, over rows, over round starts and over nodes."""
    runs, probs = 20_000, torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=F64)
    many, one = torch.arange(runs), torch.zeros(runs, dtype=torch.int64)
    if part == "node":
        g = gumbel_after(states_at(branch_states(3, one[:1]), one[:1]), many.unsqueeze(0), 4)[0].unsqueeze(1)
    else:
        states = states_at(branch_states(3, many if part == "row" else one), many if part == "start" else one)
        g = gumbel_after(states, one.unsqueeze(1), 4)
    ids = sampled(probs.expand(runs, 1, 4), g, 3)[:, 0]
    counts = torch.bincount((ids * torch.tensor([16, 4, 1])).sum(-1), minlength=64).double()
    expected = torch.zeros(64, dtype=F64)
    for (a, b, c), chance in orders(probs, 3):
        expected[16 * a + 4 * b + c] = chance * runs
    possible = expected > 0
    assert counts[~possible].sum() == 0 and chi_square(counts[possible], expected[possible]) > 1e-3


def test_tokens_without_mass_come_last():
    probs = torch.tensor([[[0.0, 0.7, 0.0, 0.3]]], dtype=F64).expand(200, 1, 4)
    states = states_at(branch_states(0, torch.arange(200)), torch.arange(200))
    ids = sampled(probs, gumbel_after(states, torch.zeros(200, 1, dtype=torch.int64), 4), 3)
    assert {tuple(sorted(pair)) for pair in ids[:, 0, :2].tolist()} == {(1, 3)}
    assert (probs[:, 0].gather(1, ids[:, 0, 2:]) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_have_the_ranks_that_are_predicted(dtype):
    probs = (torch.randint(6, (40, 3, 9)) / 8).to(dtype)  # many ties
    ids = likeliest(probs, 5)
    assert (probs.gather(-1, ids).diff() <= 0).all()
    for c in range(5):
        assert (rank_of(probs, ids[..., c]) == c).all()
