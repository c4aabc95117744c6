"""End to end: the joint distribution of what the engine emits is the target's, by chi-square on real tiny models.

The suite resolves a total variation of about 0.02 (0.05 where fewer rows are drawn); every p-value must exceed
1e-4, which is stricter than Holm's correction over them.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from inference import Engine, Sampling
from inference.policy import Fixed
from inference.proposers import Independent
from tests.exact import chi_square
from tests.often import often
from tests.tiny import near, tiny

ROWS = 4000
PROMPT = [1, 0, 1]
REGIME = Sampling(temperature=0.8)


def small(**settings):
    return tiny(layers=1, hidden=8, heads=1, dtype=torch.float32, positions=16, **settings)


def constant(probs: list[float]):
    """A model that says the same distribution after any text: its layers add nothing, and all tokens look alike."""
    model = small(vocab=len(probs))
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.zero_()
        model.model.embed_tokens.weight.fill_(1)
        model.lm_head.weight.copy_(torch.tensor(probs).log().unsqueeze(1) / 8)
    return model


@torch.no_grad()
def joint(model, tokens: int, temperature: float) -> torch.Tensor:
    """The model's distribution of that many tokens after PROMPT, (V^tokens,) float64, by enumeration of all texts."""
    V, probs = model.config.vocab_size, torch.ones(1, dtype=torch.float64)
    texts = torch.tensor([PROMPT])
    for _ in range(tokens):
        step = (model(texts).logits[:, -1].double() / temperature).softmax(-1)
        probs = (probs.unsqueeze(-1) * step).flatten()
        texts = torch.cat([texts.repeat_interleave(V, 0), torch.arange(V).repeat(len(texts)).unsqueeze(1)], 1)
    return probs


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector of garbage: for thousands of rows, none of them garbage, it is half of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def emitted(engine: Engine, tokens: int, samples: int, sampling: Sampling) -> torch.Tensor:
    """How often each text was emitted, (V^tokens,); equal prompts of a call are independent rows."""
    V, counts = engine.target.vocabulary, 0
    with uncollected():
        for seed in range(samples // ROWS):
            texts = engine.generate([PROMPT] * ROWS, max_new_tokens=tokens, sampling=sampling, seed=seed).tokens
            number = torch.tensor(texts) @ V ** torch.arange(tokens - 1, -1, -1)
            counts = counts + number.bincount(minlength=V**tokens)
    return counts


def p_value(target, proposer, rule: str, samples: int, tokens: int = 3, k: int = 2, regime=REGIME) -> float:
    engine = Engine(target, proposer, verify=rule, policy=Fixed(k), rows=ROWS)
    counts = emitted(engine, tokens, samples, regime)
    return chi_square(*pooled(counts, joint(target, tokens, regime.temperature) * counts.sum()))


def pooled(counts: torch.Tensor, expected: torch.Tensor, least: float = 5.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with the rarest cells as one, of which `least` are expected: two texts where 0.07 are expected would have a
    p-value of 1e-8."""
    order = expected.argsort()
    rare = int((expected[order].cumsum(0) < least).sum()) + 1
    counts, expected = (
        torch.cat((one[order[:rare]].sum(0, keepdim=True), one[order[rare:]])) for one in (counts, expected)
    )
    return counts, expected


def pair():
    """A target without rare tokens and a draft that agrees on two thirds of the mass, differently in each context."""
    target = small(vocab=4, seed=19)
    return target, near(target, noise=0.2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rule", "samples"), [("token", 60_000), ("block", 60_000), ("match", 32_000), ("coupled", 32_000)]
)
def test_three_tokens_of_several_rounds_have_the_targets_distribution(rule, samples):
    """Of 27 texts: these rows resolve what 80,000 and 40,000 resolve of 64."""
    target = small(vocab=3, seed=20)  # the draft agrees on two thirds of the mass, differently in each context
    draft = near(target, noise=0.2)
    assert p_value(target, Independent(draft), rule, samples) > 1e-4


@pytest.mark.parametrize("rule", often(["token", "block"], {"block"}.__contains__))
def test_noise_of_earlier_rounds_is_never_met_again(rule):
    """Rows 3 and 30: block looks past the token it stops at, so its numbers must be new in every round. Texts of
    an i.i.d. pair where that shows most (MATH: total variation 0.065), and the independence of its neighbours."""
    target, draft = constant([1 / 3, 2 / 3]), constant([2 / 3, 1 / 3])
    engine = Engine(target, Independent(draft), verify=rule, policy=Fixed(2), rows=ROWS)
    counts = emitted(engine, 5, 12_000, Sampling())
    assert chi_square(counts, joint(target, 5, 1.0) * counts.sum()) > 1e-4
    for t in range(4):
        table = counts.view(2**t, 2, 2, -1).sum((0, 3)).double()
        expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
        assert chi_square(table, expected, lost=3) > 1e-4


def test_draft_and_residual_are_drawn_with_different_noise():
    """Request 2: with shared numbers a 3-token distribution moves by some hundredths."""
    target, draft = constant([0.6, 0.3, 0.1]), constant([0.3, 0.2, 0.5])
    assert p_value(target, Independent(draft), "token", 20_000, tokens=2, k=1, regime=Sampling()) > 1e-4


@pytest.mark.parametrize("rule", ["token", "block", "match", "coupled"])
def test_acceptance_at_depth_one_is_what_the_distributions_say(rule):
    """Request 28: sum min(p, q) for token and block, sum p q for match, and at most the former for any rule."""
    target, draft = pair()
    p, q = joint(target, 1, 1.0), joint(draft, 1, 1.0)
    engine = Engine(target, Independent(draft), verify=rule, policy=Fixed(1), rows=ROWS)
    stats = engine.generate([PROMPT] * ROWS, max_new_tokens=2).stats
    assert stats.drafted == [ROWS]
    measured, ceiling = stats.accepted[0] / ROWS, torch.minimum(p, q).sum().item()
    sigma = 0.5 / ROWS**0.5
    assert measured < ceiling + 3 * sigma
    if rule != "coupled":
        wanted = (p * q).sum().item() if rule == "match" else ceiling
        assert abs(measured - wanted) < 4 * sigma
