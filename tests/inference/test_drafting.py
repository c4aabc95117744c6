"""All drafts of a round in one call: the same text as step by step."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.measure.costs import measure_costs
from inference.models.lm import LM
from inference.models.replay import Compiled, Pure, _Bound
from inference.models.step import Tempered
from inference.policy import Fixed
from inference.proposers import Independent
from inference.sampling import draw
from tests.often import often
from tests.tiny import compiles, near, tiny

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
    """What is compiled runs as it is; lengths of the drafts that were made at once."""
    lengths: list[int] = []

    def counted(module: torch.nn.Module, *_: Any) -> Callable[..., Any]:
        def run(**inputs: Any) -> Any:
            if isinstance(module, _Bound):
                lengths.append(module.K)
            return module(**inputs)

        return run

    monkeypatch.setattr(torch, "compile", counted)
    monkeypatch.setattr(Compiled, "failed", False)
    return lengths


def texts(compile: bool, sampling: list[Sampling], rows: int = 3, greedy: bool = False, **settings: Any) -> Any:
    proposer = Independent(near(tiny()), greedy, compile=compile)
    engine = Engine(tiny(), proposer, policy=Fixed(4), rows=rows, **settings)
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
    at_once, stepwise = (texts(compile, REGIMES[name], rows) for compile in (True, False))
    assert at_once.tokens == stepwise.tokens
    assert (at_once.stats.drafted, at_once.stats.accepted) == (stepwise.stats.drafted, stepwise.stats.accepted)
    stepwise_alone = name.startswith("truncated") or name == "with history" or (name, rows) == ("mixed with greedy", 3)
    assert set(calls) == (set() if stepwise_alone else {4})


@pytest.mark.parametrize(
    "settings", often([{"greedy": True}, {"verify": "match", "context": 20}], lambda case: "verify" in case)
)
def test_under_other_rules_too(calls: list[int], settings: dict[str, Any]) -> None:
    both = [texts(compile, REGIMES["sampled"], **settings).tokens for compile in (True, False)]
    assert both[0] == both[1] and calls


def test_costs_are_of_as_many_drafts_as_are_asked_for(calls: list[int]) -> None:
    measure_costs(LM(tiny(), 2), Independent(near(tiny()), compile=True), 3, context=20, repeats=2)
    assert set(calls) == {2, 8} and calls.count(2) > calls.count(8)


def test_shared_noise_is_drawn_step_by_step(calls: list[int]) -> None:
    texts(True, REGIMES["sampled"], verify="coupled")
    assert not calls


def simple_round(u: torch.Tensor, temperature: torch.Tensor, greedy: bool = False) -> Any:
    """A round whose drafts depend on a temperature alone."""
    pure = Pure({"u": u, "temperature": temperature}, lambda x: Tempered(x["u"], x["temperature"], greedy), greedy)
    return SimpleNamespace(pure=lambda *_, **__: pure)


@compiles
def test_compiled_drafts_are_drawn_from_the_distributions_they_come_with() -> None:
    """What is returned as q must be what the graph drew from, to the last bit: the engine's exactness rests on it."""
    proposer, seen = Independent(tiny(layers=1, seed=3), compile=True), []
    propose = proposer.propose

    def watched(round: Any) -> Any:
        x, q, _, _ = proposal = propose(round)
        seen.append((x.clone(), q.clone(), round._streams(x.shape[1])[0].clone()))
        return proposal

    proposer.propose = watched  # type: ignore[method-assign]
    engine = Engine(tiny(layers=1), proposer, policy=Fixed(2), rows=2)
    both = [Sampling(0.7), Sampling(1.0)]
    engine.generate([[1, 2, 3, 4], [5, 6, 7]], max_new_tokens=9, sampling=both, ignore_eos=True)
    assert len(seen) > 3 and not Compiled.failed
    assert all(torch.equal(x, draw(q, u)) for x, q, u in seen)


@pytest.mark.parametrize("pause", often([2, 3], {3}.__contains__))
def test_rounds_without_drafts_leave_no_hole_in_the_cache(pause: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is the target has every draft accepted, unless its cache lacks an id."""

    class Pausing:
        round = 0

        def lengths(self, texts: list[list[int]]) -> list[int]:
            self.round += 1
            return [4 if self.round % pause == 0 else 0] * len(texts)

    monkeypatch.setattr(torch, "compile", lambda module, *_: module)  # as it is
    monkeypatch.setattr(Compiled, "failed", False)
    for compile in (False, True):
        engine = Engine(tiny(), Independent(tiny(), compile=compile), policy=Pausing(), rows=2)
        stats = engine.generate([[3, 5, 7], [9, 2]], max_new_tokens=40, sampling=Sampling(0.8), ignore_eos=True).stats
        assert stats.accepted == stats.drafted
