"""Predicted acceptance of trees against the rule itself, enumerated: every text, draft and outcome."""

import itertools

import pytest
import torch

from inference.verify import predict_chain, traversal, tree
from inference.verify.predict_chain import calls_from, variance_from
from inference.verify.predict_tree import (
    by_draw,
    by_rank,
    rank_of,
    reach_traversal,
    reach_tree,
)
from tests.exact import F64, distributions
from tests.inference.verify.test_tree import cells
from tests.trees import Case, depth, siblings_before, topologies

SMALL = [parents for N in (1, 2, 3) for parents in topologies(N)]
TREES = [*SMALL, *topologies(4)[::4], (-1, -1, 0, 0, 1, 1)]


def most_children(parents) -> int:
    return max(len(siblings_before(parents, node)) for node in range(len(parents))) + 1


def texts(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every text of D + 1 tokens, with p and q at each of its tokens; q of the last, which no draft reaches, is p."""
    x = torch.tensor(list(itertools.product(range(case.V), repeat=case.D + 1)))
    at = [case.distributions.number(x[:, :t]) for t in range(case.D + 1)]
    p = torch.stack([case.distributions.p[t][at[t]] for t in range(case.D + 1)], 1)
    q = torch.stack([*(case.distributions.q[t][at[t]] for t in range(case.D)), p[:, -1]], 1)
    return x, p, q


def table(case: Case, children: int) -> torch.Tensor:
    x, p, q = texts(case)
    if case.mode == "deterministic":
        return by_rank(rank_of(q, x), children)
    return by_draw(p, q, x, children)


@pytest.mark.parametrize("mode", ["without", "deterministic"])
def test_the_joint_of_text_and_accepted_is_that_of_the_rule(mode):
    """P(text) P(at least n accepted | text), for every text and n, is what the rule's outcomes add up to."""
    for parents in TREES:
        children = most_children(parents)
        if mode == "without" and children > 2:
            continue
        case = Case(parents, mode, 2 if len(parents) > 4 else 3, kinds=("dense", "dense"))
        reach = reach_tree(table(case, children), parents)[:, 0]  # of the round that starts the text
        at, u, chance = cells("tree", case)
        verdict = tree(case.p[at], case.q[at], case.x[at], parents, u)
        for n in range(case.D + 1):
            of = verdict.accepted >= n
            one = type(verdict)(verdict.accepted[of], verdict.path[of], verdict.probs[of])
            joint = case.emitted(case.x[at][of], one, chance[of])
            assert (joint - case.distributions.joint() * reach[:, n]).abs().max() < 1e-12, (parents, n)
        assert reach.shape[1] == depth(parents) + 1


def test_traversal_is_predicted_on_the_texts_of_the_rule():
    """As above. Of two tokens only one can be refused, so that nothing is left to draw and the joint is exact."""
    for parents, V in [
        *((parents, 2) for parents in SMALL[1:] + topologies(4)[1::4]),
        ((-1, -1, 0), 3),
        ((-1, -1, -1, 0), 3),
    ]:
        case = Case(parents, "without", V)
        x, p, q = texts(case)
        reach = reach_traversal(p, q, x, parents, samples=1 if V == 2 else 64)
        at, u, chance = cells("traversal", case)
        verdict = traversal(case.p[at], case.q[at], case.x[at], parents, u)
        for n in range(case.D + 1):
            of = verdict.accepted >= n
            one = type(verdict)(verdict.accepted[of], verdict.path[of], verdict.probs[of])
            joint = case.emitted(case.x[at][of], one, chance[of])
            error = (joint - case.distributions.joint() * reach[:, 0, n]).abs().max()
            assert error < (1e-12 if V == 2 else 1e-3), (parents, n)


def test_traversal_of_a_chain_is_predicted_as_block():
    B, T, V, K = 3, 9, 4, 3
    p, q = distributions("dense", V, B * T).view(B, T, V), distributions("dense", V, B * T * K).view(B, T, K, V)
    x = torch.randint(V, (B, T))
    lengths = torch.tensor([9, 2, 6])
    at = x.unsqueeze(-1), x.view(B, T, 1, 1).expand(B, T, K, 1)
    logs = [probs.log().gather(-1, ids).squeeze(-1) for probs, ids in zip((p, q), at, strict=True)]
    l = logs[1] - logs[0].unsqueeze(-1)
    wanted = predict_chain.reach_block(l, K, lengths)
    torch.testing.assert_close(reach_traversal(p, q, x, (-1, 0, 1), lengths), wanted, rtol=0, atol=1e-12)
    past = torch.arange(T) >= lengths.unsqueeze(-1)
    p[past], q[past] = torch.nan, torch.nan
    torch.testing.assert_close(reach_traversal(p, q, x, (-1, 0, 1), lengths, samples=2), wanted, rtol=0, atol=1e-12)
    each = torch.randint(K + 1, (B, T))
    some, wanted = reach_traversal(p, q, x, (-1, 0, 1), lengths, each), predict_chain.reach_block(l, each, lengths)
    assert torch.equal(some[..., :1], wanted[..., :1]) and wanted.shape[-1] <= K + 1
    torch.testing.assert_close(some[..., : wanted.shape[-1]], wanted, rtol=0, atol=1e-12)


def rejected_orders(p, q, count):
    """Every way to refuse `count` children in turn, without replacement: (chance, p, q) after it."""
    if count == 0:
        return [(1.0, p, q)]
    orders = []
    for y in range(len(p)):
        chance = float((q - p).clamp(min=0)[y])
        if chance > 0:
            rest, left = (p - q).clamp(min=0), q.clone()
            left[y] = 0
            after = rejected_orders(rest / rest.sum(), left / left.sum() if left.sum() > 0 else left, count - 1)
            orders += [(chance * more, *pair) for more, *pair in after]
    return orders


def test_later_children_are_unbiased_and_their_noise_is_small():
    p, q = distributions("dense", 5, 6), distributions("dense", 5, 6)
    x = torch.tensor([0, 1, 2, 3, 4, 2])
    q[5, 4] = 0
    q[5] /= q[5].sum()
    exact = torch.zeros(6, 5, dtype=F64)
    for i, child in itertools.product(range(6), range(5)):
        for chance, probs, draft in rejected_orders(p[i], q[i], child):
            exact[i, child] += chance * torch.minimum(probs, draft)[x[i]] / p[i, x[i]]
    assert exact[:, 2:].amax() > 0.02
    runs = by_draw(p.repeat(200, 1, 1), q.repeat(200, 1, 1), x.repeat(200, 1), 5, samples=8)  # each place its own noise
    assert (runs[:, :, :2] - exact[:, :2]).abs().max() < 1e-14
    error = runs.std(0) / len(runs) ** 0.5
    assert ((runs.mean(0) - exact).abs() <= 4.5 * error + 1e-12).all()
    assert runs[:, :, 2].std(0).max() < 0.03
    assert torch.equal(by_draw(p[:4], q[:4], x[:4], 4, samples=8), runs[0, :4, :4])
    assert not torch.equal(by_draw(p, q, x, 5, samples=8, seed=1), runs[0])


def test_ranks_count_from_the_likeliest_with_ties_by_id():
    probs = torch.tensor([0.2, 0.3, 0.2, 0.3, 0.0])
    assert rank_of(probs.expand(5, 5), torch.arange(5)).tolist() == [2, 0, 3, 1, 4]
    assert by_rank(torch.tensor([[0, 2]]), 2).tolist() == [[[1, 0], [0, 0]]]


def simulated(ranks: list[list[int]], parents: tuple[int, ...], length: int) -> int:
    """Calls of one text by walking it; ranks[t][j] of token t at depth j."""
    children = {(parent, len(siblings_before(parents, node))): node for node, parent in enumerate(parents)}
    t = calls = 0
    while t < length:
        node, level, calls = -1, 0, calls + 1
        while t < length and level < len(ranks[t]) and (node, ranks[t][level]) in children:
            node, level, t = children[node, ranks[t][level]], level + 1, t + 1
        t += 1
    return calls


def test_calls_of_deterministic_trees_are_a_walk_of_the_text():
    B, T, K = 12, 40, 4
    ranks = torch.randint(3, (B, T, K))
    lengths = torch.randint(1, T + 1, (B,))
    accept = by_rank(ranks, 2)
    accept[torch.arange(T) >= lengths.unsqueeze(-1)] = torch.nan  # past the end nothing is read
    for j in range(1, K):
        accept[:, :j, j] = torch.nan
    for parents in [*topologies(4)[::3], (-1, 0, 1, 2), (-1, -1, 0, 0, 1, 1, 2)]:
        if most_children(parents) > 2:
            continue
        truth = [simulated(ranks[b].tolist(), parents, int(lengths[b])) for b in range(B)]
        reach = reach_tree(accept, parents, lengths)
        assert calls_from(reach, lengths).tolist() == truth and (variance_from(reach, lengths) == 0).all()
        used = torch.randint(len(parents) + 1, (B,))  # the first k_b nodes alone
        some = [simulated(ranks[b].tolist(), parents[: used[b]], int(lengths[b])) for b in range(B)]
        assert calls_from(reach_tree(accept, parents, lengths, used), lengths).tolist() == some
        each = torch.where(torch.arange(T) % 2 == 0, used.unsqueeze(-1), 0)
        assert torch.equal(
            reach_tree(accept, parents, lengths, each)[:, ::2], reach_tree(accept, parents, lengths, used)[:, ::2]
        )
        assert (reach_tree(accept, parents, lengths, each)[:, 1::2, 1:] == 0).all()


def test_a_tree_larger_than_the_table_is_rejected():
    with pytest.raises(ValueError, match="2 levels and up to 2 children"):
        reach_tree(torch.rand(1, 5, 1), (-1, -1, 0))
    with pytest.raises(ValueError, match="3 levels"):
        reach_tree(torch.rand(1, 5, 2, 1), (-1, 0, 1))
    with pytest.raises(ValueError, match="give a node before it"):
        reach_tree(torch.rand(1, 5, 2), (0,))
