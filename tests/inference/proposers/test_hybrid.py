"""Look-up together with a model: the texts have the target's distribution, each row has its own gate decision, and the
gate reads nothing that was drawn."""

import random
from copy import copy

import pytest

from inference import Engine, Sampling
from inference.exactness.verdict import check
from inference.lookup.corpus import About, Datastore
from inference.lookup.suffixes import Match, SuffixAutomaton
from inference.policy import Fixed
from inference.proposers.hybrid import LONGEST, Gate, HeldOutPosition, Hybrid, calibrated_gate
from inference.proposers.independent import Independent
from inference.proposers.retrieval import Retrieval
from tests.inference.test_distribution import p_value, pair
from tests.inference.test_drafting import calls  # noqa: F401 - a fixture
from tests.often import often
from tests.tiny import emitted, near, tiny


def gate(lengths: set[int]) -> Gate:
    """Look-up drafts if the match has one of these lengths."""
    lookup = [[float(n in lengths)] * 4 for n in range(LONGEST + 1)]
    return Gate([lookup, lookup], [[[0.5] * 4] * (LONGEST + 1)] * 2, 0.1, 0.0)


def prompts(count: int = 7) -> list[list[int]]:
    """Texts of several lengths, all but two of which repeat themselves."""
    draw = random.Random(0)
    texts: list[list[int]] = []
    for _ in range(count):
        part = [draw.randrange(32) for _ in range(draw.randrange(3, 9))]
        texts.append(part + part[: draw.randrange(1, len(part))] if len(texts) % 3 else part)
    return texts


def store() -> Datastore:
    draw = random.Random(1)
    return Datastore.of([[draw.randrange(32) for _ in range(200)]], About(32, 8))


@pytest.mark.parametrize("hybrid", often([False, True], bool))
def test_coupled_texts_with_a_datastore_are_those_of_plain_decoding(hybrid: bool) -> None:
    target = tiny(seed=3)
    retrieval = Retrieval(store(), shortest=1)
    proposer = Hybrid(Independent(near(target)), retrieval, gate({2, 3, 5})) if hybrid else retrieval
    settings = {"max_new_tokens": [9, 30, 17, 25, 30, 12, 20], "sampling": Sampling(0.9, top_k=20), "seed": 2}
    plain = Engine(target, verify="coupled", rows=3).generate(prompts(), **settings)
    fast = Engine(target, proposer, verify="coupled", rows=3, policy=Fixed(4)).generate(prompts(), **settings)
    assert fast.tokens == plain.tokens
    assert fast.stats.accepted[0] > 0


@pytest.mark.parametrize(
    ("rule", "lengths"), often([("token", {1}), ("block", {2, 3})], lambda case: case[0] == "block")
)
def test_three_tokens_of_several_rounds_have_the_targets_distribution(rule: str, lengths: set[int]) -> None:
    target, draft = pair()
    hybrid = Hybrid(Independent(draft), Retrieval(shortest=1), gate(lengths))
    assert copy(hybrid).shortens and not copy(Hybrid(Independent(draft))).shortens
    assert p_value(target, hybrid, rule, samples=8_000) > 1e-4


def test_each_row_has_its_own_gate_decision() -> None:
    target = tiny(seed=3)
    hybrid = Hybrid(Independent(target), Retrieval(shortest=2), gate(set(range(2, 9))))
    engine = Engine(target, hybrid, rows=7, policy=Fixed(3))
    first = engine.generate(prompts(), max_new_tokens=5, sampling=Sampling(temperature=0)).stats.rows
    assert engine.generate(prompts(), max_new_tokens=60, sampling=Sampling(temperature=0)).stats.tau > 2.5
    for row, text in zip(first, prompts(), strict=True):
        repeats = bool(SuffixAutomaton(text).look_up(4, shortest=2).drafts)
        if not repeats:  # the model equals the target: all of its drafts are accepted
            assert (row.starts[:2], row.drafted[:3]) == ([0, 4], [1, 1, 1])


def test_a_model_that_look_up_never_relieves_drafts_as_it_does_alone() -> None:
    """To the count: every round reaches its `commit`."""
    target = tiny(seed=3)
    both = Independent(near(target)), Hybrid(Independent(near(target)), Retrieval(shortest=1), gate(set()))
    settings = {"max_new_tokens": 20, "seed": 1}
    alone, beside = (Engine(target, one, rows=3, policy=Fixed(3)).generate(prompts(), **settings) for one in both)
    assert (beside.tokens, beside.stats.rows) == (alone.tokens, alone.stats.rows) and alone.stats.accepted[1] > 5


