"""Parity of a server with this engine, by its counters."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cotrain.bench import server_parity
from cotrain.planning.plan import Plan
from inference import Engine, Sampling
from inference.measure.timing import Interval
from inference.policy import Fixed
from inference.proposers import Independent
from inference.sampling.noise import row_ids
from inference.servers.openai_client import Client, Served
from tests.fake_vllm import FakeVLLM, running
from tests.folders import network, tokenizer
from tests.inference.servers.test_openai_client import Lookalike, url  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def plan() -> Plan:
    size = SimpleNamespace(
        prompts=16, prompt_tokens=8, new_tokens=24, rows=8, draft_dtype="auto", draft_int8=False, seed=0
    )
    target, draft = network(), network(layers=1, seed=0)
    return Plan(target, tokenizer(), draft, Sampling(), "token", size, ("t", "d"))  # type: ignore[arg-type]


def served_by(plan: Plan, greedy: bool, k: int = 2) -> server_parity.Ask:
    """A server that is this engine: one token of each text without a round, as from a prefill, then rounds."""

    def ask(prompts: list[list[int]], at_once: int) -> server_parity.Answer:
        engine = Engine(plan.target, Independent(plan.draft, greedy), policy=Fixed(k), rows=at_once)
        plain = Engine(plan.target, rows=at_once)
        first = plain.generate(prompts, max_new_tokens=1, seed=5, ignore_eos=True).tokens
        with_first = [prompt + one for prompt, one in zip(prompts, first, strict=True)]
        rest = engine.generate(with_first, max_new_tokens=23, seed=6, ids=row_ids(prompts), ignore_eos=True)
        tokens = [one + more for one, more in zip(first, rest.tokens, strict=True)]
        accepted = sum(rest.stats.accepted)
        return tokens, 1.0, Served(rest.stats.target_calls, sum(rest.stats.drafted), accepted)

    return ask


def test_prompts_are_paired_and_three_are_judged_by_their_value() -> None:
    pairs = np.random.default_rng(0).integers(5, 50, (8, 2))
    assert server_parity._ratio(pairs, pairs) == (1, 1, 1)
    twice = server_parity._ratio(pairs[:3] * [2, 1], pairs[:3])
    result = server_parity.Parity(9, 1.0, rounds=4, served=2.0, predicted=2.0, z=0.0, ours=1.0, ratio=twice)
    assert not result.passed and "+100.0% (too few prompts for an interval)" in result.line()


def test_a_server_that_is_this_engine_has_its_acceptance(plan: Plan) -> None:
    result = server_parity.server_parity(plan, served_by(plan, greedy=False), 2, at_once=8)
    assert result.tokens == 16 * 23 and abs(result.z) < 4
    assert result.ratio.low < 1 < result.ratio.high and result.served == pytest.approx(result.tokens / result.rounds)
    assert "served" in result.line() and json.loads(json.dumps(result.report()))["passed"] == result.passed


def test_the_texts_are_judged_under_their_settings(plan: Plan) -> None:
    cold = replace(plan, sampling=Sampling(0.5))

    def ask(prompts: list[list[int]], at_once: int) -> server_parity.Answer:
        engine = Engine(plan.target, rows=16)
        tokens = engine.generate(prompts, max_new_tokens=24, sampling=cold.sampling, seed=5, ignore_eos=True).tokens
        return tokens, 1.0, Served(200, 400, 100)

    result = server_parity.server_parity(cold, ask, 2, at_once=8)
    assert not result.unlike and result.line().endswith("the texts look sampled from the target")


def test_a_texts_first_token_takes_no_round(plan: Plan) -> None:
    sure = Plan(plan.target, plan.tokenizer, plan.target, Sampling(), "token", plan.bench, ("t", "t"))
    prompts, tokens = [[1, 2]], [[3] * 19]
    rounds, sigma = server_parity.rounds_expected(sure, sure.proposer(), 2, prompts, tokens)
    assert rounds.tolist() == pytest.approx([6.0], abs=1e-3)  # 18 tokens, three a round
    assert sigma == pytest.approx(0, abs=1e-2)


def test_a_server_that_drafts_otherwise_fails_the_parity(plan: Plan) -> None:
    result = server_parity.server_parity(plan, served_by(plan, greedy=True), 2, at_once=8)
    assert not result.passed and abs(result.z) > 4 and not result.unlike


def test_texts_of_another_target_are_said(plan: Plan) -> None:
    other = Plan(network(seed=3), plan.tokenizer, plan.draft, Sampling(), "token", plan.bench, ("o", "d"))
    result = server_parity.server_parity(plan, served_by(other, greedy=False), 2, at_once=8)
    assert "likelihood: z " in result.unlike and "ranks by q / p, mean: z " in result.unlike
    alike = replace(result, served=1.0, predicted=1.0, ratio=Interval(1.0, 1.0, 1.0))  # acceptance may be as predicted
    assert not alike.passed and replace(alike, unlike="").passed


@pytest.mark.parametrize(
    ("counted", "words"),
    [
        (Served(0, 0, 0), "counted no drafts"),
        (Served(4, 8, 9), "counted 9 accepted tokens of 8 drafted"),
        (Served(4, 8, -1), "counted -1 accepted tokens of 8 drafted"),
        (Served(4, 16, 9), "url: the server drafts 4 tokens a round, not 2: set k=4"),
        (Served(4, 8, 3, (2, 1, 0)), "url: the server drafts 3 tokens a round, not 2: set k=3"),
    ],
)
def test_counters_that_cannot_be_are_an_error(plan: Plan, counted: Served, words: str) -> None:
    def silent(prompts: list[list[int]], at_once: int) -> server_parity.Answer:
        return [[1] * 24 for _ in prompts], 1.0, counted

    with pytest.raises(ValueError, match=words):
        server_parity.server_parity(plan, silent, 2, at_once=8)


def test_a_server_without_token_ids_is_an_error(
    url: str,  # noqa: F811
    plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Lookalike, "owner", "somebody")
    monkeypatch.setattr("cotrain.bench.server_parity.stable_counters", lambda client: client.counted())
    with pytest.raises(ValueError, match="returns no token ids"):
        server_parity.over_http(Client(url), plan)([[1, 2]], 1)
    monkeypatch.setattr(Lookalike, "metrics", "/none")
    asked = len(Lookalike.requests)
    with pytest.raises(ValueError, match="url: .*/metrics has no draft counters"):
        server_parity.over_http(Client(url), plan)([[1, 2]], 1)
    assert len(Lookalike.requests) == asked  # nothing was generated in vain


def test_counters_are_those_of_the_texts_alone_and_requests_carry_each_prompts_seed(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server counts by depth, and has counted before. Of 25 tokens it emits 12 by rounds of two drafts, and 12 of
    the first drafts and one of the second are accepted."""
    monkeypatch.setattr("cotrain.bench.server_parity.stable_counters", lambda client: client.counted())
    prompts = [[1, 2], [3], [1, 2]]
    with running(FakeVLLM(network(1), tmp_path, [1])) as fake:
        fake.drafts, fake.heat = True, 0.0
        longer = replace(plan, bench=SimpleNamespace(**vars(plan.bench) | {"new_tokens": 25}))
        tokens, seconds, counted = server_parity.over_http(Client(fake.url), longer)(prompts, 2)
    assert counted == Served(rounds=36, drafted=72, accepted=39, by_depth=(36, 3)) and seconds > 0
    sent = sorted((body["prompt"], body["seed"]) for body in fake.requests)
    assert sent == sorted(zip(prompts, row_ids(prompts), strict=True)) and len({seed for _, seed in sent}) == 3
    assert all(body["ignore_eos"] is True and body["min_tokens"] == 25 for body in fake.requests)
    assert tokens[0] == tokens[2] != tokens[1] and {*map(len, tokens)} == {25}


def test_a_server_that_ends_texts_early_is_an_error(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    client: Any = SimpleNamespace(root="url", timeout=1.0)
    client.complete = lambda *given, **more: [SimpleNamespace(ids=ids) for ids in ([], [1] * plan.bench.new_tokens)]
    monkeypatch.setattr("cotrain.bench.server_parity.stable_counters", lambda client: Served(0, 0, 0))
    with pytest.raises(ValueError, match="url: the server ended 1 of 2 texts before"):
        server_parity.over_http(client, plan)([[1], [2]], 1)
