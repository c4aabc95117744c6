"""The verdict: it passes an exact engine in every regime, and names the check that a planted fault fails."""

import pytest
import torch

from inference import Engine, Sampling
from inference.exactness.verdict import check
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.base import Proposal
from inference.sampling import one_hot
from tests.tiny import emitted, tiny

V, NEW = 8, 24
PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 1, 2, 3]] * 4


def run(target, proposer, sampling, rule="token", k=3):
    engine = Engine(target, proposer, verify=rule, policy=Fixed(k), rows=len(PROMPTS))
    return engine, emitted(engine, PROMPTS, NEW, sampling)


def verdict(target, proposer, sampling=Sampling(), rule="token"):  # noqa: B008
    engine, texts = run(target, proposer, sampling, rule)
    return check(engine, texts, sampling, NEW)


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [
        ("token", Sampling()),
        ("block", Sampling(0.8, top_p=0.9)),
        ("match", Sampling(repetition_penalty=1.3)),
    ],
)
def test_an_exact_engine_passes(pair, rule, sampling):
    result = verdict(pair[0], Independent(pair[1]), sampling, rule)
    assert result.passed, result.lines()
    assert result.text.equal == result.text.prompts == len(PROMPTS) and result.text.noise < 1e-6
    assert 0 < result.calls.sigma < 0.1 * result.calls.predicted and abs(result.calls.relative) < 0.2
    assert result.depth.rounds > 100


def test_coupled_trees_skip_the_checks_that_depend_on_noise(pair):
    """Their acceptance hangs on the noise of the text: neither (b) nor (c) applies."""
    result = verdict(pair[0], Independent(pair[1], shape=(-1, -1, 0, 0)), rule="coupled")
    assert result.passed, result.lines()
    assert result.depth is None and "verify=coupled does not follow from the text alone" in result.missing["depth"]


@pytest.mark.parametrize("shape", [None, (-1, -1, 0)])
def test_a_lossy_rule_is_never_called_exact(pair, shape):
    """Not even with a perfect draft, where its texts show nothing."""
    result = verdict(pair[0], Independent(pair[0], shape=shape), rule="lossy_typical")
    assert not result.passed and not result.figures["passed"]
    assert result.lines()[0] == "exactness: no, lossy_typical changes the text's distribution"
    assert result.calls is None and "lossy_typical" in result.missing["calls"]


def test_a_perfect_draft_passes_in_float32():
    """Distributions that sum to one but for rounding: no coin may come out of that."""
    models = [tiny(vocab=V, layers=1, hidden=8, seed=3, dtype=torch.float32) for _ in range(2)]
    result = verdict(models[0], Independent(models[1]))
    assert result.passed and result.depth.measured == 1
    assert result.calls.predicted == pytest.approx(len(PROMPTS) * NEW / 4, rel=1e-3)


class Flattened(Independent):
    """Returns a uniform distribution, though it drew from another: accepts too much."""

    def propose(self, round):
        x, q, k, _ = super().propose(round)
        return Proposal(x, torch.full_like(q, 1 / V), k)


class Certain(Independent):
    """Says that its drafts were certain: accepts too little, p(x) instead of min(1, p/q)."""

    def propose(self, round):
        x, q, k, _ = super().propose(round)
        return Proposal(x, one_hot(x, q), k)


def test_a_wrong_draft_distribution_that_accepts_too_much_fails(pair):
    result = verdict(pair[0], Flattened(pair[1]))
    assert result.text.passed  # the coupled rule never reads q
    assert result.depth.measured > result.depth.alpha and result.depth.chance < 1e-3
    assert not result.depth.passed and not result.passed


def test_a_wrong_draft_distribution_that_accepts_too_little_fails(pair):
    result = verdict(pair[0], Certain(pair[1]))
    assert result.depth.passed and result.calls.z > 4 and not result.passed


def test_what_cannot_be_checked_is_an_error(pair):
    engine, texts = run(pair[0], Independent(pair[1]), Sampling())
    with pytest.raises(ValueError, match="without a proposer"):
        check(Engine(pair[0]), texts, Sampling(), NEW)
    with pytest.raises(ValueError, match="of different runs"):
        check(engine, texts._replace(tokens=[text[:-1] for text in texts.tokens]), Sampling(), NEW)
