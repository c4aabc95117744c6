"""The audit of texts: its scores are standard where texts are drawn from the target, and see what is not."""

import math
from itertools import product
from statistics import NormalDist, mean, pstdev

import pytest
import torch

from inference.exactness.audit import (
    Audit,
    ServedCalls,
    ServedText,
    audit,
    from_target,
    partners,
    pearson,
    rank,
    standard,
)
from inference.models.lm import LM
from inference.sampling import Sampling
from tests.tiny import tiny

V = 7


def drawn(seed: int, texts: int, tokens: int, sharpness: float = 1.0, keep: float = 0.0) -> tuple[list, list]:
    """Texts of distributions that change from token to token; drawn from p ** sharpness, and with probability `keep`
    from the draft."""
    g = torch.Generator().manual_seed(seed)
    served, ids = [], []
    for row in range(texts):
        p = torch.randn(tokens, V, generator=g, dtype=torch.float64).mul(1.5).softmax(-1)
        q = (p.log() + torch.randn(tokens, V, generator=g, dtype=torch.float64)).softmax(-1)
        law = (1 - keep) * (p**sharpness / (p**sharpness).sum(-1, keepdim=True)) + keep * q
        x = law.multinomial(1, generator=g).squeeze(-1)
        served.append((row, ServedText(x, p, q)))
        ids.append(x.tolist())
    return served, ids


def audited(seed: int, **how: float) -> Audit:
    served, ids = drawn(seed, 20, 250, **how)
    return audit(served, list(range(len(ids))), ids)


def test_scores_of_the_targets_own_texts_are_standard() -> None:
    found = [audited(seed) for seed in range(60)]
    assert all(one.passed for one in found)
    for name in found[0].scores:
        scores = [one.scores[name] for one in found]
        assert abs(mean(scores)) < 4 / math.sqrt(60) and 0.7 < pstdev(scores) < 1.35, name


@pytest.mark.parametrize(
    ("how", "score"),
    [
        ({"sharpness": 1.15}, "likelihood"),
        ({"sharpness": 0.85}, "ranks by p, mean"),
        ({"keep": 0.2}, "ranks by q / p, mean"),
        ({"keep": 0.2}, "favoured by the draft"),
    ],
)
def test_other_distributions_are_seen_by_their_score(how: dict[str, float], score: str) -> None:
    found = audited(1, **how)
    assert not found.passed and abs(found.scores[score]) > found.limit


def test_the_smallest_difference_that_an_audit_names_is_seen() -> None:
    """Texts of p to a power, with the total variation that an audit of as many tokens says that it sees."""
    g, tokens, seen = torch.Generator().manual_seed(5), 4000, [0, 0]
    p = torch.randn(tokens, 16, generator=g, dtype=torch.float64).mul(1.5).softmax(-1)
    size = audit([(0, ServedText(p.multinomial(1, generator=g).squeeze(-1), p))], [0], [[0] * tokens]).shift

    def flatter(power: float) -> torch.Tensor:
        return p**power / (p**power).sum(-1, keepdim=True)

    powers = torch.linspace(0.5, 1, 200).tolist()
    for half in (0, 1):  # half the difference is mostly not seen
        wanted = size / 2**half
        power = min(powers, key=lambda one: abs(float((flatter(one) - p).abs().sum(-1).mean()) / 2 - wanted))
        for _ in range(40):
            x = flatter(power).multinomial(1, generator=g).squeeze(-1)
            found = audit([(0, ServedText(x, p))], [0], [[0] * tokens])
            seen[half] += abs(found.scores["likelihood"]) > found.limit
    assert 0.01 < size < 0.2 and seen[0] >= 36 and seen[1] < 16
    assert NormalDist().cdf(-found.limit / 1.2) * 2 * len(found.scores) == pytest.approx(1e-4)  # of all scores together


@pytest.mark.parametrize(("tokens", "greedy"), [(299, True), (299, False), (700, False), (300, True), (3000, False)])
def test_few_tokens_are_neither_passed_nor_failed(tokens: int, greedy: bool) -> None:
    """Of drawn texts 300 tokens bound the false alarms, and some thousand see a difference; without a draw, 300 do."""
    ((_, one),), ids = drawn(0, 1, tokens)
    one = ServedText(one.x, torch.nn.functional.one_hot(one.x, V).double(), greedy=True) if greedy else one
    found = audit([(0, one)], [0], ids)
    assert found.passed == (True if tokens in (300, 3000) else None)
    assert ("too few tokens to tell" in found.lines()[0]) != bool(found.passed)
    assert ("of sharpness" in found.lines()[-1]) == ("at most" in found.lines()[0]) == (tokens > 300)


