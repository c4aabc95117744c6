"""All drafts of a round in one call: the same text as step by step."""

from typing import Any

import pytest

from inference import Engine, Sampling
from inference.measure.costs import measure_costs
from inference.models.lm import LM
from inference.models.step import Replayed
from inference.policy import Fixed
from inference.proposers import Independent
from tests.often import often
from tests.tiny import near, record_on_cpu, tiny

PROMPTS = [[i % 30 + 1 for i in range(n)] for n in (3, 9, 2, 6, 14)]
REGIMES = {
    "sampled": [Sampling(0.8)] * 5,
    "greedy": [Sampling(0)] * 5,
    "each its own": [Sampling(t) for t in (0.3, 1.0, 0.7, 2.0, 1.0)],
    "mixed with greedy": [Sampling(t) for t in (0, 1.0, 0, 2.0, 1.0)],
    "truncated": [Sampling(0.8, top_k=5)] * 5,
    "truncated by top-p": [Sampling(0.8, top_p=0.7)] * 5,
    "truncated by min-p": [Sampling(0.8, min_p=0.3)] * 5,
    "with history": [Sampling(0.8, repetition_penalty=1.2)] * 5,
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rounds are recorded; lengths of the drafts that were made at once."""
    record_on_cpu(monkeypatch)
    lengths, drafts = [], Replayed.drafts

    def counted(self: Replayed, *given: Any) -> Any:
        made = drafts(self, *given)
        lengths.extend([made[0].shape[1]] if made else [])
        return made

    monkeypatch.setattr(Replayed, "drafts", counted)
    return lengths


def texts(graphs: bool, sampling: list[Sampling], rows: int = 3, greedy: bool = False, **settings: Any) -> Any:
    proposer = Independent(near(tiny()), greedy)
    engine = Engine(tiny(), proposer, policy=Fixed(4), rows=rows, graphs=graphs, **settings)
    limits = [12, 4, 19, 7, 14]
    return engine.generate(PROMPTS, max_new_tokens=limits, sampling=sampling, seed=2, ignore_eos=True)


@pytest.mark.parametrize(
    ("name", "rows"),
    often(
        [*((name, 3) for name in REGIMES), ("sampled", 1), ("mixed with greedy", 1), ("truncated", 1)],
        {("sampled", 3), ("each its own", 3), ("with history", 3), ("truncated", 1)}.__contains__,
    ),
)
def test_text_and_counts_are_those_of_single_steps(calls: list[int], name: str, rows: int) -> None:
    """Rows come and go, slots grow, drafts are cut at a row's limit: in float64 nothing may change."""
    at_once, stepwise = (texts(graphs, REGIMES[name], rows) for graphs in (True, False))
    assert at_once.tokens == stepwise.tokens
    assert (at_once.stats.drafted, at_once.stats.accepted) == (stepwise.stats.drafted, stepwise.stats.accepted)
    assert set(calls) == {4}


@pytest.mark.parametrize(
    "settings",
    often([{"greedy": True}, {"verify": "match", "context": 20}, {"verify": "coupled"}], lambda case: "verify" in case),
)
def test_under_other_rules_too(calls: list[int], settings: dict[str, Any]) -> None:
    both = [texts(graphs, REGIMES["sampled"], **settings).tokens for graphs in (True, False)]
    assert both[0] == both[1] and calls


def test_costs_are_of_as_many_drafts_as_are_asked_for(calls: list[int]) -> None:
    measure_costs(LM(tiny(), 2, graphs=True), Independent(near(tiny())), 3, context=20, repeats=2)
    assert set(calls) == {2, 8} and calls.count(2) > calls.count(8)


@pytest.mark.parametrize("pause", often([2, 3], {3}.__contains__))
def test_rounds_without_drafts_leave_no_hole_in_the_cache(pause: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is the target has every draft accepted, unless its cache lacks an id."""

    class Pausing:
        round = 0

        def lengths(self, texts: list[list[int]]) -> list[int]:
            self.round += 1
            return [4 if self.round % pause == 0 else 0] * len(texts)

    record_on_cpu(monkeypatch)
    for graphs in (False, True):
        engine = Engine(tiny(), Independent(tiny()), policy=Pausing(), rows=2, graphs=graphs)
        stats = engine.generate([[3, 5, 7], [9, 2]], max_new_tokens=40, sampling=Sampling(0.8), ignore_eos=True).stats
        assert stats.accepted == stats.drafted
