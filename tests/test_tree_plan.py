"""The plan of trees: exact calls of a draft that is a language model, from two passes over texts."""

import pytest
import torch

from inference import Engine, Sampling
from inference.measure.costs import Costs
from inference.measure.shapes import round_seconds
from inference.measure.timing import Emitted
from inference.measure.tree_plan import Laws, laws_of, plan, reach_under
from inference.models.lm import LM
from inference.noise import row_ids
from inference.policy import Fixed
from inference.proposers import Independent
from inference.verify.prediction import calls_from, variance_from
from tests.tiny import near, tiny

PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 1, 2, 3]] * 4
SHAPE = (-1, 0, -1, 1, -1, 0, 2)


@pytest.mark.parametrize(("rule", "temperature"), [("tree", 1.0), ("traversal", 1.0), ("tree", 0.0)])
def test_calls_from_two_passes_are_those_that_were_made(rule: str, temperature: float) -> None:
    target, sampling, keys = tiny(vocab=8, layers=1, hidden=8, seed=3), Sampling(temperature), row_ids(PROMPTS)
    draft = near(target, 0.3)
    engine = Engine(target, Independent(draft, shape=SHAPE), verify=rule, policy=Fixed(3), rows=16)
    out = engine.generate(PROMPTS, max_new_tokens=20, sampling=sampling, ids=keys, ignore_eos=True)
    texts = Emitted(PROMPTS, keys, out.tokens, out.stats.rows)
    laws = laws_of(LM(target, 8), LM(draft, 8), texts, sampling)
    reach = reach_under(laws, SHAPE, rule, temperature == 0)
    calls, sigma = calls_from(reach, laws.lengths).sum(), variance_from(reach, laws.lengths).sum().sqrt()
    assert abs(out.stats.target_calls - calls) <= 4 * sigma + 1e-9
    assert bool(temperature) == bool(sigma > 0)


def laws(seed: int = 0) -> Laws:
    """Texts of a target whose draft is right about half of the time; its second guess is often the other half."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(6, (8, 40), generator=generator)
    p = torch.nn.functional.one_hot(x, 6).float()
    rank = torch.randint(2, (8, 40), generator=generator)
    q = torch.full((8, 40, 6), 0.1).scatter(-1, x.unsqueeze(-1), 0.5)
    return Laws(p, q, x, torch.full((8,), 40), rank)


def test_the_plan_is_a_tree_where_passes_are_flat_a_chain_or_nothing_where_nodes_cost() -> None:
    flat, steep = (Costs(tuple(1 + slope * n for n in range(9)), 0.01, (0.0,) * 9) for slope in (0.0, 2.0))
    tree = plan(laws(), round_seconds(flat), 8, 2, (1, 2, 3))
    assert tree.likeliest and len(tree.shape.parents) == 8 and tree.shape.parents.count(-1) == 2
    nothing = plan(laws(), round_seconds(steep), 8, 2, (1, 2, 3))
    assert nothing.shape.parents == () and nothing.shape.tau == 1
