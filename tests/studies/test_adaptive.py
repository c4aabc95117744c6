"""The study of adaptive policies: what its arms decode, and what their rounds cost by the table."""

import itertools
from typing import Any

import pytest

from inference import Engine, Sampling
from inference.adaptive_policy import Adaptive, Estimates
from inference.policy import Fixed
from inference.proposers import Independent
from studies.adaptive import by_table, oracle
from tests.tiny import near, tiny


def test_the_oracle_has_the_highest_rate_of_all_lengths_chosen_after_the_outcome() -> None:
    table = {1: (1.0, 1.7, 2.0, 2.9), 2: (1.2, 1.9, 2.4, 3.1)}
    policy = Adaptive(table, Estimates(0.5, (0.0,) * 4, (0.0,) * 4))
    rounds = [(1, 3, [3]), (1, 3, [0]), (2, 3, [1, 3]), (2, 2, [0, 2]), (1, 3, [1])]
    best = 0.0
    for chosen in itertools.product(*(range(most + 1) for _, most, _ in rounds)):
        pairs = list(zip(rounds, chosen, strict=True))
        tokens = sum(min(one, k) + 1 for (_, _, good), k in pairs for one in good)
        best = max(best, tokens / sum(table[rows][k] for (rows, _, _), k in pairs))
    assert oracle(policy, rounds) == pytest.approx(best)


PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [3, 3]]


@pytest.mark.parametrize("adaptive", [True, False], ids=["adaptive", "fixed"])
def test_rounds_cost_what_the_table_says_and_decisions_only_where_they_are_made(adaptive: bool) -> None:
    sure = (4.0, 0.0, 0.0, 0.0)
    policy = Adaptive({1: (1.0, 1.1, 1.2)}, Estimates(0.9, sure, sure), {1: 0.25})
    target = tiny()
    engine = Engine(target, Independent(near(target)), rows=1, policy=policy if adaptive else Fixed(2))
    found: Any = by_table(engine, policy, PROMPTS, 8, Sampling(1.0))
    out = engine.generate(PROMPTS, max_new_tokens=[4, 8, 12, 4], sampling=Sampling(1.0), seed=1, ignore_eos=True)
    rounds = out.stats.times["target"]
    drafts = found["drafts"] * rounds
    seconds = rounds + 0.1 * drafts + (0.25 * drafts if adaptive else 0.0)  # .1 for each draft in the table
    assert found["tokens_per_second"] == pytest.approx(28 / seconds) and found["tau"] == pytest.approx(28 / rounds)