def test_reused_seeds_are_seen_in_texts_of_equal_prompts() -> None:
    served, ids = drawn(3, 30, 20)
    twice = [*served, *((30 + row, one) for row, one in served)]
    prompts = [*range(30), *range(30)]
    assert "equal prompts" in "".join(audit(twice, prompts, ids + ids).wrong)
    fresh = [ServedText(one.p.multinomial(1).squeeze(-1), one.p) for _, one in served]
    other = [one.x.tolist() for one in fresh]
    more = [*served, *((30 + row, one) for row, one in enumerate(fresh))]
    assert abs(audit(more, prompts, ids + other).scores["equal prompts"]) < 4.5


@pytest.mark.parametrize("order", ["id", "p"])
def test_reused_numbers_are_seen_in_pairs(order: str) -> None:
    p = torch.randn(4000, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    u = torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).repeat_interleave(2)
    ids = p.argsort(-1) if order == "p" else torch.arange(V).expand_as(p)
    place = (p.gather(-1, ids).cumsum(-1) < u.unsqueeze(-1)).sum(-1, keepdim=True).clamp(max=V - 1)
    x = ids.gather(-1, place).squeeze(-1)
    assert abs(audit([(0, ServedText(x, p))], [0], [x.tolist()]).scores[f"pairs by {order}"]) > 20


def test_the_rank_is_uniform_by_enumeration() -> None:
    """P(rank <= t) = t for each t, over all x and a fine grid of u."""
    p = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
    order = torch.tensor([2.0, 1.0, 1.0, 5.0])
    grid = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    found = [
        (float(rank(p[None], torch.tensor([x]), order[None], grid[i : i + 1])), float(p[x]) / 400)
        for x, i in product(range(4), range(400))
    ]
    for t in (0.1, 0.33, 0.4, 0.75, 0.95):
        assert sum(weight for value, weight in found if value <= t) == pytest.approx(t, abs=0.004)


def test_greedy_texts_must_have_the_likeliest_token_up_to_ties() -> None:
    def texts(gap: torch.Tensor) -> Audit:
        p = torch.tensor([[1.0, 0.0]]).expand(len(gap), -1)
        return audit([(0, ServedText((gap > 0).long(), p, gap=gap, greedy=True))], [0], [[0]])

    ties, wrong = torch.zeros(1000), torch.zeros(1000)
    ties[:50] = 0.02
    wrong[:5] = 1.0
    assert texts(ties).passed and not texts(wrong).passed
    assert "false alarm" not in texts(ties).lines()[0]  # nothing is drawn


def test_tokens_that_the_settings_cut_away_fail_but_for_ties_at_the_cut() -> None:
    p = torch.full((500, 4), 1 / 3, dtype=torch.float64)
    p[:, 3] = 0
    x = torch.randint(0, 3, (500,), generator=torch.Generator().manual_seed(0))
    x[:20] = 3
    gap = torch.zeros(500)
    for size, impossible in ((0.01, 0), (1.0, 20), (None, 20)):
        gap[:20] = size or 0
        found = audit([(0, ServedText(x, p, gap=None if size is None else gap))], [0], [x.tolist()])
        assert found.impossible == impossible and bool(found.wrong) == bool(impossible)
    assert "cannot be drawn" in found.wrong[-1]


