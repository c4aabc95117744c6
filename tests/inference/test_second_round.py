"""What a second round of planted bugs survived, and engines whose last tokens have another distribution than the
target's."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cotrain.bench.plan import Plan
from cotrain.bench.planner import rounds_of, taus
from cotrain.config.groups import Bench
from cotrain.data import corpora as shipped_prompts
from cotrain.data.corpora import DOMAINS
from cotrain.data.splits import Prompts
from cotrain.losses import kl
from cotrain.losses.spec import parse
from cotrain.rollout import training_texts
from inference import Engine, Sampling, round
from inference.exactness.likelihood import LikelihoodCheck, check_likelihood, moments
from inference.exactness.verdict import Verdict, check
from inference.measure.floor import peak_memory
from inference.output import Emitted
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from inference.round import DecodingRound
from inference.sampling.noise import row_ids
from inference.verify import chain
from tests.folders import network, tokenizer
from tests.tiny import near, tiny

V, NEW, K, ROWS = 16, 48, 3, 32
PROMPTS = [[1 + i % 7, (3 * i) % V, i % 5] for i in range(ROWS)]


# --- texts whose distribution is not the target's


def run(
    proposer: type[Independent | NGram],
    times: int = 1,
    sampling: Sampling = Sampling(),  # noqa: B008
) -> tuple[Engine, Emitted]:
    target = tiny(vocab=V, layers=1, seed=3, dtype=torch.float32)
    drafts = NGram() if proposer is NGram else Independent(near(target))
    engine, keys = Engine(target, drafts, policy=Fixed(K), rows=times * ROWS), row_ids(times * PROMPTS)
    out = engine.generate(times * PROMPTS, max_new_tokens=NEW, sampling=sampling, seed=5, ids=keys, ignore_eos=True)
    return engine, Emitted(times * PROMPTS, keys, out.tokens, out.stats.rows)


def verdict(proposer: type[Independent | NGram], times: int = 1) -> Verdict:
    engine, texts = run(proposer, times)
    return check(engine, texts, Sampling(), NEW, seed=5)


def greedy_last(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodingRound, "last", lambda self, probs: probs.argmax(-1))


def likeliest_correction(patch: pytest.MonkeyPatch) -> None:
    """After a refusal alone; the bonus is right."""
    right = chain._residual

    def wrong(p, q, n, k, w):  # type: ignore[no-untyped-def]
        probs = right(p, q, n, k, w)
        sure = torch.nn.functional.one_hot(probs.argmax(-1), probs.shape[-1]).to(probs)
        return torch.where((n == k).unsqueeze(-1), probs, sure)

    patch.setattr(chain, "_residual", wrong)


@pytest.mark.parametrize("wrong", [greedy_last, likeliest_correction])
def test_tokens_after_the_accepted_ones_must_have_the_targets_distribution(
    wrong, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    """Calls and acceptance, which are judged given the text, do not see it."""
    wrong(monkeypatch)
    found = verdict(Independent)
    assert found.text.passed and found.calls and found.calls.passed and found.depth and found.depth.passed
    assert found.surprise and found.surprise.z < -5 and not found.surprise.passed and not found.passed
    assert found.figures["surprise"]["passed"] is False and found.lines()[-1].endswith("FAILED")


def test_texts_of_a_look_up_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdict(NGram)
    assert found.passed and found.surprise and abs(found.surprise.z) < 3, found.lines()
    greedy_last(monkeypatch)
    assert not verdict(NGram).passed


def test_z_of_right_texts_has_the_spread_of_a_standard_normal() -> None:
    engine, _ = run(Independent)
    found = []
    for seed in range(6):
        out = engine.generate(PROMPTS, max_new_tokens=NEW, sampling=Sampling(0.8), seed=seed, ignore_eos=True)
        texts = Emitted(PROMPTS, row_ids(PROMPTS), out.tokens, out.stats.rows)
        one = check_likelihood(engine, texts, Sampling(0.8))
        assert one.passed and one.tokens == ROWS * NEW and one.impossible == 0
        found.append((one.z, one.place_z))
    assert bool(((torch.tensor(found).std(0) - 1.1).abs() < 0.8).all())


def test_tokens_that_settings_cut_are_counted() -> None:
    engine, texts = run(Independent)
    found = check_likelihood(engine, texts, Sampling(top_p=0.7))
    assert 0.1 < found.impossible / found.tokens < 0.4 and math.isfinite(found.surprise) and not found.passed
    right = LikelihoodCheck(1000, 1.0, 1.0, 0.0, 0.0, 20)
    wrong = [{"impossible": 21}, {"z": 5.0}, {"z": -5.0}, {"place_z": 5.0}, {"place_z": -5.0}]
    assert right.passed and not any(replace(right, **one).passed for one in wrong)  # type: ignore[arg-type]


def test_moments_are_those_of_the_distribution() -> None:
    """By enumeration: both differences have mean 0 and the variance that is said."""
    p = torch.rand(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p[0, 2:4] = 0
    p[2] = torch.nn.functional.one_hot(torch.tensor(4), 7)
    p = p / p.sum(-1, keepdim=True)
    found = torch.stack([moments(p, torch.full((3,), v)) for v in range(7)], 1)  # (3, 7, 5)
    assert bool(((found[..., 0] == math.inf) == (p == 0)).all())
    for value, variance in ((found[..., 0] - found[..., 1], found[..., 2]), (found[..., 3], found[..., 4])):
        value = value.where(p > 0, 0.0)
        torch.testing.assert_close((p * value).sum(-1), torch.zeros(3).double(), atol=1e-12, rtol=0)
        torch.testing.assert_close((p * value.square()).sum(-1), variance[:, 0], atol=1e-12, rtol=0)


def test_coins_that_are_the_drafts_own_numbers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round, "ACCEPT", round.DRAFT)
    found = verdict(Independent, times=3)
    assert found.surprise and found.surprise.place_z < -5 and not found.passed


# --- planted bugs that survived


def test_shipped_prompts_that_rank_are_of_every_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"domain": DOMAINS[i % len(DOMAINS)], "text": str(i)} for i in range(90)]
    monkeypatch.setattr(shipped_prompts, "shipped", lambda: rows)
    asked = lambda text: {"input_ids": [int(text)]}  # noqa: E731
    for prompts in shipped_prompts.shipped_ids(asked, 8):  # type: ignore[arg-type]
        each = [sum(rows[ids[0]]["domain"] == domain for ids in prompts) for domain in DOMAINS]
        assert len(set(each)) == 1 and each[0] > 0
    ranking, final = shipped_prompts.shipped_ids(asked, 8)  # type: ignore[arg-type]
    assert (len(ranking), len(final)) == (30, 60)


def test_no_final_prompt_has_a_say_in_the_draft_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned with, texts and rounds, are prompts that rank."""
    ranking, final = ([[5 + i, side] for i in range(3)] for side in (7, 9))
    plan = Plan(
        network(), tokenizer(), network(layers=1, seed=1), Sampling(), "token",
        Bench(4, 2, 8, 4, 8, 2, 0.0, 0.1, [2], "auto", False, False, 0, 0), ("target", "draft"),
        given=Prompts(ranking, final, "own"),
    )  # fmt: skip
    decoded, generate = list[list[int]](), Engine.generate

    def noted(self, prompts, **settings):  # type: ignore[no-untyped-def]
        decoded.extend(map(list, prompts))
        return generate(self, prompts, **settings)

    monkeypatch.setattr(Engine, "generate", noted)
    assert set(taus(plan)) == {1, 2} and set(rounds_of(plan, (0, 2), until=0.0)) == {0, 2}
    assert {tuple(prompt) for prompt in decoded} == set(map(tuple, ranking))


