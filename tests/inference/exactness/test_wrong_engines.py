"""Engines that are wrong in one way each must fail the verdict, those that are right must pass it."""

import copy
import dataclasses

import pytest
import torch

from inference import Engine, Sampling, round
from inference.exactness import checks
from inference.exactness.checks import check, check_calls, check_depth
from inference.exactness.side_by_side import Figures, pair_figures
from inference.exactness.ties import Compared, Difference, excused
from inference.measure.timing import Emitted
from inference.models import compiled, forward, llama_weights
from inference.noise import row_ids
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.base import Proposal
from inference.stats import Counts
from inference.verify import chain
from tests import late_faults
from tests.inference.test_distribution import constant
from tests.late_faults import FAULTS, scaled
from tests.tiny import near, tiny

V, NEW, K = 16, 48, 3
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
DTYPES = pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """The verdict must see by itself what the check of a new engine sees too."""
    monkeypatch.setattr("inference.models.lm.lean_agrees", lambda model, context: True)
    monkeypatch.setattr("inference.models.lm.form_of", lambda model, context: "one")


def prompts(rows):
    return [[1 + i % 7, (3 * i) % V, i % 5] for i in range(rows)]


def pair(dtype, noise=0.02, **settings):
    target = tiny(vocab=V, layers=1, seed=3, dtype=SINGLE)
    return target.to(dtype), near(tiny(vocab=V, layers=1, seed=3, dtype=SINGLE, **settings), noise).to(dtype)


def run(target, proposer, sampling=Sampling(), rule="token", rows=8, new=NEW, seed=5, **settings):  # noqa: B008
    engine = Engine(target, proposer, verify=rule, policy=Fixed(K), rows=rows, **settings)
    keys = row_ids(prompts(rows))
    out = engine.generate(prompts(rows), max_new_tokens=new, sampling=sampling, seed=seed, ids=keys, ignore_eos=True)
    return engine, Emitted(prompts(rows), keys, out.tokens, out.stats.rows)


def verdict(target, proposer, sampling=Sampling(), rule="token", **settings):  # noqa: B008
    engine, texts = run(target, proposer, sampling, rule, **settings)
    return check(engine, texts, sampling, NEW, seed=5)


def verifying(window):
    """A pass over a round's drafts: of several ids, but no prompt."""
    return 1 < window.positions.shape[1] <= forward.SHORT and window.start != 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0), Sampling(0.7, top_p=0.9)], ids=["1", "0", "top-p"])
@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE, HALF], ids=["float64", "float32", "bfloat16"])
def test_an_exact_engine_passes_in_every_dtype(dtype, sampling):
    target, draft = pair(dtype)
    found = verdict(target, Independent(draft), sampling)
    assert found.passed, found.lines()
    assert found.text.compared == found.text.tokens == 8 * NEW
    assert found.logits.one < found.logits.limit and found.logits.own > 0


@DTYPES
def test_verifying_passes_that_see_the_last_tokens_alone_fail(dtype, monkeypatch):
    plain = forward.Lean.mask

    def mask(self, window):
        if not verifying(window):
            return plain(self, window)
        return forward.additive(forward.visible(window, self.model.device, 24), self.shape.held)

    monkeypatch.setattr(forward.Lean, "mask", mask)
    target, draft = pair(dtype)
    found = verdict(target, Independent(draft))
    assert not found.text.passed and found.text.noise > found.text.limit
    assert found.logits.many > found.logits.limit > found.logits.one


@DTYPES
def test_attention_of_another_scale_in_every_pass_fails(dtype, monkeypatch):
    shape_of = llama_weights.shape_of
    monkeypatch.setattr(
        llama_weights, "shape_of", lambda model: shape_of(model)._replace(scale=1.5 * shape_of(model).scale)
    )
    target, draft = pair(dtype)
    found = verdict(target, Independent(draft))
    assert found.text.passed  # its passes agree with each other
    assert not found.logits.passed and not found.passed
    assert min(found.logits.one, found.logits.many) > found.logits.limit


