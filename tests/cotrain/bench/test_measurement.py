"""Which prompts, engines and seeds each measurement takes, and from which timing each figure of a report comes."""

from contextlib import nullcontext
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain.bench import measurement
from cotrain.bench.measurement import Budget, parity, quick
from cotrain.config.settings import Bench
from cotrain.data.splits import Prompts
from cotrain.planning.plan import Plan
from inference import Sampling
from inference.drafts.draft_folder import PlannedTree
from inference.measure.costs import RealRound
from inference.output import Emitted
from inference.proposers import NGram
from inference.proposers.hybrid import Gate
from tests import folders, standin
from tests.bench_stubs import FINAL, LIMIT, RANKING, REGIME, TAUS, TREE, Timed, met, plan_of  # noqa: F401 - a fixture
from tests.folders import network
from tests.settings import resized
from tests.tiny import tiny


def test_engines_of_a_plan_are_what_it_says(met: list[Any]) -> None:  # noqa: F811
    plan = plan_of(graphs="graphs")
    one = plan.engine(3)
    assert (one.target, one.verify, one.policy.k, one.tokenizer) == (plan.target, "block", 3, "tokenizer")
    assert (one.rows, one.graphs) == (3, "graphs")
    assert (one.proposer.network, one.proposer.greedy, one.proposer.int8) == (plan.draft, False, False)
    assert plan.engine(3, 32).rows == 32
    assert [(e.rows, e.graphs, e.proposer) for e in (plan.plain(), plan.plain(32))] == [
        (3, "graphs", None),
        (32, "graphs", None),
    ]
    assert replace(plan, objective="greedy").engine(1).proposer.greedy
    grown = replace(plan, tree=TREE)
    built = grown.engine(2)
    assert built.verify == "traversal" and built.proposer.greedy and list(built.proposer.shape) == list(TREE.parents)
    assert not replace(plan, tree=replace(TREE, likeliest=False)).engine(2).proposer.greedy
    assert replace(plan, tree=replace(TREE, likeliest=False), objective="greedy").engine(2).proposer.greedy
    other = NGram()
    assert grown.engine(2, proposer=other).verify == "block" and grown.engine(2, proposer=other).proposer is other


