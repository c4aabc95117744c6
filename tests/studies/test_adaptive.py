"""The oracle of the study of adaptive policies."""

import itertools

import pytest

from inference.adaptive_policy import Adaptive, Estimates
from studies.adaptive import oracle


def test_the_oracle_has_the_highest_rate_of_all_lengths_chosen_after_the_outcome() -> None:
    table = {1: (1.0, 1.7, 2.0, 2.9), 2: (1.2, 1.9, 2.4, 3.1)}
    policy = Adaptive(table, Estimates(0.5, (0.0,) * 4, (0.0,) * 4))
    rounds = [(1, 3, [3]), (1, 3, [0]), (2, 3, [1, 3]), (2, 2, [0, 2]), (1, 3, [1])]
    best = 0.0
    for lengths in itertools.product(*(range(most + 1) for _, most, _ in rounds)):
        pairs = list(zip(rounds, lengths, strict=True))
        tokens = sum(min(one, k) + 1 for (_, _, good), k in pairs for one in good)
        best = max(best, tokens / sum(table[rows][k] for (rows, _, _), k in pairs))
    assert oracle(policy, rounds) == pytest.approx(best)
