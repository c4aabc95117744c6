"""Engines that are wrong in one way each must fail the verdict, those that are right must pass it."""

import copy
import dataclasses

import pytest
import torch

from inference import Engine, Sampling
from inference.exactness import verdict
from inference.exactness.figures import check_calls, check_depth
from inference.exactness.side_by_side import pair_figures
from inference.exactness.ties import Compared, Difference
from inference.exactness.verdict import check
from inference.models import forward, llama, step
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.base import Proposal
from inference.verify import chain
from tests import late_faults
from tests.late_faults import FAULTS, scaled
from tests.often import often
from tests.tiny import emitted, near, record_on_cpu, tiny

V, NEW, K = 16, 48, 3
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


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
    return engine, emitted(engine, prompts(rows), new, sampling, seed)


def verdict_of(target, proposer, sampling=Sampling(), rule="token", **settings):  # noqa: B008
    engine, texts = run(target, proposer, sampling, rule, **settings)
    return check(engine, texts, sampling, NEW, seed=5)


def verifying(window):
    """A pass over a round's drafts: of several ids, but no prompt."""
    return 1 < window.positions.shape[1] <= llama.SHORT and window.start != 0


@pytest.mark.parametrize(
    ("dtype", "sampling"),
    # in float32 others pass in `test_verdict`; greedy texts are those of plain decoding for every kind
    often(
        [(DOUBLE, Sampling()), (SINGLE, Sampling(0)), (HALF, Sampling(0)), (HALF, Sampling(0.7, top_p=0.9))],
        lambda case: case[1] != Sampling(0),
    ),
    ids=["float64-1", "float32-0", "bfloat16-0", "bfloat16-top-p"],
)
def test_an_exact_engine_passes_in_every_dtype(dtype, sampling):
    target, draft = pair(dtype)
    result = verdict_of(target, Independent(draft), sampling)
    assert result.passed, result.lines()
    assert result.text.compared == result.text.tokens == 8 * NEW
    assert result.logits.one < result.logits.limit and result.logits.own > 0


def test_verifying_passes_that_see_the_last_tokens_alone_fail(monkeypatch):
    plain = forward.Lean.mask

    def mask(self, window):
        if not verifying(window):
            return plain(self, window)
        return forward.additive(forward.visible(window, self.model.device, 24), self.shape.held)

    monkeypatch.setattr(forward.Lean, "mask", mask)
    target, draft = pair(SINGLE)
    result = verdict_of(target, Independent(draft))
    assert not result.text.passed and result.text.noise > result.text.limit
    assert result.logits.many > result.logits.limit > result.logits.one


def test_attention_of_another_scale_in_every_pass_fails(monkeypatch):
    shape_of = llama.shape_of
    monkeypatch.setattr(llama, "shape_of", lambda model: shape_of(model)._replace(scale=1.5 * shape_of(model).scale))
    target, draft = pair(HALF)
    result = verdict_of(target, Independent(draft))
    assert result.text.passed  # its passes agree with each other
    assert not result.logits.passed and not result.passed
    assert min(result.logits.one, result.logits.many) > result.logits.limit


@pytest.mark.parametrize(
    ("dtype", "fault"),
    often(
        [*((SINGLE, fault) for fault in FAULTS[1:]), (HALF, None)],
        lambda case: case[1] is late_faults.rope_scaling_left_out,
    ),
)
def test_what_goes_wrong_late_in_a_text_fails(dtype, fault, monkeypatch):
    if fault:
        fault(monkeypatch)
    target = scaled(dtype)
    engine, texts = run(target, Independent(near(target, 0.02)), rows=2, new=late_faults.NEW)
    result = check(engine, texts, Sampling(), late_faults.NEW, seed=5)
    assert (result.passed, result.logits.passed) == (not fault, not fault), result.lines()
    assert (result.logits.first, result.logits.last) == (3, 2 + late_faults.NEW)
    if fault in (late_faults.angles_modulo_256, late_faults.rope_scaling_left_out) and dtype == SINGLE:
        assert not result.surprise.passed  # p is transformers' own, so that it sees large faults too


def test_the_recorded_engine_is_checked(monkeypatch):
    right = step.Step.forward

    def wrong(self, *given, **inputs):
        logits, *states = right(self, *given, **inputs)
        logits = logits.clone()
        logits[..., 0] += 1
        return [logits, *states]

    target, draft = pair(SINGLE)
    record_on_cpu(monkeypatch)
    assert verdict_of(target, Independent(draft)).passed
    monkeypatch.setattr(step.Step, "forward", wrong)
    result = verdict_of(target, Independent(draft))
    assert not result.logits.passed and not result.passed