def test_peak_memory_is_in_bytes() -> None:
    """Of a process that has imported torch."""
    assert 2**26 < peak_memory() < 2**42


def test_an_end_id_of_zero_ends_a_text() -> None:
    """The generation config says it; the model's own says another, or none."""
    for other in (5, None):
        target = tiny(vocab=V, layers=1, eos=other)
        assert target.generation_config is not None
        target.generation_config.eos_token_id = 0
        sampling = Sampling(0, logit_bias={0: 1e4})
        found = Engine(target).generate([[3, 1]], max_new_tokens=4, sampling=sampling)
        assert (found.tokens, found.finish) == ([[0]], ["stop"])


def test_penalties_count_the_tokens_of_every_block() -> None:
    """An exact engine passes: the distributions that it is judged by know all that was generated, however long ago."""
    sampling = Sampling(presence_penalty=2.0, frequency_penalty=0.5)
    engine, texts = run(Independent, sampling=sampling)
    found = check(engine, texts, sampling, NEW, seed=5)
    assert found.passed and found.text.ties == 0, found.lines()


def test_a_loss_that_stands_alone_has_its_weight() -> None:
    logp, logq = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    for name in ("tv", "kl"):
        alone, weighted = (parse(text).position for text in (name, f"0.25*{name}"))
        assert alone is not None and weighted is not None
        torch.testing.assert_close(weighted(logp, logq), 0.25 * alone(logp, logq))
    both = parse("0.5*kl + 2*calls")
    assert both.position is not None and [term.weight for term in both.sequence] == [2.0]
    torch.testing.assert_close(both.position(logp, logq), 0.5 * kl(logp, logq))


def test_a_set_stopped_before_its_manifest_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest of the set that it replaces says what other rows were made from."""
    rows = [{"domain": "a", "prompt": [1], "completion": [2]}]
    training_texts.save_rows(rows, tmp_path / "train_T1", {"seed": 0})
    assert (training_texts.read_manifest(tmp_path / "train_T1") or {})["seed"] == 0

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training_texts, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        training_texts.save_rows(2 * rows, tmp_path / "train_T1", {"seed": 1})
    assert training_texts.read_manifest(tmp_path / "train_T1") is None