@DTYPES
def test_verifying_passes_one_position_off_fail(dtype, monkeypatch):
    rotation = forward.Lean.rotation

    def off(self, window):
        if not verifying(window):
            return rotation(self, window)
        moved = dataclasses.replace(window, positions=window.positions + 1, start=None, limit=window.limit + 1)
        return rotation(self, moved)

    monkeypatch.setattr(forward.Lean, "rotation", off)
    target, draft = pair(dtype)
    found = verdict(target, Independent(draft))
    assert not found.text.passed and not found.logits.passed


@pytest.mark.parametrize(
    ("dtype", "fault"), [*((SINGLE, fault) for fault in (None, *FAULTS)), (HALF, None), (HALF, FAULTS[0])]
)
def test_what_goes_wrong_late_in_a_text_fails(dtype, fault, monkeypatch):
    if fault:
        fault(monkeypatch)
    target = scaled(dtype)
    engine, texts = run(target, Independent(near(target, 0.02)), rows=2, new=late_faults.NEW)
    found = check(engine, texts, Sampling(), late_faults.NEW, seed=5)
    assert (found.passed, found.logits.passed) == (not fault, not fault), found.lines()
    assert (found.logits.first, found.logits.last) == (3, 2 + late_faults.NEW)
    if fault in (late_faults.angles_modulo_256, late_faults.rope_scaling_left_out) and dtype == SINGLE:
        assert not found.surprise.passed  # p is transformers' own, so that it sees large faults too


def test_what_is_judged_is_the_compiled_engine(monkeypatch):
    step = compiled.Step.forward

    def wrong(self, *inputs):
        logits, *states = step(self, *inputs)
        logits = logits.clone()
        logits[..., 0] += 1
        return [logits, *states]

    monkeypatch.setattr(torch, "compile", lambda module: module)
    target, draft = pair(SINGLE)
    assert verdict(target, Independent(draft), compile=True).passed
    monkeypatch.setattr(compiled.Step, "forward", wrong)
    assert verdict(target, Independent(draft)).passed
    found = verdict(target, Independent(draft), compile=True)
    assert not found.logits.passed and not found.passed


def calls(draft_kind=Independent, rule="token", dtype=SINGLE, noise=0.02, rows=128):
    """(b) and (c) of more tokens, whose coins decide."""
    target, draft = pair(dtype, noise)
    engine, texts = run(target, draft_kind(draft), rule=rule, rows=rows)
    figures = pair_figures(engine, engine.proposer, texts, Sampling(), NEW, 0.0)
    return check_calls(figures, texts, rule), check_depth(figures, texts)


@pytest.mark.parametrize(("rule", "dtype"), [("token", HALF), ("block", SINGLE)])
def test_the_coins_of_an_exact_engine_are_those_expected(rule, dtype):
    found, depth = calls(rule=rule, dtype=dtype)
    assert found.passed and depth.passed and found.rare_expected < 5


class Warmer(Independent):
    """Says that its distribution was warmer than the one that it drew from."""

    def propose(self, round):
        x, q, k, _ = super().propose(round)
        return Proposal(x, (q.log() / 1.1).softmax(-1), k)


@DTYPES
def test_a_draft_distribution_of_another_temperature_fails(dtype):
    found, _ = calls(Warmer, dtype=dtype, rows=160)
    assert not found.passed and found.rare > 2 * found.rare_expected


@DTYPES
def test_rounding_does_not_excuse_a_draft_distribution_of_another_temperature(dtype):
    target, draft = pair(dtype, 0.02)
    engine, texts = run(target, Warmer(draft), rows=160)
    found = check(engine, texts, Sampling(), NEW)
    assert not found.calls.passed and not found.passed


