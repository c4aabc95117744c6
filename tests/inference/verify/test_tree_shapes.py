"""Shapes of trees; children drawn without replacement, with the distribution of their order; dynamic shapes."""

import itertools

import pytest
import torch

from inference.sampling.noise import CHILDREN, children_states, gumbel, gumbel_after, gumbel_states
from inference.verify import traversal, tree
from inference.verify.predict_tree import rank_of
from inference.verify.tree import (
    best,
    chain,
    child_scores,
    from_paths,
    full,
    levels,
    likeliest,
    paths_of,
    pruned,
    sampled,
)
from tests.exact import F64, Tree, chi_square, distributions
from tests.trees import depth, judged, topologies


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
        g = gumbel_after(children_states(3, one[:1], one[:1]), many.unsqueeze(0), 4)[0].unsqueeze(1)
    else:
        states = children_states(3, many if part == "row" else one, many if part == "start" else one)
        g = gumbel_after(states, one.unsqueeze(1), 4)
    ids = sampled(probs.expand(runs, 1, 4), g, 3)[:, 0]
    counts = torch.bincount((ids * torch.tensor([16, 4, 1])).sum(-1), minlength=64).double()
    expected = torch.zeros(64, dtype=F64)
    for (a, b, c), chance in orders(probs, 3):
        expected[16 * a + 4 * b + c] = chance * runs
    possible = expected > 0
    assert counts[~possible].sum() == 0 and chi_square(counts[possible], expected[possible]) > 1e-3


def test_the_noise_of_children_is_of_its_own_stream():
    row, node = torch.arange(50), torch.zeros(50, 1, dtype=torch.int64)
    mine = gumbel_after(children_states(0, row, node[:, 0]), node, 7)
    assert CHILDREN not in (1, 2, 3, 4) and not torch.isclose(mine, gumbel(0, row, node, 7)).any()
    assert not torch.isclose(mine, gumbel_after(gumbel_states(0, row), node, 7)).any()
    assert not torch.isclose(mine, gumbel_after(children_states(0, row, node[:, 0] + 1), node, 7)).any()
    assert not torch.isclose(mine, gumbel_after(children_states(1, row, node[:, 0]), node, 7)).any()


def test_tokens_without_mass_come_last():
    probs = torch.tensor([[[0.0, 0.7, 0.0, 0.3]]], dtype=F64).expand(200, 1, 4)
    states = children_states(0, torch.arange(200), torch.arange(200))
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


def test_pruning_selects_whole_paths():
    """EAGLE-2's second step compared with its definition, equal scores included."""
    A, M, N = 30, 12, 6
    parents = torch.stack([torch.randint(-1, i, (A,)) for i in range(M)], 1)
    own = torch.randint(-2, 1, (A, M)).double()  # many children are as likely as their parent
    score = own.clone()
    for i in range(M):
        at = parents[:, i]
        score[:, i] += torch.where(at >= 0, score.gather(1, at.clamp(min=0).unsqueeze(1))[:, 0], 0.0)
    nodes, above = pruned(parents, score, N)
    for a in range(A):
        selected = nodes[a].tolist()
        assert selected == sorted(sorted(range(M), key=lambda i: (-score[a, i], i))[:N])
        assert [selected[i] if i >= 0 else -1 for i in above[a].tolist()] == parents[a, selected].tolist()
        assert (above[a] < torch.arange(N)).all()


def test_a_child_is_decided_by_the_largest_masses():
    """Scores are the same for any assignment of the masses to ids: which token a child is does not matter."""
    probs, score = distributions("dense", 6, 8).view(4, 2, 6), torch.rand(4, 2, dtype=F64).log()
    scores = child_scores(score, probs, 3)
    torch.testing.assert_close(scores, score.unsqueeze(-1) + probs.sort(-1, descending=True).values[..., :3].log())
    assert torch.equal(scores, child_scores(score, probs[..., torch.randperm(6)], 3))


def grown(distributions_: Tree, V: int):
    """All drafts of two levels of two nodes, the second level's parents chosen by distributions, each with its
    chance."""
    first = [(ids, chance) for ids, chance in orders(distributions_.q[0][0], 2)]
    pair = torch.tensor([ids for ids, _ in first])  # (A, 2)
    score = child_scores(torch.zeros(len(first), 1, dtype=F64), distributions_.q[0].expand(len(first), 1, V), 2)[:, 0]
    wanted = child_scores(score, distributions_.q[1][pair], 2)  # (A, 2, 2)
    selected = best(wanted.flatten(1), 2)
    for (ids, chance), at in zip(first, selected.tolist(), strict=True):
        above = [each // 2 for each in at]
        for more in itertools.product(range(V), repeat=2):
            after, left = 1.0, 1.0
            for n, token in enumerate(more):
                probs = distributions_.q[1][ids[above[n]]]
                repeated = n == 1 and above[0] == above[1]
                left = 1 - float(probs[more[0]]) if repeated else 1.0
                after *= float(probs[token]) / left * (not (repeated and token == more[0]))
            if after > 0:
                yield ids + more, [-1, -1, *above], chance * after


@pytest.mark.parametrize("rule", [tree, traversal])
def test_a_dynamic_shape_stays_exact(rule):
    """The distributions after the first level's tokens decide the parents of the second level."""
    V, distributions_ = 3, Tree(3, 2, ("dense", "dense"))
    distributions_.q[0] = torch.tensor([[0.5, 0.3, 0.2]], dtype=F64)
    distributions_.q[1] = torch.tensor([[0.45, 0.4, 0.15], [0.96, 0.03, 0.01], [0.4, 0.3, 0.3]], dtype=F64)
    drafts = list(grown(distributions_, V))
    assert len({tuple(parents) for _, parents, _ in drafts}) > 1
    x, parents = (torch.tensor([row[i] for row in drafts]) for i in range(2))
    chance = torch.tensor([row[2] for row in drafts], dtype=F64)
    prefix = x[:, :2].gather(1, parents[:, 2:])
    p = torch.stack([distributions_.p[0].expand(len(x), V), *(distributions_.p[1][x[:, i]] for i in range(2)),
                     *(distributions_.p[2][prefix[:, i] * V + x[:, 2 + i]] for i in range(2))], 1)  # fmt: skip
    q = torch.stack(
        [*[distributions_.q[0].expand(len(x), V)] * 2, *(distributions_.q[1][prefix[:, i]] for i in range(2))], 1
    )
    name = rule.__name__
    rows = zip(p.tolist(), q.tolist(), x.tolist(), parents.tolist(), strict=True)
    t = torch.tensor([judged(name, *row, False)[0] for row in rows], dtype=F64)
    probs = torch.zeros_like(distributions_.joint())
    for pattern in itertools.product((True, False), repeat=4):
        cell = torch.tensor(pattern)
        verification = rule(p, q, x, parents, torch.where(cell, t / 2, (1 + t) / 2))
        weight = chance * torch.where(cell, t, 1 - t).prod(-1)
        probs += distributions_.emitted(x.gather(1, verification.path.clamp(min=0)), verification, weight)
    assert (probs - distributions_.joint()).abs().max() < 1e-12
