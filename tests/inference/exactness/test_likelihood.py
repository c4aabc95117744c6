"""The check of texts by their likelihood under the target: engines whose tokens have another distribution fail it."""

import math
from dataclasses import replace

import pytest
import torch

from inference import Engine, Sampling, round
from inference.exactness.likelihood import LikelihoodCheck, check_likelihood, moments
from inference.exactness.verdict import Verdict, check
from inference.models.llama import in_int8_rows
from inference.output import Emitted
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from inference.round import DecodingRound
from inference.verify import chain
from tests.often import often
from tests.tiny import emitted, near, tiny

V, NEW, K, ROWS = 16, 48, 3, 32
PROMPTS = [[1 + i % 7, (3 * i) % V, i % 5] for i in range(ROWS)]


def run(
    proposer: type[Independent | NGram],
    times: int = 1,
    sampling: Sampling = Sampling(),  # noqa: B008
) -> tuple[Engine, Emitted]:
    target = tiny(vocab=V, layers=1, seed=3, dtype=torch.float32)
    drafts = NGram() if proposer is NGram else Independent(near(target))
    engine = Engine(target, drafts, policy=Fixed(K), rows=times * ROWS)
    return engine, emitted(engine, times * PROMPTS, NEW, sampling)


def verdict(proposer: type[Independent | NGram], times: int = 1) -> Verdict:
    engine, texts = run(proposer, times)
    return check(engine, texts, Sampling(), NEW, seed=5)


def greedy_last(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodingRound, "last", lambda self, probs: probs.argmax(-1))


def greedy_correction(patch: pytest.MonkeyPatch) -> None:
    """After a rejection alone; the bonus is right."""
    right = chain._residual

    def wrong(p, q, n, k, w):  # type: ignore[no-untyped-def]
        probs = right(p, q, n, k, w)
        sure = torch.nn.functional.one_hot(probs.argmax(-1), probs.shape[-1]).to(probs)
        return torch.where((n == k).unsqueeze(-1), probs, sure)

    patch.setattr(chain, "_residual", wrong)


@pytest.mark.parametrize("wrong", often([greedy_last, greedy_correction], {greedy_correction}.__contains__))
def test_tokens_after_the_accepted_ones_must_have_the_targets_distribution(wrong, monkeypatch):  # type: ignore[no-untyped-def]
    """The checks of calls and of acceptance, which take the text as given, pass."""
    wrong(monkeypatch)
    report = verdict(Independent)
    assert report.text.passed and report.calls and report.calls.passed and report.depth and report.depth.passed
    assert report.surprise and report.surprise.z < -5 and not report.surprise.passed and not report.passed
    assert report.figures["surprise"]["passed"] is False and report.lines()[-1].endswith("FAILED")


def test_texts_of_a_look_up_are_checked_too(monkeypatch):
    report = verdict(NGram)
    assert report.passed and report.surprise and abs(report.surprise.z) < 3, report.lines()
    greedy_last(monkeypatch)
    assert not verdict(NGram).passed


def test_tokens_that_settings_cut_are_counted():
    engine, texts = run(Independent)
    report = check_likelihood(engine, texts, Sampling(top_p=0.7))
    assert 0.1 < report.impossible / report.tokens < 0.4 and math.isfinite(report.surprise) and not report.passed
    right = LikelihoodCheck(1000, 1.0, 1.0, 0.0, 0.0, 20)
    wrong = [{"impossible": 21}, {"z": 5.0}, {"z": -5.0}, {"place_z": 5.0}, {"place_z": -5.0}]
    assert right.passed and not any(replace(right, **one).passed for one in wrong)  # type: ignore[arg-type]


def test_moments_are_those_of_the_distribution():
    """By enumeration: both differences have mean 0 and the predicted variance."""
    p = torch.rand(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p[0, 2:4] = 0
    p[2] = torch.nn.functional.one_hot(torch.tensor(4), 7)
    p = p / p.sum(-1, keepdim=True)
    values = torch.stack([moments(p, torch.full((3,), v)) for v in range(7)], 1)  # (3, 7, 5)
    assert bool(((values[..., 0] == math.inf) == (p == 0)).all())
    for value, variance in ((values[..., 0] - values[..., 1], values[..., 2]), (values[..., 3], values[..., 4])):
        value = value.where(p > 0, 0.0)
        torch.testing.assert_close((p * value).sum(-1), torch.zeros(3).double(), atol=1e-12, rtol=0)
        torch.testing.assert_close((p * value.square()).sum(-1), variance[:, 0], atol=1e-12, rtol=0)


def test_coins_that_are_the_drafts_own_numbers_fail(monkeypatch):
    monkeypatch.setattr(round, "ACCEPT", round.DRAFT)
    report = verdict(Independent, times=3)
    assert report.surprise and report.surprise.place_z < -5 and not report.passed


def test_penalties_count_the_tokens_of_every_block():
    """An exact engine passes: penalties count all generated tokens, also those of earlier blocks."""
    sampling = Sampling(presence_penalty=2.0, frequency_penalty=0.5)
    engine, texts = run(Independent, sampling=sampling)
    report = check(engine, texts, sampling, NEW, seed=5)
    assert report.passed and report.text.ties == 0, report.lines()


@pytest.mark.parametrize("int8", [False, True])
def test_texts_of_a_model_in_half_precision_are_judged_as_they_are_decoded(int8):
    """Its own forward in half precision has another likeliest token at some places."""
    target = tiny(hidden=32, layers=3, dtype=torch.bfloat16)
    target = in_int8_rows(target) if int8 else target
    engine = Engine(target, Independent(near(tiny(dtype=torch.bfloat16))), rows=4)
    prompts = [[1, 2, 3], [4], [5, 6], [7, 1, 2, 3]]
    texts = emitted(engine, prompts, 100, Sampling(0.0), seed=0)
    assert check_likelihood(engine, texts, Sampling(0.0)).impossible <= 1
