"""Verification is exact: enumerated in float64 (see `tests/exact.py`), then over rounds; and at its edges."""

import itertools
import math

import pytest
import torch

from inference.sampling.noise import gumbel
from inference.verify import block, coupled, match, token
from tests.exact import F64, Tree, all_lengths, distributions, edges, enumerate_rule
from tests.often import often

KINDS = list(itertools.product(("dense", "truncated", "greedy"), repeat=2))
CASES = [*((kinds, 3, 3) for kinds in KINDS), (KINDS[0], 2, 4), (KINDS[0], 4, 2), (KINDS[3], 2, 4)]


# either certain, both cut, or neither; more of the drafts, or more of the tokens
OFTEN = (*((kinds, 3, 3) for kinds in (KINDS[0], KINDS[2], KINDS[4], KINDS[6])), *CASES[9:11])


@pytest.mark.parametrize(
    ("kinds", "V", "K"), often(CASES, OFTEN.__contains__), ids=[f"{'-'.join(kinds)}-{V}-{K}" for kinds, V, K in CASES]
)
def test_token_and_block_emit_the_target_distribution(kinds, V, K):
    tree = Tree(V, K, kinds)
    target = tree.joint()
    by_token, by_block = enumerate_rule(token, tree), enumerate_rule(block, tree)
    for k in range(K + 1):
        assert (by_token[k][0] - target).abs().max() < 1e-12, f"token, k = {k}"
        assert (by_block[k][0] - target).abs().max() < 1e-12, f"block, k = {k}"
        assert by_block[k][1] >= by_token[k][1] - 1e-12
    overlap = torch.minimum(tree.p[0], tree.q[0]).sum().item()
    assert by_token[1][1] == pytest.approx(overlap, abs=1e-12)  # alpha = 1 - TV
    if kinds == ("dense", "dense"):
        assert by_block[K][1] > by_token[K][1] + 1e-3


def two_token_example() -> Tree:
    """p = (1/3, 2/3), q = (2/3, 1/3) whatever the prefix, K = 2 (Sun et al. 2024, 2403.10444)."""
    tree = Tree(2, 2, ("dense", "dense"))
    tree.p = [torch.tensor([[1 / 3, 2 / 3]], dtype=F64).expand(2**i, 2) for i in range(3)]
    tree.q = [torch.tensor([[2 / 3, 1 / 3]], dtype=F64).expand(2**i, 2) for i in range(2)]
    return tree


def test_expected_accepted_of_the_published_example():
    tree = two_token_example()
    assert enumerate_rule(token, tree)[2][1] == pytest.approx(10 / 9, abs=1e-13)
    assert enumerate_rule(block, tree)[2][1] == pytest.approx(11 / 9, abs=1e-13)


@pytest.mark.parametrize("kinds", KINDS[:4], ids="-".join)
def test_match_emits_the_target_distribution(kinds):
    """Cells of u are the tokens' shares of [0, 1) in p's cumulative sum."""
    tree = Tree(3, 2, kinds)
    p, _, x, weight, k = all_lengths(tree)
    low = p.cumsum(-1) - p
    middle = low + p / 2  # (B, K+1, V)
    emitted = torch.zeros(tree.K + 1, *tree.joint().shape, dtype=F64)
    for y in itertools.product(range(3), repeat=tree.K + 1):
        at = torch.tensor(y).view(1, -1, 1).expand(len(x), -1, 1)
        verdict = match(p, x, middle.gather(-1, at).squeeze(-1), k)
        drafted = torch.arange(tree.K + 1) <= k.unsqueeze(-1)  # a place past k has one cell, its V copies share it
        mass = weight * torch.where(drafted, p.gather(-1, at).squeeze(-1), 1 / 3).prod(-1)
        for length in range(tree.K + 1):
            of = k == length
            one = type(verdict)(verdict.accepted[of], verdict.probs[of])
            emitted[length] += tree.emitted(x[of], one, mass[of])
    assert (emitted - tree.joint()).abs().max() < 1e-12


def test_match_without_a_bonus_uniform_leaves_p():
    p, x = distributions("dense", 3, 8).view(2, 4, 3), torch.tensor([[0, 1, 2], [2, 2, 2]])
    u = torch.stack([p[b, i].cumsum(-1)[x[b, i]] - 1e-9 for b in range(2) for i in range(3)]).view(2, 3)
    verdict = match(p, x, u, torch.tensor([3, 1]))
    assert verdict.accepted.tolist() == [3, 1]
    assert torch.equal(verdict.probs[0], p[0, 3])
    assert verdict.probs[1].tolist() == [0, 0, 1]  # place 1 has a uniform, which gives the same token
    drawn = match(p, x, torch.cat([u, torch.zeros(2, 1)], 1), torch.tensor([3, 1]))
    assert drawn.probs[0].tolist() == [1, 0, 0]


