"""Logits to distributions as transformers makes them, and draws that keep to the distribution."""

import itertools
import math

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from inference.sampling import Sampling, draw, probs
from inference.sampling.distributions import Regimes, _first_above


def ties(rows: int = 24, vocab: int = 40) -> torch.Tensor:
    """Logits on a coarse grid, so that every truncation meets equal values."""
    return (torch.randn(rows, vocab) * 4).round() / 2


def by_transformers(logits: torch.Tensor, s: Sampling) -> torch.Tensor:
    warpers = [TemperatureLogitsWarper(s.temperature)]
    if s.top_k:
        warpers.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        warpers.append(TopPLogitsWarper(s.top_p))
    if s.min_p:
        warpers.append(MinPLogitsWarper(s.min_p))
    for warper in warpers:
        logits = warper(None, logits)
    return logits.softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probs_equal_transformers_warpers_ties_included(dtype):
    many = torch.cat((torch.randn(8, 3000) * 4, ties(8, 3000)))  # not sorted whole, unless logits at the cut are equal
    numbers = itertools.product((0.3, 1.0, 1.7), (0, 1, 3, 99), (1.0, 0.9, 0.5, 0.05), (0.0, 0.1, 1.0))
    for logits, (t, k, p, m) in itertools.product((ties().to(dtype), many.to(dtype)), numbers):
        s = Sampling(t, k, p, m)
        assert torch.equal(probs(logits, s), by_transformers(logits, s)), s


def test_each_truncation_keeps_what_it_says():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    support = lambda s: (probs(logits, s) > 0).tolist()  # noqa: E731
    assert support(Sampling(top_k=3)) == [True, True, True, True]  # the third ties with the fourth
    assert support(Sampling(top_p=0.7)) == [True, True, False, False]
    assert support(Sampling(min_p=0.4)) == [True, True, False, False]
    # temperature acts first: at 0.5 the distribution is near (.73, .18, .05, .05), so the head alone holds 0.7
    assert support(Sampling(temperature=0.5, top_p=0.7)) == [True, False, False, False]


def test_greedy_is_the_one_hot_of_the_first_maximum():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    distribution = probs(logits, Sampling(temperature=0, top_k=2, top_p=0.5))
    assert distribution.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_half_precision_logits_make_float32_distributions():
    distribution = probs(torch.randn(2, 9).bfloat16(), Sampling(top_p=0.9))
    assert distribution.dtype == torch.float32
    torch.testing.assert_close(distribution.sum(-1), torch.ones(2))
    assert probs(torch.randn(2, 9).double(), Sampling()).dtype == torch.float64


def test_a_nucleus_in_equal_logits_is_that_of_the_row():
    flat, regimes = torch.zeros(3, 1500), [Sampling(top_p=p) for p in (0.2, 0.5, 0.9)]
    together = Regimes(regimes, torch.device("cpu")).probs(flat)
    for row, s in enumerate(regimes):
        assert torch.equal(together[row], by_transformers(flat[:1], s)[0])
        assert torch.equal(together[row], probs(flat[row], s))


def test_settings_of_other_rows_are_refused():
    with pytest.raises(ValueError, match="2 sampling settings for 5 rows"):
        Regimes([Sampling(), Sampling(0)], torch.device("cpu")).probs(torch.zeros(5, 3, 17))