def calls(draft_kind=Independent, rule="token", dtype=SINGLE, noise=0.02, rows=128):
    """(b) and (c) of more tokens, whose coins decide."""
    target, draft = pair(dtype, noise)
    engine, texts = run(target, draft_kind(draft), rule=rule, rows=rows)
    figures = pair_figures(engine, engine.proposer, texts, Sampling(), NEW, 0.0)
    return check_calls(figures, texts, rule), check_depth(figures, texts)


class Warmer(Independent):
    """Says that its distribution was warmer than the one that it drew from."""

    def propose(self, round):
        x, q, k, _ = super().propose(round)
        return Proposal(x, (q.log() / 1.1).softmax(-1), k)


def test_a_draft_distribution_of_another_temperature_fails():
    """Rounding excuses it neither."""
    target, draft = pair(SINGLE)
    engine, texts = run(target, Warmer(draft), rows=160)
    unrounded = check_calls(pair_figures(engine, engine.proposer, texts, Sampling(), NEW, 0.0), texts, "token")
    assert not unrounded.passed and unrounded.rare > 2 * unrounded.rare_expected
    result = check(engine, texts, Sampling(), NEW)
    assert not result.calls.passed and not result.passed


def test_a_draft_that_is_nearly_the_target_raises_no_alarm():
    """Where passes afterwards show no difference at all, and those of the run showed one by rounding."""
    target, draft = pair(SINGLE, 0.001)
    engine, texts = run(target, Independent(draft), rows=160)
    result = pair_figures(engine, engine.proposer, texts, Sampling(), NEW, 0.0)
    equal = dataclasses.replace(result, logq=result.logp)
    spread = float((result.logq - result.logp).std())
    assert not check_calls(equal, texts, "token").passed
    corrected = check_calls(dataclasses.replace(equal, rounding=spread), texts, "token")
    assert corrected.z_rare < 4 and corrected.rare_expected > corrected.rare / 2


def test_the_residual_of_another_rule_fails(monkeypatch):
    residual = chain._residual
    monkeypatch.setattr(chain, "_residual", lambda p, q, n, k, w: residual(p, q, n, k, None))
    assert not calls(rule="block", noise=0.1)[0].passed
    monkeypatch.setattr(chain, "_residual", lambda p, q, n, k, w: chain._at(p, n))
    assert calls(noise=0.1, rows=32)[0].z > 4


def test_a_rounded_draft_is_predicted_with_its_rounded_weights():
    """Draft = target but for the rounding: whatever is refused is refused for that."""
    target = tiny(vocab=V, layers=1, seed=3, dtype=HALF)
    engine, texts = run(target, Independent(copy.deepcopy(target), int8=True), rows=64)
    figures = pair_figures(engine, engine.proposer, texts, Sampling(), NEW, 0.0)
    result = check_calls(figures, texts, "token")
    assert result.measured > 1.02 * result.tokens / (K + 1)
    assert abs(result.z) < 3 and result.passed and result.sigma > 1


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
def test_the_comparison_goes_on_after_a_tie(share, passed):
    """Rounding is a tie up to what the dtype allows, and every token is compared; what is beyond is no tie, though all
    passes of several ids have it."""
    target, draft = pair(HALF)
    Unsteady(target, share)
    result = verdict_of(target, Independent(draft), Sampling(0.7), rows=16)
    assert result.text.compared == 16 * NEW and result.text.ties > 0
    assert result.text.passed is result.logits.passed is passed


@pytest.mark.parametrize(("noise", "limit"), [(1e-9, 0.5), (0.5, 1e-9)])
def test_neither_noisy_passes_nor_a_wide_bound_alone_excuse(noise, limit, monkeypatch):
    """Where certain distributions are compared, what may be rounding is the smaller of the two."""
    calls_seen, right = [], verdict.check_coupled
    result = {"noise": noise, "limit": limit}
    monkeypatch.setattr(verdict, "check_coupled", lambda *given: dataclasses.replace(right(*given), **result))
    monkeypatch.setattr(verdict, "pair_figures", lambda *given: calls_seen.append(given[5]) or pair_figures(*given))
    target, draft = pair(SINGLE)
    assert verdict_of(target, Independent(draft), Sampling(0)).calls.near == 0
    assert calls_seen[0] < 1e-8


@pytest.mark.parametrize(("gap", "ties"), [(0.08, 1), (0.2, 0)])
def test_texts_that_show_no_noise_have_the_rounding_of_their_logits(gap, ties, monkeypatch):
    """In a short text passes of all widths may agree to the bit. The dtype allows .4 here, an eighth of it always."""
    one = Difference(gap, torch.tensor([gap, 0.0]), torch.zeros(2), plain=0, other=1, limit=0.4)
    monkeypatch.setattr("inference.exactness.ties.compare_text", lambda *_, **__: Compared([one], 24, 0.0, 0.4))
    target, draft = pair(SINGLE)
    result = verdict_of(target, Independent(draft)).text
    assert (result.ties, result.unexplained) == (ties, 1 - ties)
