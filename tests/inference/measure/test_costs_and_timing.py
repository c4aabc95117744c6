"""Timing with fake clocks and arms, real arms on tiny models, measured costs."""

import copy
import math

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from inference import Engine, Sampling
from inference.measure.costs import Costs, best_k, interleaved, joined, measure_costs
from inference.measure.timing import Arm, ArmResult, Timing, engine_arm, interleave, transformers_arm
from inference.models.lm import LM
from inference.noise import row_ids
from inference.policy import Fixed
from inference.proposers import Independent
from inference.stats import Counts, Stats, pooled
from tests.tiny import tiny

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def fake(name, seconds, log=None, length=4):
    """An arm that says it took `seconds`, a number or an iterator of them."""
    clock = iter(lambda: seconds, None) if isinstance(seconds, int | float) else seconds

    def run(prompts, ids, seed):
        if log is not None:
            log.append((name, len(prompts), list(ids), seed))
        spent = next(clock)
        return ArmResult([[0] * length for _ in prompts], spent, spent / 2, decode_tokens=len(prompts))

    return Arm(name, run)


def timing(a, b, tokens=8):
    """A Timing of arms a and b from seconds of each batch."""
    text = [[0] * tokens]
    runs = [[{"a": ArmResult(text, x, x), "b": ArmResult(text, y, y)}] for x, y in zip(a, b, strict=True)]
    return Timing([([[1]], [i]) for i in range(len(runs))], runs)


def test_arms_take_turns_on_every_batch():
    log = []
    interleave([fake("a", 1, log), fake("b", 1, log)], PROMPTS, rows=2, seed=7, repeats=2, warmup=1)
    warm, timed = log[:2], log[2:]
    assert [name for name, *_ in warm] == ["a", "b"]
    assert [name for name, *_ in timed] == ["a", "b", "b", "a", "b", "a", "a", "b"]
    assert [seed for *_, seed in timed] == [7] * 4 + [8] * 4
    keys = row_ids(PROMPTS)
    assert [ids for _, _, ids, _ in timed[::2]] == [keys[:2], keys[2:]] * 2


def test_warm_up_is_not_recorded_and_progress_is_told():
    seconds, seen = iter([100.0, 1.0, 1.0]), []
    found = interleave([fake("a", seconds)], PROMPTS, rows=2, progress=lambda done, total: seen.append((done, total)))
    assert found.speed("a") == 12 / 2
    assert seen == [(1, 2), (2, 2)]


def test_speed_is_tokens_over_seconds_with_prefill_and_without():
    found = interleave([fake("a", iter([9, 1.0, 3.0]))], PROMPTS, rows=2)
    assert found.speed("a") == 12 / 4
    assert found.speed("a", decode=True) == 3 / 2  # the fake pays decode seconds for one token a prompt


def test_ratio_is_of_sums_and_its_interval_is_paired():
    drift = np.random.default_rng(0).uniform(1, 100, 20)  # of the machine, the same for both arms
    paired = timing(drift, 2 * drift).ratio("a", "b")
    assert paired == pytest.approx((2, 2, 2))
    uneven = timing([1, 10], [4, 10])
    assert uneven.ratio("a", "b").value == pytest.approx(14 / 11)  # a mean of ratios would say 2.5
    assert uneven.ratio("a", "b") == uneven.ratio("a", "b")


def test_bootstrap_interval_covers_a_known_ratio():
    rng, true, hits = np.random.default_rng(1), 1.5, 0
    for _ in range(150):
        a, b = rng.uniform(0.5, 1.5, 40), true * rng.uniform(0.5, 1.5, 40)
        low, high = timing(a, b).ratio("a", "b", resamples=300)[1:]
        hits += low <= true <= high
    assert 0.90 <= hits / 150 <= 0.99


def test_one_batch_has_no_interval_and_repeats_do_not_make_one():
    batch = {"a": ArmResult([[0]], 1, 1), "b": ArmResult([[0]], 2, 2)}
    found = Timing([([[1]], [1])], [[batch, batch]]).ratio("a", "b")
    assert found.value == 2 and math.isnan(found.low) and math.isnan(found.high)


def test_arms_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="arm 'b' emitted"):
        interleave([fake("a", 1), fake("b", 1, length=5)], PROMPTS, rows=2)
    with pytest.raises(ValueError, match="different names"):
        interleave([fake("a", 1), fake("a", 1)], PROMPTS, rows=2)
    with pytest.raises(ValueError, match="no arm 'c'"):
        interleave([fake("a", 1)], PROMPTS, rows=2).speed("c")