NAN, INF = math.nan, math.inf
BAD = [
    *[("temperature", bad, repr(bad)) for bad in (-0.1, 1e-9, NAN, INF, "hot", None, True)],
    *[("top_k", bad, repr(bad)) for bad in (-1, 2.5, True)],
    *[("top_p", bad, repr(bad)) for bad in (0.0, 1.2, NAN)],
    *[("min_p", bad, repr(bad)) for bad in (-0.1, 1.5)],
    ("repetition_penalty", 0.0, "0.0"),
    ("presence_penalty", INF, "inf"),
    ("frequency_penalty", NAN, "nan"),
    *[("logit_bias", bad, text) for bad, text in (({-1: 1.0}, "-1"), ({3: INF}, "inf"), ([3, 4], "[3, 4]"))],
    *[("banned", bad, text) for bad, text in (((3,), "3"), (((),), "((),)"), (((1, -2),), "-2"), ("a", "a"))],
    *[("min_new_tokens", bad, repr(bad)) for bad in (-1, 0.5)],
    *[("stop", bad, text) for bad, text in (("", "('',)"), ((3,), "(3,)"))],
    *[("stop_ids", bad, text) for bad, text in ((7, "7"), (("a",), "a"))],
    *[("banned_first", bad, text) for bad, text in ((7, "7"), ((-1,), "-1"))],
    ("processors", (3,), "(3,)"),
]


@pytest.mark.parametrize(("field", "value", "culprit"), BAD)
def test_a_wrong_setting_is_rejected_by_name_and_value(field, value, culprit):
    with pytest.raises(ValueError) as error:
        Sampling(**{field: value})
    assert f"Sampling.{field}" in str(error.value)
    assert str(culprit) in str(error.value)


def test_sampling_is_frozen_hashable_and_has_no_other_setting():
    s = Sampling(logit_bias={3: -1}, stop="end", banned=[[1, 2]])
    assert (s.stop, s.banned, s.logit_bias) == (("end",), ((1, 2),), {3: -1.0})
    assert s == Sampling(logit_bias={3: -1}, stop=("end",), banned=((1, 2),)) and len({s, s}) == 1
    with pytest.raises(AttributeError):
        s.top_k = 3
    with pytest.raises(TypeError, match="typical_p"):
        Sampling(typical_p=0.9)


def test_draw_inverts_the_cumulative_sum_from_the_right():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(probs.expand(6, 6), u).tolist() == [1, 1, 3, 3, 4, 4]
    assert [draw(probs, one).item() for one in u] == [1, 1, 3, 3, 4, 4]


def test_a_sum_below_one_still_gives_a_token_with_mass():
    probs = torch.tensor([0.0, 0.5, 0.5 - 1e-6, 0.0], dtype=torch.float32)
    assert draw(probs, torch.tensor(1 - 2.0**-53, dtype=torch.float64)).item() == 2
    assert draw(probs, torch.tensor(1.0)).item() == 2  # a float32 uniform that rounded up


def test_a_distribution_that_does_not_sum_to_one_is_drawn_in_proportion():
    probs, u = torch.tensor([0.25, 0.5, 0.0]), torch.tensor([0.3, 0.34, 0.99])
    assert draw(probs.expand(3, 3), u).tolist() == [0, 1, 1]
    assert draw(probs.expand(3, 3) * 4, u).tolist() == [0, 1, 1]


def test_bisection_and_scan_draw_the_same_tokens():
    torch.manual_seed(0)
    probs = torch.rand(3000, 40, dtype=torch.float64) * (torch.rand(3000, 40) < 0.3)
    probs[:, 17] += 1e-3
    u = torch.rand(3000, dtype=torch.float64)
    u[:40], u[40:80] = 0, 1 - 2.0**-53
    cdf = probs.cumsum(-1)
    assert torch.equal(draw(probs, u), _first_above(probs, cdf, (u * cdf[:, -1]).unsqueeze(-1)))


def test_a_scan_that_rounds_unevenly_still_gives_tokens_with_mass():
    """A parallel sum may rise at a token without mass, and end below the last one that has some."""
    probs, cdf = torch.tensor([[0.5, 0.0, 0.5, 0.0]]), torch.tensor([[0.5, 0.5001, 0.9999, 1.0]])
    drawn = [_first_above(probs, cdf, torch.tensor([[bound]])).item() for bound in (0.2, 0.50005, 0.99995)]
    assert drawn == [0, 2, 2]
