"""The verdict: it passes an exact engine in every regime, and names the check that a planted fault fails."""

import pytest
import torch

from inference import Engine, Sampling
from inference.exactness.checks import check, check_text
from inference.exactness.teacher_forced import teacher_forced
from inference.exactness.ties import Difference, compare_passes, is_tie
from inference.measure.timing import Emitted
from inference.noise import row_ids
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from inference.proposers.base import Proposal
from inference.sampling import one_hot, probs
from tests.tiny import tiny

V, NEW = 8, 24
PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 1, 2, 3]] * 4


@pytest.fixture(scope="module")
def pair():
    """Target and a draft near it."""
    target, draft = (tiny(vocab=V, layers=1, hidden=8, seed=3) for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.15 * torch.randn_like(weight)
    return target, draft


def run(target, proposer, sampling, rule="token", k=3):
    engine = Engine(target, proposer, verify=rule, policy=Fixed(k), rows=len(PROMPTS))
    keys = row_ids(PROMPTS)
    out = engine.generate(PROMPTS, max_new_tokens=NEW, sampling=sampling, seed=5, ids=keys, ignore_eos=True)
    return engine, Emitted(PROMPTS, keys, out.tokens, out.stats.rows)


def verdict(target, proposer, sampling=Sampling(), rule="token"):  # noqa: B008
    engine, texts = run(target, proposer, sampling, rule)
    return check(engine, texts, sampling, NEW)


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [
        ("token", Sampling()),
        ("block", Sampling(0.8, top_p=0.9)),
        ("match", Sampling(repetition_penalty=1.3)),
    ],
)
def test_an_exact_engine_passes(pair, rule, sampling):
    found = verdict(pair[0], Independent(pair[1]), sampling, rule)
    assert found.passed, found.lines()
    assert found.text.equal == found.text.prompts == len(PROMPTS) and found.text.noise < 1e-6
    assert 0 < found.calls.sigma < 0.1 * found.calls.predicted and abs(found.calls.relative) < 0.2
    assert found.depth.rounds > 100


def test_coupled_trees_are_judged_by_what_is_known_of_them(pair):
    """Their acceptance hangs on the noise of the text: neither (b) nor (c) applies."""
    found = verdict(pair[0], Independent(pair[1], shape=(-1, -1, 0, 0)), rule="coupled")
    assert found.passed, found.lines()
    assert found.depth is None and "coupled is not known from the text alone" in found.missing["depth"]


@pytest.mark.parametrize("shape", [None, (-1, -1, 0)])
def test_a_lossy_rule_is_never_called_exact(pair, shape):
    """Not even with a perfect draft, where its texts show nothing."""
    found = verdict(pair[0], Independent(pair[0], shape=shape), rule="lossy_typical")
    assert not found.passed and not found.figures["passed"]
    assert found.lines()[0] == "exactness: no, lossy_typical changes the text's distribution"
    assert found.calls is None and "lossy_typical" in found.missing["calls"]


@pytest.mark.parametrize("greedy", [Sampling(temperature=0), Sampling()])
def test_certain_drafts_are_predicted_to_the_call(pair, greedy):
    """One-hot draft distributions leave no coins: the calls of a text are known."""
    found = verdict(pair[0], Independent(pair[1], greedy=True), greedy)
    assert found.passed and found.calls.sigma == 0 and found.calls.near == 0
    assert found.calls.predicted == pytest.approx(found.calls.measured, abs=1e-6)
    assert found.calls.measured < len(PROMPTS) * NEW


def test_a_perfect_draft_passes_in_float32():
    """Distributions that sum to one but for rounding: no coin may come out of that."""
    models = [tiny(vocab=V, layers=1, hidden=8, seed=3, dtype=torch.float32) for _ in range(2)]
    found = verdict(models[0], Independent(models[1]))
    assert found.passed and found.depth.measured == 1
    assert found.calls.predicted == pytest.approx(len(PROMPTS) * NEW / 4, rel=1e-3)


class Flattened(Independent):
    """Returns a uniform distribution, though it drew from another: accepts too much."""

    def propose(self, round):
        x, q, k, _ = super().propose(round)
        return Proposal(x, torch.full_like(q, 1 / V), k)


class Certain(Independent):
    """Says that its drafts were certain: accepts too little, p(x) instead of min(1, p/q)."""

    def propose(self, round):
        x, q, k, _ = super().propose(round)
        return Proposal(x, one_hot(x, q), k)


def test_a_wrong_draft_distribution_that_accepts_too_much_fails(pair):
    found = verdict(pair[0], Flattened(pair[1]))
    assert found.text.passed  # the coupled rule never reads q
    assert found.depth.measured > found.depth.alpha + 3 * found.depth.sigma
    assert not found.depth.passed and not found.passed


def test_a_wrong_draft_distribution_that_accepts_too_little_fails(pair):
    found = verdict(pair[0], Certain(pair[1]))
    assert found.depth.passed and found.calls.z > 4 and not found.passed


