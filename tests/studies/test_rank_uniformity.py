"""The rank-based uniformity test."""

import math

import pytest
import torch

from studies.rank_uniformity import cramer_von_mises, log_ranks, tail, uniform_rank
from tests.tiny import tiny


@pytest.mark.parametrize(("statistic", "above"), [(0.34730, 0.1), (0.46136, 0.05), (0.74346, 0.01), (1.16786, 0.001)])
def test_the_tail_is_that_of_the_table(statistic: float, above: float) -> None:
    """Of Anderson and Darling, 1952."""
    assert tail(statistic) == pytest.approx(above, rel=2e-4)


def test_ranks_of_the_same_distribution_are_uniform_for_few_references_and_ties() -> None:
    g = torch.Generator().manual_seed(0)
    scores = torch.randint(3, (20_000, 5), generator=g).double()
    ranks = uniform_rank(scores[:, 0], scores[:, 1:], torch.rand(20_000, generator=g, dtype=torch.float64))
    assert tail(cramer_von_mises(ranks)) > 0.01
    assert tail(cramer_von_mises(0.95 * ranks)) < 1e-4


def test_scores_are_those_of_each_text_alone() -> None:
    model = tiny(vocab=16, layers=1, seed=3, dtype=torch.float32)
    texts = [[3, 1, 4, 1], [5], [9, 2]]
    for text, score in zip(texts, log_ranks(model, [1, 2], texts).tolist(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[1, 2, *text]])).logits[0, 1:-1]
        ranks = [sorted(row.tolist(), reverse=True).index(row[x]) + 1 for row, x in zip(logits, text, strict=True)]
        assert score == pytest.approx(sum(map(math.log, ranks)) / len(text))
