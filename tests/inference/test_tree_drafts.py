"""Trees that an independent draft makes: exact end to end, whatever the rule, the shape and who shares the batch; their
calls are those that forced rounds predict."""

from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.exactness.forced import reach_along
from inference.exactness.verdict import check
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.base import Siblings
from inference.proposers.trees import StaticTrees
from inference.verification import column_of
from inference.verify.predict_tree import by_draw, reach_traversal, reach_tree
from inference.verify.rules import RULES
from tests.inference.test_distribution import p_value, pair
from tests.inference.test_every_proposer import PROMPTS
from tests.often import often
from tests.tiny import emitted, near, tiny
from tests.trees import SHAPE

NAMES = ["tree", "traversal"]


def drafts(target: Any, shape: tuple[int, ...] = SHAPE, noise: float = 0.15, **settings: Any) -> Independent:
    return Independent(near(target, noise), shape=shape, **settings)


@pytest.mark.parametrize(("rule", "shape"), [("tree", (-1, -1, 0, 0, 1)), ("traversal", (-1, -1, -1, 1))])
def test_sampled_children_leave_the_targets_distribution(rule: str, shape: tuple[int, ...]) -> None:
    """Three tokens of several rounds, by chi-square."""
    target, draft = pair()
    assert p_value(target, Independent(draft, shape=shape), rule, samples=4000) > 1e-4


@pytest.mark.parametrize("rule", often(NAMES, {"tree"}.__contains__))
def test_likeliest_children_leave_the_targets_distribution(rule: str) -> None:
    target, draft = pair()
    assert p_value(target, Independent(draft, greedy=True, shape=(-1, -1, 0, 0, 1)), rule, samples=4000) > 1e-4


@pytest.mark.parametrize("rule", NAMES)
def test_a_draft_equal_to_the_target_is_always_accepted(rule: str) -> None:
    """16, 17: nothing is lacking in its slots, though paths are kept again and again."""
    target = tiny()
    out = Engine(target, Independent(target, shape=SHAPE), verify=rule, policy=Fixed(3), rows=3).generate(
        PROMPTS[:5], max_new_tokens=40, ignore_eos=True
    )
    assert out.stats.accepted[0] == out.stats.drafted[0]


@pytest.mark.parametrize(("rule", "temperature"), [("traversal", 1.0), ("tree", 0.0)])
def test_forced_rounds_predict_measured_ones(rule: str, temperature: float) -> None:
    """Calls within 4 sigma and acceptance at depth 1 within 3, which is checks (b) and (c) of the verdict."""
    target, sampling = tiny(vocab=8, layers=1, hidden=8, seed=3), Sampling(temperature)
    engine = Engine(target, drafts(target, noise=0.3), verify=rule, policy=Fixed(3), rows=16)
    texts = emitted(engine, [[1, 2, 3], [4], [5, 6], [7, 1, 2, 3]] * 4, 24, sampling)
    report = check(engine, texts, sampling, 24)
    assert report.passed and report.calls and report.depth, report.lines()
    assert report.depth.rounds > 40 and 0 < report.depth.alpha < 1
    assert temperature or report.calls.measured == report.calls.predicted


def test_accepted_paths_at_the_end_of_the_context() -> None:
    """The accepted child of the last level was never read by the draft: it has no slot there."""
    target = tiny(positions=24)
    engine = Engine(
        target, Independent(target, shape=(-1, -1, -1, -1, 0, 1, 2, 3)), verify="tree", policy=Fixed(2), rows=1
    )
    out = engine.generate([[3, 5]], max_new_tokens=22, sampling=Sampling(0))
    assert out.tokens == Engine(target, rows=1).generate([[3, 5]], max_new_tokens=22, sampling=Sampling(0)).tokens
    assert out.stats.target_calls == 8


def test_noise_of_each_node_is_its_own() -> None:
    """Six of 32 tokens that are all as likely: at no two nodes, nor in two rounds, the same ones."""
    seen = []

    class Asking(Independent):
        def propose(self, round: Any) -> Any:
            level = Siblings(6, ((0,), (1,), (2,)), (3, 4, 5), torch.tensor([1, 2, 3]))
            seen.append(round.children(torch.zeros(1, 3, 32), torch.zeros(1, 3, dtype=torch.int64), level)[0])
            return super().propose(round)

    target = tiny(layers=1)
    engine = Engine(target, Asking(near(target), shape=(-1, 0)), verify="tree", rows=1, policy=Fixed(2))
    engine.generate(PROMPTS[:1], max_new_tokens=8)
    drawn = [tuple(ids) for each in seen for ids in each[0].tolist()]
    assert len(drawn) > 6 and len(set(drawn)) == len(drawn)


def test_the_prediction_of_a_round_is_that_of_texts() -> None:
    """Two children a node: `tree` to the last bit, `traversal` in the mean over the rejected ones that are drawn."""
    shape, A = (-1, -1, 0, 1, 1), 4000
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).expand(2, -1)
    q, x, k = p.flip(-1), torch.tensor([2, 0]), torch.full((A,), 5)
    p, q, x = p.expand(A, -1, -1), q.expand(A, -1, -1), x.expand(A, -1)
    wanted = reach_tree(by_draw(p, q, x, 2), shape)[:, 0]
    multi_round, traversal = (RULES[name].branches for name in ("tree", "traversal"))
    torch.testing.assert_close(multi_round(p, q, x, shape, k, 3), wanted)
    texts, rounds = reach_traversal(p, q, x, shape)[:, 0].mean(0), traversal(p, q, x, shape, k, 3).mean(0)
    torch.testing.assert_close(rounds, texts, rtol=0, atol=2e-3)
    assert (rounds - wanted.mean(0)).abs().max() > 5e-3


@pytest.mark.parametrize("rule", NAMES)
def test_each_seed_draws_other_children_to_reject(rule: str) -> None:
    """So that predictions of many rounds are not all wrong in the same way."""
    p, q = (4 * torch.rand(2, 50, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).softmax(-1)
    branches, x, k = RULES[rule].branches, torch.zeros(50, 2, dtype=torch.int64), torch.full((50,), 5)
    one, other, again = (branches(p, q, x, (-1, -1, -1, 0, 0), k, seed) for seed in (3, 4, 3))
    assert not torch.equal(one, other) and torch.equal(one, again)


def test_tokens_past_the_end_are_never_accepted() -> None:
    x, inside = torch.tensor([[4, 0]]), torch.tensor([[True, False]])
    offered = {0: torch.tensor([[4, 1]]), 1: torch.tensor([[0]])}
    reach = reach_along(
        torch.zeros(1, 4, 5), {}, offered, x, inside, (-1, -1, 0), torch.tensor([3]), RULES["tree"], True, 0
    )
    assert reach.tolist() == [[1, 1, 0]]


def test_the_reason_is_that_of_the_node() -> None:
    assert column_of(torch.tensor([[-1, -1], [1, 3]]), 1, 2) == 4 and column_of(None, 1, 2) == 2
    assert column_of(torch.tensor([[-1, -1]]), 0, 0) == 0


def test_shapes_are_numbered_by_level() -> None:
    shape = StaticTrees(SHAPE)
    assert shape.parents == (-1, -1, -1, 0, 0, 1, 1, 3, 5) and shape.counts == [0, 3, 7, 9]
    assert shape.nodes([0, 1, 2, 9]) == [0, 3, 7, 9]
    with pytest.raises(ValueError, match="a node has 3 children, but the vocabulary has 2 tokens"):
        shape.require(2)