def test_one_changed_token_is_unexplained(pair):
    target, keys, seed, prompts = pair[0], row_ids(PROMPTS[:4]), 2, PROMPTS[:4]
    engine = Engine(target, verify="coupled")
    plain = engine.generate(prompts, max_new_tokens=6, seed=seed, ids=keys, ignore_eos=True).tokens
    planted = [list(text) for text in plain]
    planted[1][4] = (planted[1][4] + 1) % V
    shorter = [*plain[:3], plain[3][:-1]]
    same, other, cut = (
        check_text(target, prompts, plain, texts, (keys, seed), Sampling(), V, k=3, rows=2)
        for texts in (plain, planted, shorter)
    )
    assert same.passed and (same.equal, same.ties, same.unexplained) == (4, 0, 0)
    assert not other.passed and (other.equal, other.ties, other.unexplained) == (3, 0, 1)
    assert other.gap > 1000 * other.noise
    assert cut.unexplained == 1


def test_equal_logits_are_a_tie():
    """Two tokens with one embedding: at temperature 0 either is the argmax."""
    target = tiny(vocab=V, layers=1, hidden=8, seed=3, dtype=torch.bfloat16)
    with torch.no_grad():
        target.lm_head.weight[5] = target.lm_head.weight[2]
    greedy, prompts = Sampling(temperature=0), [[token] for token in range(V)]
    plain = Engine(target).generate(prompts, max_new_tokens=5, sampling=greedy, ignore_eos=True).tokens
    other = [[5 if token == 2 else token for token in text] for text in plain]
    found = check_text(target, prompts, plain, other, (row_ids(prompts), 0), greedy, V, k=2)
    assert found.passed and found.ties == sum(2 in text for text in plain) > 0


@pytest.mark.parametrize(
    ("sampling", "logits", "tie"),
    [
        (Sampling(0), [1.0, 0.99, 0.0], True),
        (Sampling(0), [1.0, 0.97, 0.0], False),
        (Sampling(top_k=1), [1.0, 0.99, 0.0], True),
        (Sampling(top_k=1), [1.0, 0.97, 0.0], False),
        (Sampling(min_p=0.5), [1.0, 0.31, 0.0], True),  # log .5 = -.693: the edge is at .307, inside
        (Sampling(min_p=0.5), [1.0, 0.30, 0.0], True),  # outside
        (Sampling(min_p=0.5), [1.0, 0.25, 0.0], False),
    ],
)
def test_a_tie_is_a_gap_or_an_edge_within_the_noise(sampling, logits, tie):
    """Token 1 stands against token 0; its Gumbel noise is far ahead wherever there is a temperature."""
    logits, g = torch.tensor(logits), torch.tensor([0.0, 5.0, 0.0])
    scores = logits + sampling.temperature * g
    emitted = int((probs(logits, sampling).log() + g).argmax())
    difference = Difference(abs(float(scores[1] - scores[0])), logits, g, emitted, 1 - emitted)
    assert is_tie(difference, 0.02, sampling) == tie


def test_teacher_forcing_gives_the_logits_of_whole_texts(pair):
    texts = [[3, 1, 4, 1, 5], [2, 6], [7, 1, 1, 3]]
    for width, block in ((None, 64), (1, 3), (2, 4)):
        rows = {}
        settings = {"vocabulary": V, "width": width, "block": block, "rows": 2}
        for one in teacher_forced(pair[0], PROMPTS[:3], texts, Sampling(), **settings):
            for a, i in enumerate(one.rows):
                rows.setdefault(i, []).append(one.logits[a][one.valid[a]])
                assert one.x[a][one.valid[a]].tolist() == texts[i][one.start : one.start + one.x.shape[1]]
        for i, (prompt, text) in enumerate(zip(PROMPTS[:3], texts, strict=True)):
            whole = pair[0](torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(torch.cat(rows[i]), whole, atol=1e-10, rtol=0)


def test_teacher_forcing_applies_the_history_of_each_token(pair):
    text = [3, 1, 3, 2]
    plain, penal = (
        next(teacher_forced(pair[0], [[3, 5]], [text], sampling, vocabulary=V)).logits[0]
        for sampling in (Sampling(), Sampling(frequency_penalty=0.5))
    )
    expected = torch.zeros(4, V, dtype=torch.float64)
    expected[1:, 3], expected[2:, 1] = 0.5, 0.5
    expected[3, 3] = 1.0  # the prompt's own 3 does not count
    torch.testing.assert_close(plain - penal, expected)


def test_noise_is_what_wide_passes_change(pair):
    """A model whose logit of token 0 depends on the width of the pass, by .25."""

    def nudge(module, args, kwargs, out):
        out.logits[..., 0] += 0.25 * (kwargs["input_ids"].shape[1] > 1)

    hook = pair[0].register_forward_hook(nudge, with_kwargs=True)
    texts = [[0, 1, 2, 3, 4, 5]] * 4
    noise, found = compare_passes(pair[0], PROMPTS[:4], texts, Sampling(), vocabulary=V, width=3)
    hook.remove()
    assert noise == pytest.approx(0.25, abs=1e-9) and found == []


def test_look_up_is_checked_like_a_model(pair):
    found = verdict(pair[0], NGram())
    assert found.passed and found.calls.sigma == 0 and found.depth.rounds > 30
    assert found.calls.predicted == found.calls.measured


def test_what_cannot_be_checked_is_refused(pair):
    engine, texts = run(pair[0], Independent(pair[1]), Sampling())
    with pytest.raises(ValueError, match="without a proposer"):
        check(Engine(pair[0]), texts, Sampling(), NEW)
    with pytest.raises(ValueError, match="do not belong"):
        check(engine, texts._replace(tokens=[text[:-1] for text in texts.tokens]), Sampling(), NEW)
