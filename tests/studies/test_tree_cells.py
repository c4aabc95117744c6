"""Sequoia's tree, which the study of trees compares with."""

import math

import pytest

from studies.tree_cells import sequoia
from tests.inference.measure.test_tree_shapes import shapes
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