def test_lengths_and_prompts_of_a_plan(met: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    assert plan_of().depths == [2, 4]
    for most, wanted in ((4, [2, 4]), (3, [2]), (2, [2]), (1, [1])):
        monkeypatch.setitem(LIMIT, "depths", most)
        assert plan_of().depths == wanted
    plan = plan_of()
    assert plan.ranking(3, 4) == [RANKING[i] for i in (3, 4, 0, 1)] and plan.final(4, 2) == [FINAL[4], FINAL[0]]
    assert [Budget(100, 7).until(share) for share in (0, 0.25, 1)] == [7, 32, 107] and Budget(0, 7).until(0.5) == inf


def test_a_draft_is_measured_in_the_numbers_that_it_is_served_in() -> None:
    plan = plan_of(draft=tiny(seed=1).train())
    assert plan.served is not plan.draft and not plan.served.training and plan.served.dtype == torch.float64
    plan = plan_of(bench=resized(plan.bench, draft_dtype="float32"))
    assert plan.served.dtype == torch.float32 and plan.draft.dtype == torch.float64
    assert plan_of().served is not None and plan_of().int8 is False
    assert (
        plan_of(bench=resized(plan.bench, draft_dtype="auto", draft_int8=True)).int8 is False
    )  # no kernel for such numbers
    assert plan_of(bench=resized(plan.bench, draft_dtype="auto")).served.dtype == torch.float64


def test_figures_of_a_checkpoint(met: list[Any]) -> None:  # noqa: F811
    plan = plan_of(known={0: RealRound(1.0, 2.0, 1.0), 3: RealRound(2.0, 3.0, 1.5)})
    result = quick(plan, 3)
    (round,) = met
    assert (round["prompts"], round["rows"], round["seed"]) == (RANKING[:2], 3, 17)
    fast, slow = (round["arms"][name] for name in ("speculative", "plain"))
    assert (fast.engine.policy.k, fast.engine.rows, slow.engine.proposer, slow.engine.rows) == (3, 3, None, 3)
    assert {(arm.sampling, arm.new) for arm in (fast, slow)} == {(REGIME, 6)}
    assert result == {
        "speedup": 1.5,
        "low": 1.4375,
        "high": 1.53125,
        "tau": 1.75,
        "tokens_per_second": 30.0,
        "share_of_cost_table": pytest.approx(1.625 / (1.75 * 4.0 / 6.5)),
    }


def test_a_checkpoint_drafts_no_further_than_it_can(
    met: list[Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, rounds = list[Any](), {0: RealRound(1, 1, 1), 2: RealRound(1, 2, 3)}
    monkeypatch.setattr(measurement, "rounds_of", lambda plan, lengths, until: asked.append((lengths, until)) or rounds)
    monkeypatch.setitem(LIMIT, "depths", 2)
    plan = plan_of()
    assert quick(plan, 7)["share_of_cost_table"] == pytest.approx(1.625 / (1.75 * 3 / 6))
    quick(plan, 7)
    assert asked == [((0, 2), 0.0)] and plan.known == rounds  # once for all checkpoints


@pytest.mark.parametrize("until", [inf, 1e18])
def test_what_is_timed(met: list[Any], until: float) -> None:  # noqa: F811
    plan = plan_of(bench=resized(plan_of().bench, rows=3, prompts=4))
    served: Any = plan.engine(2)
    assert measurement._timed(plan, served, until)[2] == 0.25
    (round,) = met
    arms = round["arms"]
    assert list(arms) == ["speculative", "plain", "transformers"] and arms["speculative"].engine is served
    assert (arms["plain"].engine.rows, arms["plain"].engine.proposer) == (3, None)
    assert arms["transformers"].model is plan.target
    assert {(arm.sampling, arm.new) for arm in arms.values()} == {(REGIME, 6)}
    assert (round["rows"], round["seed"], round["pair"]) == (3, 17, ("speculative", "plain"))
    wanted = round["wanted"]
    assert (wanted.batches, wanted.until, wanted.within) == (2, until, 0.1 if until < inf else inf)
    assert round["prompts"] == (FINAL if until < inf else FINAL[:4])


def test_temperature_0_beside_n_grams(met: list[Any]) -> None:  # noqa: F811
    result = measurement.measure_greedy(plan_of(tree=TREE), 2)
    (round,) = met
    arms = round["arms"]
    assert (round["prompts"], round["rows"], round["seed"]) == (FINAL[:2], 3, 17)
    assert {(arm.sampling, arm.new) for arm in arms.values()} == {(Sampling(temperature=0), 6)}
    assert [arms[name].engine.verify for name in ("speculative", "ngram")] == ["traversal", "block"]
    assert isinstance(arms["ngram"].engine.proposer, NGram) and arms["plain"].engine.proposer is None
    assert {arms[name].engine.policy.k for name in ("speculative", "ngram")} == {2}
    assert {arm.engine.rows for arm in arms.values()} == {3}
    for name in ("speculative", "ngram"):
        assert result[name] == {"speedup": Timed([], [], 0, 0).ratio(name, "plain")._asdict(), "tau": TAUS[name]}
    assert result["prompts"] == 2


@pytest.mark.parametrize("tree", [None, TREE])
def test_parity_is_of_texts_that_were_not_timed_first(
    met: list[Any],  # noqa: F811
    tree: PlannedTree | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """400 tokens of 6 a text: three parts of 32, 32 and 3 texts, other noise each; behind the 4 that were timed."""
    calls = SimpleNamespace(tokens=90, measured=40, tau=2.0, z=0.5, passed=True, line=lambda: "line")
    asked: list[Any] = []
    monkeypatch.setattr(measurement, "text_figures", lambda plan, *others: asked.append(others) or "figures")
    monkeypatch.setattr(measurement, "check_calls", lambda *given: asked.append(given) or calls)
    monkeypatch.setattr(measurement, "asdict", vars)
    result = measurement.parity(plan_of(tree=tree), 3, noise=0.25)
    assert [len(round["prompts"]) for round in met] == [32, 32, 3]
    assert [round["seed"] for round in met] == [18, 50, 82] and {round["rows"] for round in met} == {32}
    assert all(round["prompts"][0] == FINAL[(4 + start) % 5] for round, start in zip(met, (0, 32, 64), strict=True))
    assert {round["warmup"] for round in met} == {0}
    arms = [one["arms"]["speculative"] for one in met]
    assert {(arm.engine.policy.k, arm.engine.rows, arm.sampling, arm.new) for arm in arms} == {(3, 32, REGIME, 6)}
    texts = asked[0][0]
    assert texts.prompts == [["speculative"]] * 3 and asked[0][1:] == (3, 0.25)
    assert asked[1] == ("figures", texts, "traversal" if tree else "block")
    assert result["tau_measured"] == 2.25 and result["tau_predicted"] == 2.0
    assert result["relative"] == pytest.approx(2.0 / 2.25 - 1)
    assert (result["tokens"], result["z"], result["passed"], result["line"]) == (90, 0.5, True, "line")


def test_parity_ends_with_its_time(met: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Behind a part; of trees, whose calls take much longer to predict, with a sixth of what is left."""
    monkeypatch.setattr(measurement, "text_figures", lambda *_: None)
    monkeypatch.setattr(measurement, "check_calls", lambda *_: None)
    monkeypatch.setattr(measurement, "time", SimpleNamespace(perf_counter=lambda: 30 + 100 * len(met)))
    ends = (None, 120, 1), (None, 150, 2), (None, 250, 3), (TREE, 620, 1), (TREE, 640, 2), (TREE, 1300, 3)
    for tree, until, parts in ends:
        met.clear()
        assert measurement.parity(plan_of(tree=tree), 3, until) is None and len(met) == parts


def plan(kind: str = "independent") -> Plan:
    """A pair with three ranking and three final prompts."""
    ranking, final = ([[5 + i, side] for i in range(3)] for side in (7, 9))
    size = Bench(
        prompts=2,
        quick_prompts=2,
        prompt_tokens=8,
        new_tokens=4,
        parity_tokens=28,
        rows=2,
        minutes=0,
        depths=[2],
        draft_dtype="auto",
        draft_int8=False,
    )
    given = Prompts(ranking, final, "own")
    draft = network(layers=1, seed=1)
    return Plan(network(), folders.tokenizer(), draft, Sampling(), "token", size, ("t", "d"), given=given, kind=kind)


def test_parity_counts_no_text_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """More texts are asked for than there are prompts: one that comes again is decoded with other noise."""
    measured: list[Emitted] = []
    true = measurement.text_figures

    def noted(plan: Plan, texts: Emitted, *others: Any) -> Any:
        measured.append(texts)
        return true(plan, texts, *others)

    monkeypatch.setattr(measurement, "text_figures", noted)
    monkeypatch.setattr(measurement, "BATCH", 2)
    result = parity(plan(), 2)
    assert f" {result['relative']:+.2%});" in result["line"]
    built = [(*prompt, *text) for prompt, text in zip(measured[0].prompts, measured[0].tokens, strict=True)]
    assert result["tokens"] == 28 and len(built) == len(set(built)) == 7


def test_a_gate_is_counted_on_ranking_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds as they are served: recorded on a GPU, where single launches take several times as long."""
    gated: list[Any] = []
    monkeypatch.setattr(
        "cotrain.students.retrieval.calibrate", lambda *given, **_: gated.append(given) or Gate.uncalibrated()
    )
    for device in ("cpu", "cuda"):
        with standin.device() if device == "cuda" else nullcontext():
            asked = plan("hybrid")
            for model in (asked.target, asked.draft):
                torch.nn.Module.to(model, device)
            asked.draft.config.lookup = {"datastore": None, "shortest": 2}
            measurement.prepare(asked)
            drafting, plain, _, prompts = gated[-1]
            assert {tuple(prompt) for prompt in prompts} == set(map(tuple, asked.prompts.ranking))
            assert {drafting.target.graphs, plain.target.graphs} == {device == "cuda"}
            assert replace(asked, bench=resized(asked.bench, depths=[1, 2])).depths == [2]  # the gate chooses below it
