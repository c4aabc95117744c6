"""Forced rounds: what they say of a text is what teacher-forced passes say, and what measured rounds do."""

from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.exactness.forced import close_ranks, forced
from inference.exactness.side_by_side import pair_figures
from inference.exactness.verdict import check
from inference.models.lm import LM
from inference.models.step import by_round, one_by_one
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from inference.proposers.base import Proposal, Proposer
from inference.proposers.hybrid import Hybrid
from inference.proposers.retrieval import NGramIndex, Retrieval
from tests.inference.exactness.test_verdict import NEW, PROMPTS, V
from tests.inference.models.test_packing import halved, needs_kernels
from tests.inference.proposers.test_hybrid import gate
from tests.kinds import KINDS
from tests.often import often
from tests.tiny import emitted, near, tiny

K = 3


class Unknown(Independent):
    """A language model that does not say so."""

    def language_model(self, rows: int, vocabulary: int) -> LM | None:
        return None


def run(proposer, sampling=Sampling(), rule="token", rows=16, prompts=PROMPTS):  # noqa: B008
    target = tiny(vocab=V, layers=1, hidden=8, seed=3)
    engine = Engine(target, proposer(near(target, 0.15)), verify=rule, policy=Fixed(K), rows=rows)
    return engine, emitted(engine, prompts, NEW, sampling)


@pytest.mark.parametrize(
    ("sampling", "greedy"),
    often(
        [(Sampling(0.8, top_p=0.9), False), (Sampling(0), False), (Sampling(repetition_penalty=1.3), True)],
        lambda case: case[0].temperature > 0,
    ),
    ids=["cut", "greedy", "penalised"],
)
def test_forced_rounds_give_the_distributions_of_teacher_forced_passes(sampling: Sampling, greedy: bool) -> None:
    """At every depth, with rows that leave and enter: one pass over the text and rounds at each of its tokens."""
    engine, texts = run(lambda model: Independent(model, greedy), sampling, rows=5)
    texts = texts._replace(tokens=[text[: NEW - 3 * (i % 4)] for i, text in enumerate(texts.tokens)])
    wanted = pair_figures(engine, engine.proposer, texts, sampling, NEW, 0.0)
    result = pair_figures(engine, Unknown(engine.proposer.model, greedy), texts, sampling, NEW, 0.0)
    torch.testing.assert_close(result.logp, wanted.logp, rtol=0, atol=1e-9)
    assert torch.equal(result.k, wanted.k) and torch.equal(result.lengths, wanted.lengths)
    inside = torch.arange(NEW) < wanted.lengths[:, None]
    for j in range(K):
        drafted = inside & (torch.arange(NEW) >= j)
        drafted[:, j:] &= wanted.k[:, : NEW - j] > j  # by the round that starts j tokens before
        if greedy or not sampling.temperature:  # behind another token than the text's none is recorded
            drafted &= result.logq[..., j].isfinite()
            assert j or torch.equal(result.logq[..., 0].isfinite() & inside, wanted.logq.isfinite() & inside)
        assert drafted.sum() > 10
        torch.testing.assert_close(result.logq[..., j][drafted], wanted.logq[drafted], rtol=0, atol=1e-9)
        torch.testing.assert_close(result.alpha[..., j][drafted], wanted.alpha[drafted], rtol=0, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("kind", ["early_exit", "hybrid"])
def test_no_operator_draws_in_the_place_of_the_text(kind: str) -> None:
    """Models with copies, whose drafts come from one operator when they are served."""
    target = halved(tiny(hidden=32, layers=4))
    proposer: Any = KINDS[kind].proposer(target)
    if kind == "hybrid":
        proposer = Hybrid(
            Independent(halved(near(tiny(hidden=32, layers=4), 0.1))), Retrieval(shortest=2), gate({2, 3})
        )
    engine = Engine(target, proposer, policy=Fixed(K), rows=16)
    with torch.profiler.profile() as profile:
        texts = emitted(engine, PROMPTS, NEW)
    assert ("inference::chain" in {event.key for event in profile.key_averages()}) == (kind == "hybrid")
    result = check(engine, texts, Sampling(), NEW)
    assert result.passed, result.lines()
    tau = len(PROMPTS) * NEW / sum(row.target_calls for row in texts.counts)
    assert abs(result.calls.tau / tau - 1) < 0.1


class Table(Proposer):
    """Drafts from logits (V, V) by the token before; tokens without a row have none."""

    def __init__(self) -> None:
        self.logits = torch.randn(V, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        self.logits[::3] = -torch.inf

    def propose(self, round: Any) -> Proposal:
        last = torch.tensor([text[-1] for text in round.texts])
        choose = by_round(round, greedy=False)
        x, q = one_by_one(max(round.k), self.logits[last], lambda ids, _: self.logits[ids], choose)
        return Proposal(x, q, round.k)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_drafts_without_a_distribution_end_their_round(rule: str) -> None:
    engine, texts = run(lambda _: Table(), rule=rule)
    result = check(engine, texts, Sampling(), NEW)
    assert result.passed and result.calls.tau > 1.1, result.lines()


def test_texts_have_tokens_that_a_pruned_draft_lacks() -> None:
    target = tiny()
    engine = Engine(target, KINDS["eagle, pruned"].proposer(target), policy=Fixed(K), rows=4)
    texts = emitted(engine, [[5, 6], [7, 1, 2, 3], [1, 2, 3], [9, 9]], NEW)
    result = pair_figures(engine, engine.proposer, texts, Sampling(), NEW, 0.0)
    known = torch.isin(torch.tensor(texts.tokens), engine.proposer.network.known)[:, :-1]  # the last is not drafted
    assert torch.equal(result.logq[:, :-1, 0].isfinite(), known) and known.any() and not known.all()


@pytest.mark.parametrize("rule", often(["token", "block", "match"], {"block", "match"}.__contains__))
def test_look_up_is_predicted_to_the_call(rule: str) -> None:
    """Its drafts are certain: given the text there are no coins, and every call is known."""
    engine, texts = run(lambda _: NGram(), rule=rule)
    result = check(engine, texts, Sampling(), NEW, rows=4)
    assert result.passed, result.lines()
    assert result.calls.sigma == 0 and result.calls.predicted == result.calls.measured < 16 * NEW
    assert result.depth.rounds > 30 and 0 < result.depth.alpha < 1
    drafts = forced(engine, texts, Sampling(), NEW)
    assert set(drafts.logq[drafts.logq.isfinite()].tolist()) == {0.0} and drafts.logq.isinf().any()


class Warmer(Unknown):
    """Says that its distribution was warmer than the one that it drew from."""

    def propose(self, round):
        x, q, k, tree = super().propose(round)
        return Proposal(x, (q.log() / 1.6).softmax(-1), k, tree)


class Stale(NGram):
    """Looks up in the text without its last token."""

    def propose(self, round):
        drafts = [NGramIndex(text[:-1], self.max_n).look_up(k) for text, k in zip(round.texts, round.k, strict=True)]
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


def test_a_tie_with_the_first_that_is_left_out_is_near() -> None:
    scores = torch.tensor([[5.0, 3.0, 2.99, 0.0], [5.0, 3.0, 1.0, 0.0], [5.0, 4.99, 1.0, 0.0]])
    assert close_ranks(scores, 2, 0.1).tolist() == [True, False, True]
    assert close_ranks(scores, 1, 0.1).tolist() == [False, False, True]
    assert close_ranks(scores, 4, 0.1).tolist() == [True, False, True]
