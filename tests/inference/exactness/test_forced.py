"""Forced rounds: what they say of a text is what teacher-forced passes say, and what measured rounds do."""

import pytest
import torch

from inference import Engine, Sampling
from inference.exactness.checks import check
from inference.exactness.forced import forced
from inference.exactness.side_by_side import pair_figures
from inference.measure.timing import Emitted
from inference.models.lm import LM
from inference.noise import row_ids
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from inference.proposers.base import Proposal
from tests.tiny import near, tiny

V, NEW, K = 8, 24, 3
PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 1, 2, 3]] * 4


class Unknown(Independent):
    """A language model that does not say so."""

    def language_model(self, rows: int, vocabulary: int) -> LM | None:
        return None


def run(proposer, sampling=Sampling(), rule="token", rows=16, prompts=PROMPTS):  # noqa: B008
    target = tiny(vocab=V, layers=1, hidden=8, seed=3)
    engine = Engine(target, proposer(near(target, 0.15)), verify=rule, policy=Fixed(K), rows=rows)
    keys = row_ids(prompts)
    out = engine.generate(prompts, max_new_tokens=NEW, sampling=sampling, seed=5, ids=keys, ignore_eos=True)
    return engine, Emitted(prompts, keys, out.tokens, out.stats.rows)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(0.8, top_p=0.9), Sampling(0), Sampling(repetition_penalty=1.3)])
def test_both_ways_find_the_distributions_of_a_language_model(sampling: Sampling, greedy: bool) -> None:
    """At every depth, with rows that leave and enter: one pass over the text and rounds at each of its tokens."""
    engine, texts = run(lambda model: Independent(model, greedy), sampling, rows=5)
    texts = texts._replace(tokens=[text[: NEW - 3 * (i % 4)] for i, text in enumerate(texts.tokens)])
    wanted = pair_figures(engine, engine.proposer, texts, sampling, NEW, 0.0)
    found = pair_figures(engine, Unknown(engine.proposer.model, greedy), texts, sampling, NEW, 0.0)
    torch.testing.assert_close(found.logp, wanted.logp, rtol=0, atol=1e-9)
    assert torch.equal(found.k, wanted.k) and torch.equal(found.lengths, wanted.lengths)
    inside = torch.arange(NEW) < wanted.lengths[:, None]
    for j in range(K):
        drafted = inside & (torch.arange(NEW) >= j)
        drafted[:, j:] &= wanted.k[:, : NEW - j] > j  # by the round that starts j tokens before
        if greedy or not sampling.temperature:  # behind another token than the text's none is recorded
            drafted &= found.logq[..., j].isfinite()
            assert j or torch.equal(found.logq[..., 0].isfinite() & inside, wanted.logq.isfinite() & inside)
        assert drafted.sum() > 10
        torch.testing.assert_close(found.logq[..., j][drafted], wanted.logq[drafted], rtol=0, atol=1e-9)
        torch.testing.assert_close(found.alpha[..., j][drafted], wanted.alpha[drafted], rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_look_up_is_predicted_to_the_call(rule: str) -> None:
    """Its drafts are certain: given the text there are no coins, and every call is known."""
    engine, texts = run(lambda _: NGram(), rule=rule)
    found = check(engine, texts, Sampling(), NEW, rows=4)
    assert found.passed, found.lines()
    assert found.calls.sigma == 0 and found.calls.predicted == found.calls.measured < 16 * NEW
    assert found.depth.rounds > 30 and 0 < found.depth.alpha < 1
    drafts = forced(engine, texts, Sampling(), NEW)
    assert set(drafts.logq[drafts.logq.isfinite()].tolist()) == {0.0} and drafts.logq.isinf().any()


@pytest.mark.parametrize("rule", ["token", "block", "match", "coupled"])
def test_the_verdict_of_any_kind_is_that_of_the_cheap_way(rule: str) -> None:
    engine, texts = run(Independent, rule=rule)
    cheap = check(engine, texts, Sampling(), NEW)
    engine.proposer = Unknown(engine.proposer.model)
    found = check(engine, texts, Sampling(), NEW)
    assert found.passed and cheap.passed, found.lines()
    assert found.depth.alpha == pytest.approx(cheap.depth.alpha, abs=1e-6)
    if rule == "coupled":
        assert found.calls is None and "not known from the text alone" in found.missing["calls"]
    else:
        assert found.calls.predicted == pytest.approx(cheap.calls.predicted, rel=1e-6)
        assert found.calls.sigma == pytest.approx(cheap.calls.sigma, rel=1e-6) and found.calls.rare == cheap.calls.rare


class Warmer(Unknown):
    """Says that its distribution was warmer than the one that it drew from."""

    def propose(self, round):
        x, q, k, tree = super().propose(round)
        return Proposal(x, (q.log() / 1.6).softmax(-1), k, tree)


class Stale(NGram):
    """Looks up in the text without its last token."""

    def propose(self, round):
        drafts = [self.look_up(text[:-1], k) for text, k in zip(round.texts, round.k, strict=True)]
        width = max(map(len, drafts))
        x = torch.tensor([draft + [0] * (width - len(draft)) for draft in drafts], dtype=torch.int64)
        return Proposal(x.view(len(drafts), width), None, [len(draft) for draft in drafts])


def test_wrong_distributions_of_an_unknown_kind_fail() -> None:
    """A kind that misstates its distributions is seen, one that merely guesses badly is exact."""
    engine, texts = run(Warmer, rows=128, prompts=8 * PROMPTS)
    calls = check(engine, texts, Sampling(), NEW).calls
    assert calls and not calls.passed
    engine, texts = run(lambda _: Stale())
    assert check(engine, texts, Sampling(), NEW).passed


def test_a_stream_ends_where_forced_rounds_take_its_slots() -> None:
    engine, texts = run(lambda _: NGram())
    stream = engine.stream([1, 2, 1, 2])
    next(stream)
    forced(engine, texts, Sampling(), NEW)
    with pytest.raises(RuntimeError, match="later call"):
        next(stream)
