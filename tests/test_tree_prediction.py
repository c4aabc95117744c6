"""Predicted acceptance of trees against the rule itself, enumerated: every text, draft and outcome."""

import itertools

import pytest
import torch

from cotrain import acceptance
from inference.verify import prediction, tree_prediction
from inference.verify.tree import tree
from inference.verify.tree_prediction import by_draw, by_rank, expected_calls_tree, rank_of, reach_tree
from tests.exact import F64, laws
from tests.test_tree_rules import cells
from tests.trees import Case, depth, siblings_before, topologies

TREES = [parents for N in (1, 2, 3) for parents in topologies(N)] + topologies(4)[::4] + [(-1, -1, 0, 0, 1, 1)]


def most_children(parents) -> int:
    return max(len(siblings_before(parents, node)) for node in range(len(parents))) + 1


def texts(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every text of D + 1 tokens, with p and q at each of its tokens; q of the last, which no draft reaches, is p."""
    x = torch.tensor(list(itertools.product(range(case.V), repeat=case.D + 1)))
    at = [case.laws.number(x[:, :t]) for t in range(case.D + 1)]
    p = torch.stack([case.laws.p[t][at[t]] for t in range(case.D + 1)], 1)
    q = torch.stack([*(case.laws.q[t][at[t]] for t in range(case.D)), p[:, -1]], 1)
    return x, p, q


def table(case: Case, children: int) -> torch.Tensor:
    x, p, q = texts(case)
    if case.mode == "deterministic":
        return by_rank(rank_of(q, x), children)
    return by_draw(p, q, x, children, replacement=case.replacement)


@pytest.mark.parametrize("mode", ["without", "with", "deterministic"])
def test_the_joint_of_text_and_accepted_is_that_of_the_rule(mode):
    """P(text) P(at least n accepted | text), for every text and n, is what the rule's outcomes add up to."""
    for parents in TREES:
        children = most_children(parents)
        if mode == "without" and children > 2:
            continue
        case = Case(parents, mode, 2 if len(parents) > 4 else 3, kinds=("dense", "dense"))
        reach = reach_tree(table(case, children), parents)[:, 0]  # of the round that starts the text
        at, u, chance = cells("tree", case)
        verdict = tree(case.p[at], case.q[at], case.x[at], parents, u, replacement=case.replacement)
        for n in range(case.D + 1):
            of = verdict.accepted >= n
            one = type(verdict)(verdict.accepted[of], verdict.path[of], verdict.law[of])
            joint = case.emitted(case.x[at][of], one, chance[of])
            assert (joint - case.laws.joint() * reach[:, n]).abs().max() < 1e-12, (parents, n)
        assert reach.shape[1] == depth(parents) + 1