def test_a_gate_chooses_the_better_rate() -> None:
    lookup = [[0.0] * 3] * 5 + [[0.9, 0.8, 0.1]] * (LONGEST - 4)
    model = [[0.6, 0.4, 0.0]] * (LONGEST + 1)
    gate = Gate([lookup, [[0.0] * 3] * (LONGEST + 1)], [model, model], 0.25, 0.2)
    drafts = [1, 2, 3]
    # two drafts of the model: 2 tokens in 1.9 steps; of two that were looked up: 2.7 in 1.4, of three 2.8 in 1.6
    assert gate.looked_up(Match(drafts, 5), 2) == 2
    assert gate.looked_up(Match(drafts, 5), 3) == 2
    assert gate.looked_up(Match(drafts[:1], 5), 2) == 1
    assert gate.looked_up(Match(drafts, LONGEST + 9), 1) == 1
    assert gate.looked_up(Match(drafts, 4), 2) == 0
    assert gate.looked_up(Match(drafts, 5, stored=True), 2) == 0
    assert gate.looked_up(Match([], 5), 2) == gate.looked_up(Match(drafts, 5), 0) == 0
    # of the model's, one: 1.6 in 1.45; where it is surer, and behind no match, as many as may be
    assert [gate.modelled(Match(drafts, 5), k) for k in (0, 1, 2, 3)] == [0, 1, 1, 1]
    surer = Gate(gate.lookup, [[[0.95, 0.9, 0.85]] + model[1:], model], 0.25, 0.05)
    assert [surer.modelled(Match([], n), 3) for n in (0, 1)] == [3, 2] and surer.modelled(
        Match([], 0, stored=True), 3
    ) == 2
    worse = Gate(gate.lookup, [[[1.0] * 3] * (LONGEST + 1)] * 2, 0.01, 0.2)
    assert worse.looked_up(Match(drafts, 5), 2) == 0
    assert Gate.of_json(gate.to_json()) == gate and {*gate.to_json()} == {"found", "model", "step", "column"}
    with pytest.raises(ValueError, match="keys missing: step; keys unknown: none"):
        Gate.of_json({name: value for name, value in gate.to_json().items() if name != "step"})
    before = Gate.uncalibrated()
    assert before.looked_up(Match(drafts, LONGEST), 3) == 3 and before.looked_up(Match(drafts, 1), 3) == 0


def test_calibration_counts_right_drafts() -> None:
    places = [HeldOutPosition(Match([1, 2], 3), right) for right in [2] * 30 + [1] * 30 + [0] * 40]
    places += [HeldOutPosition(Match([1], 3), 1) for _ in range(100)]
    places += [HeldOutPosition(Match([], 0), 0, accepted=n % 2) for n in range(992)]
    places += [HeldOutPosition(Match([7], 2, stored=True), 0, accepted=2) for _ in range(8)]
    gate = calibrated_gate(places, 2, step=0.5, column=0.1)
    assert gate.lookup[0][3] == pytest.approx([160 / 208, 30 / 108])
    assert gate.lookup[0][2] == [0, 0] and gate.lookup[1][3] == [0, 0]
    assert gate.lookup[0][4] == pytest.approx([160 / 208, 30 / 108])
    pooled = [(496 + 8) / 1008, 8 / 1008]
    assert gate.model[0][7] == gate.model[1][0] == pytest.approx(pooled)
    assert gate.model[1][2] == pytest.approx([(8 + 8 * share) / 16 for share in pooled])
    assert (gate.step, gate.column) == (0.5, 0.1)


@pytest.mark.parametrize("kind", often(["retrieval", "hybrid"], {"hybrid"}.__contains__))
def test_calls_and_acceptance_are_those_that_the_texts_foretell(kind: str) -> None:
    """Verdict (b) and (c): with rows of both kinds in one round, and look-up's drafts longer than the model's."""
    target = tiny(vocab=8, layers=1, hidden=8, seed=3)
    retrieval, texts = Retrieval(shortest=1), [[1, 2, 3], [4], [5, 6], [7, 1, 2, 3, 7, 1]] * 4
    proposer = Hybrid(Independent(near(target, 0.15)), retrieval, gate({2, 3, 4})) if kind == "hybrid" else retrieval
    engine = Engine(target, proposer, policy=Fixed(4), rows=8)
    verdict = check(engine, emitted(engine, texts, 24), Sampling(), 24)
    assert verdict.passed, verdict.lines()
    assert verdict.calls.measured < 16 * 24
    assert (verdict.calls.sigma == 0) == (kind == "retrieval")


def test_drafts_of_look_up_do_not_count_as_stored(calls: list[int]) -> None:  # noqa: F811
    """A draft that makes all of its tokens at once makes them for rows, too, that look-up drafts for."""
    outputs, target = [], tiny(seed=3)
    for graphs in (False, True):
        beside = Hybrid(Independent(target), Retrieval(shortest=1), gate({1, 2, 3, 5}))
        engine = Engine(target, beside, rows=7, policy=Fixed(4), graphs=graphs)
        outputs.append(engine.generate(prompts(), max_new_tokens=80, seed=3, ignore_eos=True))
    assert calls and outputs[0].tokens == outputs[1].tokens and outputs[0].stats.rows == outputs[1].stats.rows