def test_a_draft_that_is_nearly_the_target_raises_no_alarm():
    """Where passes afterwards show no difference at all, and those of the run showed one by rounding."""
    target, draft = pair(SINGLE, 0.001)
    engine, texts = run(target, Independent(draft), rows=160)
    found = pair_figures(engine, engine.proposer, texts, Sampling(), NEW, 0.0)
    equal = dataclasses.replace(found, logq=found.logp)
    spread = float((found.logq - found.logp).std())
    assert not check_calls(equal, texts, "token").passed
    told = check_calls(dataclasses.replace(equal, rounding=spread), texts, "token")
    assert told.z_rare < 4 and told.rare_expected > told.rare / 2


def test_the_residual_of_another_rule_fails(monkeypatch):
    residual = chain._residual
    monkeypatch.setattr(chain, "_residual", lambda p, q, n, k, w: residual(p, q, n, k, None))
    assert not calls(rule="block", noise=0.1)[0].passed
    monkeypatch.setattr(chain, "_residual", lambda p, q, n, k, w: chain._at(p, n))
    assert calls(noise=0.1, rows=32)[0].z > 4


def test_coins_that_are_the_drafts_own_numbers_fail(monkeypatch):
    """Of one distribution after every text: with distributions that differ by context the error averages out in the
    counts."""
    monkeypatch.setattr(round, "ACCEPT", round.DRAFT)
    target, draft = constant([0.6, 0.3, 0.1]), constant([0.3, 0.2, 0.5])
    engine = Engine(target, Independent(draft), policy=Fixed(K), rows=128)
    texts = [[token % 3] for token in range(128)]
    keys = row_ids(texts)
    out = engine.generate(texts, max_new_tokens=12, ids=keys)
    emitted = Emitted(texts, keys, out.tokens, out.stats.rows)
    figures = pair_figures(engine, engine.proposer, emitted, Sampling(), 12, 0.0)
    assert not check_calls(figures, emitted, "token").passed


def test_a_rounded_draft_is_predicted_with_its_rounded_weights():
    """Draft = target but for the rounding: whatever is refused is refused for that."""
    target = tiny(vocab=V, layers=1, seed=3, dtype=HALF)
    engine, texts = run(target, Independent(copy.deepcopy(target), int8=True), rows=64)
    figures = pair_figures(engine, engine.proposer, texts, Sampling(), NEW, 0.0)
    found = check_calls(figures, texts, "token")
    assert found.measured > 1.02 * found.tokens / (K + 1)
    assert abs(found.z) < 3 and found.passed and found.sigma > 1


class Unsteady:
    """Rounding of its own: what passes over a cache say of every logit is off by a share of it that depends on the
    width of the pass."""

    def __init__(self, model, share):
        self.share = share
        model.register_forward_hook(self, with_kwargs=True)

    def __call__(self, module, args, kwargs, out):
        n = kwargs["input_ids"].shape[1] if "input_ids" in kwargs else 0
        if kwargs.get("past_key_values") is not None and n > 1:
            signs = torch.arange(out.logits.shape[-1]) % 2 * 2 - 1
            out.logits = out.logits.float() * (1 + self.share * signs)


@pytest.mark.parametrize(("share", "passed"), [(0.01, True), (0.3, False)])
def test_the_comparison_goes_on_behind_a_tie(share, passed):
    """Rounding is a tie up to what the dtype allows, and every token is compared; what is beyond is no tie, though all
    passes of several ids have it."""
    target, draft = pair(HALF)
    Unsteady(target, share)
    found = verdict(target, Independent(draft), Sampling(0.7), rows=16)
    assert found.text.compared == 16 * NEW and found.text.ties > 0
    assert found.text.passed is found.logits.passed is passed


def test_a_gap_beyond_the_dtype_is_no_tie_however_noisy_the_passes():
    logits = torch.tensor([1.0, 0.5, 0.0])
    tie = Difference(0.5, logits, torch.zeros(3), 0, 1, limit=0.6)
    assert excused(tie, 0.3, Sampling(0)) and not excused(tie, 0.2, Sampling(0))
    assert not excused(tie._replace(limit=0.4), 0.3, Sampling(0))