@pytest.fixture(scope="module")
def pair():
    """Target and draft that may end at once, with defaults that would change the distribution if they leaked."""
    models = tiny(vocab=12, layers=1, hidden=8, eos=0), tiny(vocab=12, layers=1, hidden=8, seed=1, eos=0)
    for model in models:
        model.generation_config = GenerationConfig(
            do_sample=True, temperature=0.01, top_k=1, eos_token_id=list(range(6)), repetition_penalty=3.0
        )
    return models


def test_engine_arm_ignores_end_tokens_and_counts(pair):
    target, draft = pair
    engine = Engine(target, Independent(draft), policy=Fixed(2), rows=2)
    found = interleave([engine_arm("a", engine, Sampling(), 6)], PROMPTS, rows=2, warmup=0, repeats=2)
    texts, stats = found.texts("a"), found.stats("a")
    assert [len(text) for text in texts.tokens] == [6] * 6
    assert texts.prompts == PROMPTS[:2] * 2 + PROMPTS[2:] * 2
    assert [row.tokens for row in texts.counts] == [6] * 6
    expected = engine.generate([texts.prompts[2]], max_new_tokens=6, seed=1, ids=[texts.ids[2]], ignore_eos=True)
    assert texts.tokens[2] == expected.tokens[0]  # the repeat had the next seed
    assert stats.tokens == 36 and stats.target_calls == sum(row.target_calls for row in texts.counts)
    assert 0 < sum(r.decode_seconds for r in found.results("a")) < sum(r.seconds for r in found.results("a"))


def test_transformers_arms_decode_under_the_same_distribution(pair):
    target, draft = pair
    own, greedy = target.generation_config, Sampling(temperature=0)
    arms = [
        engine_arm("engine", Engine(target, rows=3), greedy, 8),
        transformers_arm("plain", target, greedy, 8),
        transformers_arm("assisted", target, greedy, 8, assistant=draft, k=3),
        transformers_arm("perfect", target, greedy, 8, assistant=copy.deepcopy(target), k=3),
    ]
    found = interleave(arms, PROMPTS, rows=3, warmup=0)
    for arm in ("plain", "assisted", "perfect"):
        assert found.texts(arm).tokens == found.texts("engine").tokens
    assert found.stats("plain").tau == 1
    assert found.stats("perfect").tau == 4  # all three drafts, and one more
    assert found.results("plain")[0].decode_tokens == 3 * 7
    assert found.results("perfect")[0].decode_tokens == 3 * 4
    assert target.generation_config is own


def test_transformers_arm_samples_from_the_regime_asked_for(pair):
    arm = transformers_arm("plain", pair[0], Sampling(), 12)
    before = torch.random.get_rng_state()
    texts = [arm.run([PROMPTS[0]], [0], seed).tokens for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]  # top_k = 1 of the model's own settings would make all equal
    assert torch.equal(before, torch.random.get_rng_state())


def test_settings_an_arm_cannot_honour_are_refused(pair):
    with pytest.raises(ValueError, match="presence_penalty"):
        transformers_arm("a", pair[0], Sampling(presence_penalty=1), 4)
    with pytest.raises(ValueError, match="stop_ids"):
        engine_arm("a", Engine(pair[0]), Sampling(stop_ids=(3,)), 4)


def test_counts_by_depth_tell_prefix_from_conditional():
    row = Counts()
    for tokens, drafted, accepted in [(3, 2, 2), (2, 2, 1), (1, 2, 0), (2, 1, 1)]:
        row.add(tokens, drafted, accepted)
    assert row.prefix == [3 / 4, 1 / 3]
    assert row.conditional == [3 / 4, 1 / 2]  # the round that drafted one never tried the second
    both = pooled([Stats(rows=[row]), Stats(rows=[row])])
    assert len(both.rows) == 2 and both.tokens == 0
    both.merge(row)
    both.merge(row)
    assert both.tokens == 16 and both.conditional == row.conditional and both.drafted == [8, 6]


def test_starts_of_rounds_are_kept_by_row():
    stats = Stats(rows=[Counts(), Counts()])
    for row, tokens in [(0, 3), (1, 1), (0, 2), (1, 4), (0, 1)]:
        stats.count(row, tokens, 3, tokens - 1)
    assert [row.starts for row in stats.rows] == [[0, 3, 5], [0, 1]]