def test_coupled_text_is_plain_sampling_with_that_noise():
    """Random drafts, argmax drafts and perfect drafts of ragged length over rounds: one text."""
    V, B, length = 4, 32, 12
    table = distributions("truncated", V, V * V).view(V, V, V)  # second-order target
    row, place = torch.arange(B), torch.arange(length + 4)
    g = gumbel(1, row, place.expand(B, -1), V)

    def after(text: list[int]) -> torch.Tensor:
        return table[tuple(([0, 0] + text)[-2:])]

    def plain(b: int) -> list[int]:
        text: list[int] = []
        while len(text) < length + 4:
            text.append(int((after(text).log() + g[b, len(text)]).argmax()))
        return text

    for perfect in (0.0, 0.6, 1.0):
        for b in range(B):
            truth, text = plain(b), []
            while len(text) < length:
                start, k = len(text), int(torch.randint(4, ()))
                guess = [t if torch.rand(()) < perfect else int(torch.randint(V, ())) for t in truth[start : start + k]]
                p = torch.full((1, 4, V), math.nan, dtype=F64)
                for i in range(k + 1):
                    p[0, i] = after(text + guess[:i])
                x = torch.tensor([guess + [-1] * (3 - k)])
                accepted, probs = coupled(p, x, g[b : b + 1, start : start + 4], torch.tensor([k]))
                text += guess[: int(accepted)] + [int(probs.argmax())]
                assert perfect < 1 or int(accepted) == k
            assert text == truth[: len(text)]


@pytest.mark.parametrize("rule", [token, block])
def test_a_token_the_target_forbids_is_rejected_at_u_zero(rule):
    p, q = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]]), torch.tensor([[[0.5, 0.5]]])
    verdict = rule(p, q, torch.tensor([[0]]), torch.zeros(1, 1))
    assert verdict.accepted.item() == 0 and verdict.probs.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("rule", [token, block])
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_edge_distributions_give_finite_distributions_that_sum_to_one(rule, dtype):
    for (p, q), v, u in itertools.product(edges(dtype), range(5), (0.0, 0.5, 1 - 2.0**-53)):
        if q[v] == 0:
            continue
        x, coins = torch.full((1, 3), v), torch.full((1, 3), u, dtype=F64)
        for k in (0, 1, 3):
            accepted, probs = rule(p.expand(1, 4, 5), q.expand(1, 3, 5), x, coins, torch.tensor([k]))
            assert probs.dtype == torch.promote_types(dtype, torch.float32)
            assert probs.isfinite().all() and (probs >= 0).all() and accepted <= k
            assert abs(probs.sum().item() - 1) < (1e-2 if dtype == torch.bfloat16 else 1e-6)
            assert (probs[0][p == 0] == 0).all()


@pytest.mark.parametrize("filler", [math.nan, math.inf, 0.0, 1.0])
def test_nothing_past_a_rows_length_is_read(filler):
    B, K, V = 60, 3, 4
    p, q = distributions("dense", V, B * (K + 1)).view(B, K + 1, V), distributions("dense", V, B * K).view(B, K, V)
    x, u, k = torch.randint(V, (B, K)), torch.rand(B, K + 1, dtype=F64), torch.arange(B) % (K + 1)
    g = torch.randn(B, K + 1, V, dtype=F64)
    bonus_past, past = torch.arange(K + 1) > k.unsqueeze(-1), torch.arange(K) >= k.unsqueeze(-1)

    def verdicts(p, q, x, u):
        yield token(p, q, x, u[:, :K], k)
        yield block(p, q, x, u[:, :K], k)
        yield match(p, x, u, k)
        yield coupled(p, x, g, k)

    clean = verdicts(p, q, x, u)
    filled = verdicts(
        p.masked_fill(bonus_past.unsqueeze(-1), filler),
        q.masked_fill(past.unsqueeze(-1), filler),
        x.masked_fill(past, 0 if filler == 1 else -1),
        u.masked_fill(bonus_past, 0.0),
    )
    for one, other in zip(clean, filled, strict=True):
        assert torch.equal(one.accepted, other.accepted) and (one.accepted <= k).all()
        assert torch.equal(one.probs, other.probs)
