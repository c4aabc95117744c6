"""Rules for trees are exact: every draft and every outcome of the coins, in float64, against the rules node by node."""

import itertools
import math

import pytest
import torch

from inference.verify import block, token, tree
from inference.verify.lossy_typical import EXACT, lossy_typical
from inference.verify.tree import traversal
from tests.exact import F64, laws
from tests.trees import MODES, Case, decided, judged, path_of, topologies

RULES = {"tree": tree.tree, "traversal": traversal}
SMALL = [parents for N in range(1, 4) for parents in topologies(N)]
FOUR = topologies(4)


def cells(rule: str, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each draft in each cell of its coins: which draft, uniforms in the middle of the cell, and the chance."""
    found = [judged(rule, p, q, x, case.parents, case.replacement)[0] for p, q, x in rows(case)]
    t = torch.tensor(found, dtype=F64).view(-1, 1, case.N)
    passes = torch.tensor(list(itertools.product((True, False), repeat=case.N))).view(1, -1, case.N)
    u = torch.where(passes, t / 2, (1 + t) / 2)
    chance = case.weight.unsqueeze(-1) * torch.where(passes, t, 1 - t).prod(-1)
    return torch.arange(len(t)).repeat_interleave(u.shape[1]), u.flatten(0, 1), chance.flatten()


def rows(case: Case):
    return zip(case.p.tolist(), case.q.tolist(), case.x.tolist(), strict=True)


def enumerated(rule: str, case: Case) -> float:
    """The emitted law is the target's; returns the expected number accepted."""
    at, u, chance = cells(rule, case)
    q = None if case.mode == "deterministic" else case.q[at]
    verdict = RULES[rule](case.p[at], q, case.x[at], case.parents, u, replacement=case.replacement)
    assert (case.emitted(case.x[at], verdict, chance) - case.laws.joint()).abs().max() < 1e-12
    torch.testing.assert_close(verdict.law.sum(-1), torch.ones_like(chance), rtol=0, atol=1e-13)
    assert torch.equal((verdict.path >= 0).sum(-1), verdict.accepted)
    return (chance * verdict.accepted).sum().item()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kinds", [("dense", "dense"), ("truncated", "dense"), ("dense", "truncated")], ids="-".join)
def test_trees_of_up_to_three_nodes_emit_the_target_law(mode, kinds):
    for parents in SMALL:
        case = Case(parents, mode, kinds=kinds)
        by_tree, by_traversal = enumerated("tree", case), enumerated("traversal", case)
        assert by_traversal >= by_tree - 1e-12, parents


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("V", [2, 3])
def test_trees_of_four_nodes_emit_the_target_law(mode, V):
    gains = []
    for parents in FOUR if V == 2 else FOUR[::5]:
        case = Case(parents, mode, V)
        gains.append(enumerated("traversal", case) - enumerated("tree", case))
        assert gains[-1] >= -1e-12, parents
    assert mode == "deterministic" or max(gains) > 1e-3