def test_texts_are_those_of_rounds_with_drafts(monkeypatch):
    """(a) decodes speculatively, and every row of it."""
    asked = []
    target, draft = pair(SINGLE)
    engine, texts = run(target, Independent(draft))
    propose = engine.proposer.propose
    monkeypatch.setattr(
        engine.proposer, "propose", lambda round: asked.append((round.rule.name, len(round.k))) or propose(round)
    )
    found = check(engine, texts, Sampling(), NEW)
    assert {rule for rule, _ in asked} == {"coupled"} and engine.rule.name == "token"
    assert max(rows for _, rows in asked) == 8  # one row alone is asked for the shape
    assert (found.text.prompts, found.text.compared, found.text.tokens) == (8, 8 * NEW, 8 * NEW)


def test_sigma_is_that_of_the_coins():
    """Of texts whose every token survives with one half, two drafts a round: coins thrown here."""
    length, texts = 60, 50
    zeros = torch.zeros(texts, length, dtype=torch.float64)
    k = torch.tensor([min(2, length - t - 1) for t in range(length)]).expand(texts, -1)
    never = zeros > 0
    figures = Figures(zeros + 0.5, zeros + 0.25, zeros, never, never, k, torch.full((texts,), length))
    figures = dataclasses.replace(figures, logp=figures.logp.log(), logq=figures.logq.log())
    coins = torch.rand(4000, length, generator=torch.Generator().manual_seed(0)) < 0.5
    at, rounds = torch.zeros(4000, dtype=torch.int64), torch.zeros(4000)
    for _ in range(length):
        going = at < length
        rounds += going
        n = torch.stack([coins.gather(1, (at + i).clamp(max=length - 1)[:, None])[:, 0] for i in range(2)], 1)
        inside = torch.stack([at + i + 1 < length for i in range(2)], 1)
        at = torch.where(going, at + (n & inside).long().cumprod(1).sum(1) + 1, at)
    counts = [Counts(length, length, starts=list(range(length))) for _ in range(texts)]
    found = check_calls(figures, Emitted([[1]] * texts, [0] * texts, [[1] * length] * texts, counts), "token")
    assert found.predicted == pytest.approx(texts * rounds.mean().item(), rel=0.01)
    assert found.sigma == pytest.approx(texts**0.5 * rounds.std().item(), rel=0.05)


def test_a_draft_with_a_smaller_context_is_predicted_as_it_drafts():
    target, draft = pair(SINGLE, positions=32)
    found = verdict(target, Independent(draft))
    assert found.passed, found.lines()
    assert found.calls.measured > 8 * (NEW - 32)  # a call a token, past it


@pytest.mark.parametrize(("noise", "limit"), [(1e-9, 0.5), (0.5, 1e-9)])
def test_neither_noisy_passes_nor_a_wide_bound_alone_excuse(noise, limit, monkeypatch):
    """Where certain distributions are compared, what may be rounding is the smaller of the two."""
    asked, right = [], checks.check_coupled
    found = {"noise": noise, "limit": limit}
    monkeypatch.setattr(checks, "check_coupled", lambda *given: dataclasses.replace(right(*given), **found))
    monkeypatch.setattr(checks, "pair_figures", lambda *given: asked.append(given[5]) or pair_figures(*given))
    target, draft = pair(SINGLE)
    assert verdict(target, Independent(draft), Sampling(0)).calls.near == 0
    assert asked[0] < 1e-8


@pytest.mark.parametrize(("gap", "ties"), [(0.08, 1), (0.2, 0)])
def test_texts_that_show_no_noise_have_the_rounding_of_their_logits(gap, ties, monkeypatch):
    """In a short text passes of all widths may agree to the bit. The dtype allows .4 here, an eighth of it always."""
    one = Difference(gap, torch.tensor([gap, 0.0]), torch.zeros(2), plain=0, other=1, limit=0.4)
    monkeypatch.setattr(checks, "compare_text", lambda *_, **__: Compared([one], 24, 0.0, 0.4))
    target, draft = pair(SINGLE)
    found = verdict(target, Independent(draft)).text
    assert (found.ties, found.unexplained) == (ties, 1 - ties)