def test_interleaved_costs_are_medians_of_a_round_robin():
    order, now = [], 0.0
    durations = {"a": iter([50, 3, 1, 2]), "b": iter([50, 7, 7, 7])}

    def task(name):
        def run():
            nonlocal now
            order.append(name)
            now += next(durations[name])

        return run

    found = interleaved({"a": task("a"), "b": task("b")}, repeats=3, warmup=1, clock=lambda: now)
    assert found == {"a": 2, "b": 7} and order == ["a", "b"] * 4


def test_best_length_agrees_with_the_published_formula():
    """Leviathan et al. 2023, theorem 3.8, T5 EnDe base at temperature 0: alpha .8, c .04, K = 7 gives 3.3."""
    alpha, c = 0.8, 0.04
    costs = Costs((1.0,) * 8, c, (0.0,) * 8)
    choice = best_k(costs, lambda k: (1 - alpha ** (k + 1)) / (1 - alpha))
    assert choice.speedups[7] == pytest.approx((1 - alpha**8) / ((1 - alpha) * (7 * c + 1)))
    assert choice.speedups[7] == pytest.approx(3.3, abs=0.07)
    assert choice.k == 7 and choice.speedup == choice.speedups[7]


def test_best_length_looks_past_a_cliff_and_may_be_none():
    cliff = Costs((1.0, 2.0, 2.0, 2.0, 2.0), 0.01, (0.0,) * 5)
    assert best_k(cliff, lambda k: 1 + 0.9 * k).k == 4  # k = 1 is slower than plain: a local rule stops there
    assert best_k(cliff, lambda k: 1 + 0.9 * k).speedups[1] < 1
    assert best_k(Costs((1.0, 2.0), 0.5, (0.1, 0.1)), lambda k: 1.2).k == 0
    assert Costs((1.0, 2.0), 0.5, (0.25, 0.1)).round(1) == 2.6
    assert Costs((1.0, 2.0), 0.5, (0.25, 0.1), first=0.3).round(1) == pytest.approx(2.9)
    assert Costs((1.0, 2.0), 0.5, (0.25, 0.1), first=0.3).round(0) == 1.25
    assert Costs((1.0, 2.0), 0.5, (0.25, 0.1)).ratio == 0.4


def test_drafting_is_a_line_through_two_lengths(pair, monkeypatch):
    """7 seconds for two drafts and 19 for eight: 2 a step and 3 besides, of rounds that start with one lacking id."""
    drafted = []
    propose = Independent.propose

    def noted(self, round):
        drafted.append((round.k, list(self.stored)))
        return propose(self, round)

    def timed(tasks, *_):
        for task in [*tasks.values()] * 2:
            task()
        return {key: {("draft", 2): 7.0, ("draft", 8): 19.0}.get(key, 1.0) for key in tasks}

    monkeypatch.setattr(Independent, "propose", noted)
    monkeypatch.setattr("inference.measure.costs.interleaved", timed)
    found = measure_costs(LM(pair[0], 1), Independent(pair[1]), 2, context=10)
    assert (found.draft, found.first, found.drafting(0), found.drafting(4)) == (2, 3, 0, 11)
    assert drafted == [([2], [9]), ([8], [9])] * 2
    measure_costs(LM(pair[0], 2), Independent(pair[1]), 2, context=10)
    assert [stored for _, stored in drafted[4:]] == [[4, 9], [4, 9], [3, 8], [3, 8]]  # later some row lacks two


def test_a_table_is_joined_of_the_ways_that_are_run():
    eager, compiled = Costs((1.0, 2.0), 0.5, (0.1, 0.2), first=0.1), Costs((0.9, 1.5), 0.6, (0.3, 0.4), first=0.2)
    found = joined(compiled, eager, compiled)
    assert (found.target, found.draft, found.first, found.rest) == ((0.9, 2.0), 0.6, 0.2, (0.1, 0.2))


def test_costs_are_measured_on_the_shapes_asked_for(pair):
    widths = []
    target, draft = LM(pair[0], 3), Independent(pair[1])
    forward = target.forward

    def noted(ids, *rest, **options):
        widths.append(ids.shape)
        return forward(ids, *rest, **options)

    target.forward = noted
    found = measure_costs(target, draft, 2, context=10, repeats=1, warmup=0)
    assert widths.count((3, 1)) == 2 and widths.count((3, 2)) == 1 and widths.count((3, 3)) == 2
    assert len(found.target) == len(found.rest) == 3
    assert min(*found.target, *found.rest, found.draft) > 0
    assert (found.rows, found.context, found.target_dtype) == (3, 10, "float64")
    with pytest.raises(ValueError, match="context=254"):
        measure_costs(target, draft, 2, context=254)