def test_outcomes_of_several_tokens_are_never_equal_texts() -> None:
    """Of 400 tokens 20 are named: texts of a prompt that part as they should pass, at the default size."""
    g, texts, served = torch.Generator().manual_seed(1), list[list[int]](), list[tuple[int, ServedText]]()
    whole = torch.randn(80, 30, 400, generator=g, dtype=torch.float64).softmax(-1)
    for row in range(160):
        p = whole[row // 2]
        top, ids = p.topk(20)
        text = p.multinomial(1, generator=g)
        named = ids == text
        x = torch.where(named.any(-1), named.long().argmax(-1), 20)
        served.append((row, ServedText(x, torch.cat([top, 1 - top.sum(-1, keepdim=True)], -1), named=20)))
        texts.append(text.squeeze(-1).tolist())
    found = audit(served, [row // 2 for row in range(160)], texts)
    assert found.passed and abs(found.scores["equal prompts"]) < 4


def test_a_statistic_has_its_quantile() -> None:
    """Pearson's statistic of 30.14 has probability .05 with 19 degrees of freedom."""
    counts = torch.full((20,), 100.0)
    counts[0] += math.sqrt(30.14 * 100 / 2)
    counts[1] -= math.sqrt(30.14 * 100 / 2)
    assert standard(pearson(counts), 19) == pytest.approx(1.645, abs=0.01)
    assert standard(-3.0, 12) < standard(-1.0, 12) < standard(0.0, 12)  # a difference of statistics may be negative


def test_texts_of_one_prompt_are_compared_in_pairs_that_share_none() -> None:
    """Scores of 20 texts of one prompt spread as one of two texts does; those of neighbours would by 1.4 (exactly: at a
    token with one probability of .9, terms of neighbours have covariance sum p^3 - (sum p^2)^2)."""
    assert partners(["a", "b", "a", "a", "a"]) == {0: 2, 3: 4}
    g, scores = torch.Generator().manual_seed(2), list[float]()
    p = torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64).expand(3, -1)
    for _ in range(250):
        x = p.expand(20, -1, -1).reshape(60, 3).multinomial(1, generator=g).view(20, 3)
        served = [(row, ServedText(x[row], p)) for row in range(20)]
        scores.append(audit(served, ["a"] * 20, x.tolist()).scores["equal prompts"])
    assert abs(mean(scores)) < 0.25 and 0.85 < pstdev(scores) < 1.15


def test_texts_of_a_prompt_are_compared_up_to_their_first_difference() -> None:
    p = torch.full((6, 4), 0.25, dtype=torch.float64)
    texts = [[0, 1, 2, 2, 2, 2], [0, 3, 2, 2, 2, 2]]
    served = [(row, ServedText(torch.tensor(text), p)) for row, text in enumerate(texts)]
    found = audit(served, ["a", "a"], texts).scores["equal prompts"]
    assert found == pytest.approx((0.75 - 0.25) / math.sqrt(2 * 0.25 * 0.75))


def test_calls_of_a_server_are_those_of_its_texts() -> None:
    """A count 8 sigma away fails alone, with a verdict that is not about the texts; .5 % of rounding passes."""
    served, ids = drawn(1, 20, 250)
    for counted, right in ((1000, True), (1160, False)):
        found = audit(served, [*range(20)], ids, ServedCalls(counted, 1000.0, 19.0))
        assert bool(found.passed) == right and ("NOT with so many target calls" in found.lines()[0]) != right
    hot, ids = drawn(1, 20, 250, sharpness=0.6)
    assert "are NOT the target's" in audit(hot, [*range(20)], ids, ServedCalls(1160, 1000.0, 19.0)).lines()[0]
    certain = audit([], [], [], ServedCalls(1005, 1000.0, 0.0))
    assert not certain.wrong and certain.scores["target calls"] == 1


def test_distributions_are_those_of_the_settings_and_gaps_those_of_the_logits() -> None:
    target, draft = (tiny(vocab=16, layers=1, seed=seed, dtype=torch.float32) for seed in (3, 4))
    text = [(7 * j) % 16 for j in range(1, 20)]
    ((_, one),) = from_target(target, [[1, 2]], [text], Sampling(0.5, top_k=3), 16, LM(draft, 1))
    ids = torch.tensor([[1, 2, *text[:-1]]])
    for model, found in ((target, one.p), (draft, one.q)):
        with torch.no_grad():
            logits = model(ids).logits[0, 1:]
        third = logits.topk(3).values[:, 2:]
        torch.testing.assert_close(found.float(), logits.masked_fill(logits < third, -math.inf).mul(2).softmax(-1))
        if model is target:
            below = (third - logits.gather(-1, one.x[:, None])) / logits.square().mean(-1, keepdim=True).sqrt()
            assert (one.gap > 0).sum() > 5
            torch.testing.assert_close(one.gap.float(), below.clamp(min=0).squeeze(-1))


def test_a_long_text_is_audited_in_parts_as_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the numbers of ranks, which are drawn: each token once, and the parts know where they begin."""
    model = tiny(vocab=16, layers=1, seed=3, dtype=torch.float32)
    texts = [[(i * j) % 16 for j in range(1, 31)] for i in (3, 3, 5)]
    texts[1] = [*texts[1][:20], 1, *texts[1][21:]]
    given = [[1, 2]] * 3
    found = []
    for cells in (1 << 26, 16 * 7):
        monkeypatch.setattr("inference.exactness.audit.LOGITS", cells)
        parts = [*from_target(model, given, texts, Sampling(), 16, LM(model, 1))]
        assert len(parts) == 3 * (1 if cells > 1000 else 5) and max(len(one.x) for _, one in parts) <= cells // 16
        found.append(audit(parts, ["a"] * 3, texts))
    whole, cut = found
    assert cut.tokens == whole.tokens == 90
    for name in ("likelihood", "equal prompts", "favoured by the draft"):
        assert cut.scores.get(name) == pytest.approx(whole.scores.get(name), abs=1e-5), name
