"""The forecast of a tree beside the recommended chain: identities, and choices that noise does not make."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cotrain.planning import planner
from cotrain.planning.forecast import Acceptance, Forecast, TreeForecast
from cotrain.planning.planner import fastest_tree
from inference.drafts.draft_folder import PlannedTree
from inference.measure.costs import RealRound
from inference.measure.tree_plan import Distributions, reach_under
from inference.verify import predict_chain
from inference.verify.tree import chain

K, TOKENS, VOCABULARY = 3, 40, 6
SECONDS = (1.0, 1.2, 1.4, 1.6)  # of a round that drafts 0 .. 3
WIDE = PlannedTree((-1, -1, 0), "tree")


def distributions(texts: int, seed: int = 0) -> Distributions:
    """Texts of one model's random distributions, and those of another draft for each text: texts differ."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, texts, TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)
    nearness = torch.rand(texts, 1, 1, generator=generator, dtype=torch.float64)
    p, q = logits[0].softmax(-1), (nearness * logits[0] + (1 - nearness) * logits[1]).softmax(-1)
    x = torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(texts, TOKENS)
    rank = (q > q.gather(-1, x.unsqueeze(-1))).sum(-1)
    return Distributions(p, q, x, torch.full((texts,), TOKENS), rank)


def calls_of(some: Distributions, parents: tuple[int, ...]) -> Tensor:
    return predict_chain.calls_from(reach_under(some, parents, "tree", False), some.lengths).double()


def chains(some: Distributions, k: int) -> Forecast:
    rows = [some.lengths.double(), *(calls_of(some, chain(n)) for n in range(1, K + 1))]
    calls = Acceptance(torch.stack(rows), some.lengths.double(), torch.zeros(K + 1, 1, len(some.lengths)))
    return Forecast(calls, SECONDS, k, k, (1.0,) * (K + 1), (0.0,) * (K + 1), 0.0)


def forecast_of(
    monkeypatch: pytest.MonkeyPatch, some: Distributions, chain_: Forecast, rounds: dict[Any, float]
) -> Any:
    """The forecast with these seconds of rounds, of trees and of the chain in turn."""
    trees = [one for one in rounds if isinstance(one, PlannedTree)]
    timed = {one: RealRound(0.0, seconds, 0.0) for one, seconds in rounds.items()}
    monkeypatch.setattr(planner, "rounds_of", lambda plan, drafted, until: {one: timed[one] for one in drafted})
    nothing: Any = None
    return fastest_tree(nothing, chain_, some, trees)


@pytest.mark.parametrize("k", [0, 2])
def test_a_tree_that_is_the_chain_gains_nothing(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """Whatever the machine's speed was when rounds were timed in turn."""
    some = distributions(12)
    same = PlannedTree(chain(k) or (-1,), "tree")
    seconds = {0: 7.0, 2: 7 * 1.4, same: 7 * 1.4 if k else 7.0}
    found = forecast_of(monkeypatch, some, chains(some, k), seconds)
    if k:
        assert found.gain == pytest.approx(0, abs=1e-6) and found.error == pytest.approx(0, abs=1e-6)
        assert found.seconds == pytest.approx(SECONDS[k])
        assert found.speedup == pytest.approx(SECONDS[0] * found.tau / SECONDS[k]) and found.gain <= found.error + 1e-9
    else:  # beside plain decoding, at the price of a plain step
        assert found.gain == pytest.approx(found.tau - 1) and found.speedup == pytest.approx(found.tau)


def test_the_fastest_tree_is_the_one_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    some = distributions(12)
    slow = PlannedTree((-1, -1, -1), "tree")
    found = forecast_of(monkeypatch, some, chains(some, 1), {0: 1.0, 1: 1.2, WIDE: 1.25, slow: 9.0})
    assert found.tree == WIDE and found.tau == pytest.approx(12 * TOKENS / float(calls_of(some, WIDE.parents).sum()))
    assert forecast_of(monkeypatch, some, chains(some, 1), {0: 1.0, 1: 1.2}) is None


def test_the_error_is_the_spread_of_the_gain_over_other_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    gains, said = [], []
    for seed in range(60):
        some = distributions(24, seed)
        found = forecast_of(monkeypatch, some, chains(some, 2), {0: 1.0, 2: 1.4, WIDE: 1.45})
        gains.append(found.gain)
        said.append(found.error)
    assert sum(said) / len(said) == pytest.approx(float(torch.tensor(gains).std()), rel=0.2)


def test_trees_may_be_rated_on_fewer_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their distributions take memory: the chain is then compared on the same texts."""
    some = distributions(12)
    few = Distributions(*(field[:5] for field in some))
    found = forecast_of(monkeypatch, few, chains(some, 2), {0: 1.0, 2: 1.4, WIDE: 1.45})
    alone = forecast_of(monkeypatch, few, chains(few, 2), {0: 1.0, 2: 1.4, WIDE: 1.45})
    assert found.gain == pytest.approx(alone.gain) and found.error == pytest.approx(alone.error)


def test_a_gain_within_its_error_is_not_recommended() -> None:
    tree = TreeForecast(WIDE, 2.0, 1.5, 1.33, 0.03, 0.04)
    some = replace(chains(distributions(2), 1), speedups=(1.0, 1.29), tree=tree)
    assert not tree.recommended and some.speedup == 1.29 and (some.served, some.length) == (None, 1)
    served, sure = replace(some, serves_tree=True), replace(tree, error=0.01)
    assert sure.recommended and served.speedup == 1.33 and (served.tau, served.length) == (2.0, 2)
