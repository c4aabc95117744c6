"""Sequoia's tree, which the study of trees compares with."""

import math

import pytest
import torch

from inference.measure.costs import Costs
from studies.tree_cells import positional, round_seconds, sequoia
from tests.inference.measure.test_tree_shapes import accepts, shapes
from tests.trees import depth, path_of, siblings_before


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_sequoia_is_the_best_tree_of_positional_acceptance(levels):
    chances = (0.6, 0.25, 0.1)

    def value(parents: tuple[int, ...]) -> float:
        ranks = [len(siblings_before(parents, node)) for node in range(len(parents))]
        return sum(math.prod(chances[ranks[i]] for i in path_of(parents, node)) for node in range(len(parents)))

    for n in range(6):
        result = sequoia(chances, n, levels)
        most = max(value(parents) for parents in shapes(3) if len(parents) <= n and depth(parents) <= levels)
        assert depth(result) <= levels and len(result) == (min(n, 3) if levels == 1 else n)
        assert value(result) == pytest.approx(most, abs=1e-12)


def test_positional_acceptance_is_a_mean_over_tokens():
    accept = accepts(2, 5, 2)
    accept[1, 3:] = math.nan
    mean = torch.cat([accept[0], accept[1, :3]]).mean(0)
    assert positional(accept, torch.tensor([5, 3])) == pytest.approx(mean.tolist())
    assert positional(accept.unsqueeze(2), torch.tensor([5, 3])) == pytest.approx(mean.tolist())
    assert sequoia(positional(accept, torch.tensor([5, 3])), 0, 3) == ()


def test_seconds_of_a_round_are_those_of_the_table():
    costs = Costs(target=(1.0, 1.5, 1.75, 3.0), draft=0.25, rest=(0.1, 0.2, 0.3, 0.4), first=0.05)
    seconds = round_seconds(costs)
    assert seconds(()) == costs.round(0) and seconds((-1, 0, 1)) == costs.round(3)
    assert seconds((-1, -1, 0)) == pytest.approx(2 * 0.25 + 0.05 + 3.0 + 0.4)
    with pytest.raises(ValueError, match="up to 3 drafts, a tree has 4"):
        seconds((-1, -1, 0, 0))
