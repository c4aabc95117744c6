"""The file of an adaptive policy: its estimates are those of the rounds that it was fitted to."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotrain.plan.policy_file import BY_RATE, Observation, content, estimates, observed
from inference import Engine, Sampling
from inference.adaptive_policy import Adaptive, Recent, estimate, inputs
from inference.measure.costs import Costs
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from tests.tiny import near, tiny

PROMPTS = [[(7 * i + 5 * n) % 30 + 1 for i in range(4)] for n in range(30)]


def test_observations_are_the_drafts_that_were_tested() -> None:
    target = tiny()
    engine = Engine(target, Independent(near(target)), policy=Fixed(1), rows=8)
    mean, found = observed(engine, 3, PROMPTS, Sampling(0.9), 20, 1)
    assert engine.policy == Fixed(1)
    stats = _as_observed(engine)
    assert len(found) == sum(stats.tried) and sum(one.accepted for one in found) == sum(stats.accepted)
    assert mean == pytest.approx(sum(stats.accepted) / sum(stats.tried))
    assert sum(one.before is None for one in found) == stats.tried[0]
    assert sum(one.before is None and one.accepted for one in found) == stats.accepted[0]
    after = [one for one in found if one.before is not None]  # the draft before it has measures of its own
    assert all(not np.array_equal(one.before, one.of_q) for one in after)
    assert found[0].recent == Recent()


def test_an_observation_has_what_its_row_had_when_the_round_began() -> None:
    target = tiny()
    _, found = observed(Engine(target, Independent(near(target)), rows=1), 3, PROMPTS[:1], Sampling(0.9), 30, 1)
    tried = [one.recent.tried for one in found if one.before is None]  # of each round
    assert (
        tried[0] == 0
        and 0 < tried[1] <= 3
        and all(now > before for before, now in zip(tried, tried[1:5], strict=False))
    )


def _as_observed(engine: Engine) -> Any:
    engine.policy = Fixed(3)
    return engine.generate(PROMPTS, max_new_tokens=20, sampling=Sampling(0.9), seed=1).stats


def test_estimates_are_those_of_the_process_that_made_the_observations() -> None:
    """Acceptance that depends on the probability of the likeliest token; the next draft's on that of the one before."""
    torch.manual_seed(0)
    found, top = [], torch.rand(6000, 2).tolist()
    for first, second in top:
        q, before = np.array([0.5, second, math.log(second + 1e-9), 0.1]), np.array([0.5, first, math.log(first), 0.1])
        found.append(Observation(Recent(), before, None, bool(torch.rand(()) < first)))
        if found[-1].accepted:
            chance = 0.2 + 0.6 * first
            found.append(Observation(Recent(), q, before, bool(torch.rand(()) < chance)))
    fit = estimates(0.5, found)
    for value in (0.2, 0.5, 0.9):
        given = inputs(np.array([0.5]), np.array([[0.5, value, math.log(value), 0.1]]))
        assert estimate(fit.ahead, given) == pytest.approx(0.2 + 0.6 * value, abs=0.06)
    assert estimate(fit.here, inputs(np.array([0.5]), np.array([[0.5, 0.9, math.log(0.9), 0.1]])))[0] > 0.7


def test_drafts_that_are_not_asked_are_estimated_by_their_recent_acceptance() -> None:
    target = tiny()
    mean, found = observed(Engine(target, NGram(), rows=8), 3, PROMPTS[:5], Sampling(0), 12, 1)
    fit = estimates(mean, found)
    assert found == [] and fit.here == fit.ahead == BY_RATE
    assert estimate(fit.here, inputs(np.array([0.3, 0.8]), np.zeros((2, 4)))) == pytest.approx([0.3, 0.8])


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = Costs((1.0, 1.1, 1.2), 0.1, (0.05, 0.05, 0.05), first=0.02)
    fit = estimates(0.6, [])
    (tmp_path / "policy.json").write_text(json.dumps(content(fit, {8: table, 1: table})))
    policy = Adaptive.load(tmp_path / "policy.json")
    assert policy.estimates == fit and list(policy.seconds) == [1, 8]
    assert policy.seconds[1] == pytest.approx([table.round(k) for k in range(3)])
