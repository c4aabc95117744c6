"""Checks (b) and (c): target calls and acceptance at depth 1 from the figures of the texts."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from inference.exactness.figures import Figures, check_calls, check_depth, prob_at_least
from inference.output import Counts, Emitted


def test_a_draft_that_rounding_could_turn_counts_once() -> None:
    """Whatever the depths that it is near at."""
    nothing, close = torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, 3, 2, dtype=torch.bool)
    close[0, 1] = True
    depths, lengths = torch.full((1, 3), 2), torch.tensor([3])
    whole = Figures(nothing, nothing.unsqueeze(2), nothing.unsqueeze(2), nothing > 0, close, depths, lengths)
    assert whole.near == 1 and replace(whole, near_q=close[..., 0]).near == 1


def by_hand(figures: Figures, b: int) -> tuple[float, float]:
    """Mean and variance of the calls of one text under the token rule, backwards from its end."""
    T = int(figures.lengths[b])
    ratio = [min(1.0, math.exp(float(figures.logq[b, t] - figures.logp[b, t]))) for t in range(T)]
    mean, square = [0.0] * (2 * T + 9), [0.0] * (2 * T + 9)
    for t in reversed(range(T)):
        left, moments = 1.0, [0.0, 0.0]
        k = min(int(figures.k[b, t]), T - t)
        for n in range(k + 1):
            passed = left * (ratio[t + n] if n < k else 0.0)
            chance, left = left - passed, passed
            after = t + n + 1
            moments[0] += chance * (1 + mean[after])
            moments[1] += chance * (1 + 2 * mean[after] + square[after])
        mean[t], square[t] = moments
    return mean[0], square[0] - mean[0] ** 2


def known() -> tuple[Figures, Emitted]:
    """Two texts of other lengths, with rounds that draft nothing, and near ties where rounds begin and elsewhere."""
    generator = torch.Generator().manual_seed(3)
    logp, logq = (torch.rand(2, 6, generator=generator).double().add(0.1).log() for _ in range(2))
    alpha = torch.rand(2, 6, generator=generator).double()
    lengths, k = torch.tensor([6, 4]), torch.tensor([[2, 2, 2, 2, 1, 0], [2, 0, 1, 0, 0, 0]])
    near_p, near_q = torch.zeros(2, 6, dtype=torch.bool), torch.zeros(2, 6, dtype=torch.bool)
    near_p[0, 0] = near_p[0, 2] = near_q[0, 3] = near_q[0, 4] = near_q[1, 3] = True
    counts = [Counts(6, 3, [2, 1], [1, 1], [2, 1], [0, 3, 5]), Counts(4, 3, [2], [1], [2], [0, 1, 2])]
    return (
        Figures(logp, logq, alpha, near_p, near_q, k, lengths),
        Emitted([[1], [2]], [0, 1], [[1] * 6, [1] * 4], counts),
    )


def test_calls_are_those_that_texts_must_cost() -> None:
    figures, texts = known()
    check = check_calls(figures, texts, "token")
    means, variances = zip(*(by_hand(figures, b) for b in range(2)), strict=True)
    assert check.predicted == pytest.approx(sum(means)) and check.near == 3
    assert check.sigma == pytest.approx(math.sqrt(sum(variances) + 3))
    assert (check.tokens, check.measured) == (10, 6)
    assert check.z == pytest.approx((6 - sum(means)) / check.sigma)


def test_depth_one_is_judged_at_the_starts_of_rounds_that_drafted() -> None:
    figures, texts = known()
    began = [(0, 0), (0, 3), (1, 0), (1, 2)]
    alpha = [float(figures.alpha[place]) for place in began]
    check = check_depth(figures, texts)
    assert (check.rounds, check.accepted) == (4, 2)
    assert check.alpha == pytest.approx(sum(alpha) / 4)
    # near ties at (0, 0) of the target and at (0, 3) of the draft: both drafts may be those that were accepted
    assert check.chance == pytest.approx(1)
    more = check_depth(figures, texts._replace(counts=[replace(one, accepted=[2, 1]) for one in texts.counts]))
    assert more.chance == pytest.approx(alpha[2] * alpha[3], abs=1e-4)


def test_the_distribution_of_accepted_drafts_is_that_of_coins_of_each_probability() -> None:
    """Few rounds with a small alpha, in which a normal distribution would see a fault: two of twenty at .01."""
    for n in (1, 2, 5, 12):
        probs = torch.rand(n, generator=torch.Generator().manual_seed(n)).double()
        known = torch.zeros(n + 1, dtype=torch.float64)
        for coins in itertools.product((0, 1), repeat=n):
            sides = torch.tensor(coins)
            known[sum(coins)] += torch.where(sides > 0, probs, 1 - probs).prod()
        for count in range(n + 1):
            assert prob_at_least(count, probs) == pytest.approx(float(known[count:].sum()))
    rare = torch.full((20,), 0.01, dtype=torch.float64)
    assert prob_at_least(2, rare) == pytest.approx(1 - 0.99**20 - 20 * 0.01 * 0.99**19)
    assert (
        prob_at_least(5000, 1 - 0 * rare[:1].expand(5000)) == pytest.approx(1)
        and abs(prob_at_least(1, 0 * rare)) < 1e-9
    )
