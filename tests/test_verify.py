"""Verification is exact: enumerated in float64 over drafts, coins and lengths, then over rounds.

The rules are run as black boxes. A rule tests place i by u_i < threshold_i; bisection on its own answers finds
the thresholds, each pattern of passes and refusals is run once inside its cell and weighted by the cell's size,
and random u confirm that nothing but the cell matters.
"""

import itertools
import math

import pytest
import torch

from inference.fused import token_from_logits
from inference.sampling import Sampling, draw, one_hot, probs
from inference.streams import ACCEPT, DRAFT, RESIDUAL, gumbel, uniform
from inference.verify import block, coupled, match, token
from tests.test_streams import chi_square

F64 = torch.float64


def laws(kind: str, V: int, n: int) -> torch.Tensor:
    """n random laws (n, V): dense, with zeros, or one-hot."""
    law = (2 * torch.randn(n, V, dtype=F64)).softmax(-1)
    if kind == "truncated":
        law = probs(law.log(), Sampling(top_k=max(V - 1, 1), top_p=0.9))
    return one_hot(law.argmax(-1), law) if kind == "greedy" else law


class Tree:
    """Random laws after every prefix: p[i] (V^i, V) for i <= K, q[i] for i < K; prefixes numbered in base V."""

    def __init__(self, V: int, K: int, kinds: tuple[str, str]) -> None:
        self.V, self.K = V, K
        self.p = [laws(kinds[0], V, V**i) for i in range(K + 1)]
        self.q = [laws(kinds[1], V, V**i) for i in range(K)]

    def rows(self, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """p, q, x and P(x) for all drafts of length k; NaN, and ids of no token, past k."""
        V, K = self.V, self.K
        x = torch.tensor(list(itertools.product(range(V), repeat=k)), dtype=torch.int64).view(V**k, k)
        p, q = (
            torch.full((V**k, K + 1, V), math.nan, dtype=F64),
            torch.full((V**k, K, V), math.nan, dtype=F64),
        )
        weight = torch.ones(V**k, dtype=F64)
        for i in range(k + 1):
            at = self.number(x[:, :i])
            p[:, i] = self.p[i][at]
            if i < k:
                q[:, i] = self.q[i][at]
                weight = weight * self.q[i][at, x[:, i]]
        return p, q, torch.nn.functional.pad(x, (0, K - k), value=-1), weight

    def number(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.V ** torch.arange(x.shape[1] - 1, -1, -1)).sum(-1)

    def joint(self) -> torch.Tensor:
        """The target's law of K + 1 tokens, (V^(K+1),)."""
        law = torch.ones(1, dtype=F64)
        for p in self.p:
            law = (law.unsqueeze(-1) * p).flatten()
        return law

    def emitted(self, x: torch.Tensor, verdict, weight: torch.Tensor) -> torch.Tensor:
        """Joint law of K + 1 tokens when the verdicts' tokens, weighted, are followed by draws from p."""
        law = torch.zeros(1, dtype=F64)
        for n, p in enumerate(self.p):
            stop = verdict.accepted == n
            mass = (weight.unsqueeze(-1) * verdict.law)[stop]
            ended = torch.zeros_like(p).index_add_(0, self.number(x[stop, :n]), mass)
            law = (law.unsqueeze(-1) * p + ended).flatten()
        return law


def all_lengths(tree: Tree):
    """The rows of every length 0..K in one ragged batch: p, q, x, weight, k."""
    parts = [(*tree.rows(k), torch.full((tree.V**k,), k)) for k in range(tree.K + 1)]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def thresholds(rule, p, q, x, k) -> torch.Tensor:
    """(B, K) by bisection: earlier places pass, later ones refuse."""
    B, K = x.shape
    low, high = torch.zeros(B, K, dtype=F64), torch.ones(B, K, dtype=F64)
    for _ in range(55):
        middle = (low + high) / 2
        for i in range(K):
            u = torch.full((B, K), -1.0, dtype=F64)
            u[:, i], u[:, i + 1 :] = middle[:, i], 2.0
            passed = rule(p, q, x, u, k).accepted > i
            low[:, i] = torch.where(passed, middle[:, i], low[:, i])
            high[:, i] = torch.where(passed, high[:, i], middle[:, i])
    return high


def inside(cell: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """A u in the middle of [0, t) where the cell says pass, else of [t, 1)."""
    return torch.where(cell, t / 2, (1 + t) / 2)


def enumerate_rule(rule, tree: Tree) -> dict[int, tuple[torch.Tensor, float]]:
    """For each length k: the emitted joint law, and the expected number accepted."""
    p, q, x, weight, k = all_lengths(tree)
    t = thresholds(rule, p, q, x, k)
    found = {int(length): [torch.zeros_like(tree.joint()), 0.0] for length in k.unique()}
    for pattern in itertools.product((False, True), repeat=tree.K):
        cell = torch.tensor(pattern).expand_as(t)
        verdict = rule(p, q, x, inside(cell, t), k)
        torch.testing.assert_close(verdict.law.sum(-1), torch.ones_like(weight), rtol=0, atol=1e-13)
        mass = weight * torch.where(cell, t, 1 - t).prod(-1)
        for length, sums in found.items():
            of = k == length
            one = type(verdict)(verdict.accepted[of], verdict.law[of])
            sums[0] += tree.emitted(x[of], one, mass[of])
            sums[1] += (mass[of] * one.accepted).sum().item()
    for _ in range(4):
        u = torch.rand_like(t)
        there, same = rule(p, q, x, u, k), rule(p, q, x, inside(u < t, t), k)
        assert torch.equal(there.accepted, same.accepted) and torch.equal(there.law, same.law)
    return {length: tuple(sums) for length, sums in found.items()}


KINDS = list(itertools.product(("dense", "truncated", "greedy"), repeat=2))
SIZES = [(2, 4), (3, 3), (4, 2)]


@pytest.mark.parametrize(("V", "K"), SIZES)
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_token_and_block_emit_the_target_law(kinds, V, K):
    tree = Tree(V, K, kinds)
    target = tree.joint()
    by_token, by_block = enumerate_rule(token, tree), enumerate_rule(block, tree)
    for k in range(K + 1):
        assert (by_token[k][0] - target).abs().max() < 1e-12, f"token, k = {k}"
        assert (by_block[k][0] - target).abs().max() < 1e-12, f"block, k = {k}"
        assert by_block[k][1] >= by_token[k][1] - 1e-12
    if kinds == ("dense", "dense"):
        assert by_block[K][1] > by_token[K][1] + 1e-3


def test_a_longer_vocabulary_and_draft():
    tree = Tree(4, 4, ("truncated", "dense"))
    for rule in (token, block):
        for law, _ in enumerate_rule(rule, tree).values():
            assert (law - tree.joint()).abs().max() < 1e-12


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
def test_match_emits_the_target_law(kinds):
    """Cells of u are the tokens' shares of [0, 1) in p's cumulative sum."""
    tree = Tree(3, 2, kinds)
    p, _, x, weight, k = all_lengths(tree)
    low = p.cumsum(-1) - p
    middle = low + p / 2  # (B, K+1, V)
    found = torch.zeros(tree.K + 1, *tree.joint().shape, dtype=F64)
    for y in itertools.product(range(3), repeat=tree.K + 1):
        at = torch.tensor(y).view(1, -1, 1).expand(len(x), -1, 1)
        verdict = match(p, x, middle.gather(-1, at).squeeze(-1), k)
        drafted = torch.arange(tree.K + 1) <= k.unsqueeze(
            -1
        )  # a place past k has one cell, its V copies share it
        mass = weight * torch.where(drafted, p.gather(-1, at).squeeze(-1), 1 / 3).prod(-1)
        for length in range(tree.K + 1):
            of = k == length
            one = type(verdict)(verdict.accepted[of], verdict.law[of])
            found[length] += tree.emitted(x[of], one, mass[of])
    assert (found - tree.joint()).abs().max() < 1e-12


def test_match_without_a_bonus_uniform_leaves_p():
    p, x = laws("dense", 3, 8).view(2, 4, 3), torch.tensor([[0, 1, 2], [2, 2, 2]])
    u = torch.stack([p[b, i].cumsum(-1)[x[b, i]] - 1e-9 for b in range(2) for i in range(3)]).view(2, 3)
    verdict = match(p, x, u, torch.tensor([3, 1]))
    assert verdict.accepted.tolist() == [3, 1]
    assert torch.equal(verdict.law[0], p[0, 3])
    assert verdict.law[1].tolist() == [0, 0, 1]  # place 1 has a uniform, which gives the same token
    drawn = match(p, x, torch.cat([u, torch.zeros(2, 1)], 1), torch.tensor([3, 1]))
    assert drawn.law[0].tolist() == [1, 0, 0]


def test_coupled_text_is_plain_sampling_with_that_noise():
    """Random drafts, argmax drafts and perfect drafts of ragged length over rounds: one text."""
    V, B, length = 4, 32, 12
    table = laws("truncated", V, V * V).view(V, V, V)  # second-order target
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
                guess = [
                    t if torch.rand(()) < perfect else int(torch.randint(V, ()))
                    for t in truth[start : start + k]
                ]
                p = torch.full((1, 4, V), math.nan, dtype=F64)
                for i in range(k + 1):
                    p[0, i] = after(text + guess[:i])
                x = torch.tensor([guess + [-1] * (3 - k)])
                accepted, law = coupled(p, x, g[b : b + 1, start : start + 4], torch.tensor([k]))
                text += guess[: int(accepted)] + [int(law.argmax())]
                assert perfect < 1 or int(accepted) == k
            assert text == truth[: len(text)]


def generate(rule, q_law: torch.Tensor, p_law: torch.Tensor, rows: int, length: int, k) -> torch.Tensor:
    """(rows, length) tokens of an i.i.d. pair over as many rounds as it takes, on the library's own streams."""
    row, K = torch.arange(rows), 3
    start, text = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, length + K + 1, dtype=torch.int64)
    p, q = p_law.expand(rows, K + 1, -1), q_law.expand(rows, K, -1)
    while (start < length).any():
        x = draw(q, uniform(0, row, start, torch.arange(K), DRAFT))
        accepted, law = rule(p, q, x, uniform(0, row, start, torch.arange(K), ACCEPT), k(start))
        last = draw(law, uniform(0, row, start, torch.zeros(1, dtype=torch.int64), RESIDUAL)[:, 0])
        block_ = torch.cat([x, x[:, :1]], 1).scatter(1, accepted.unsqueeze(-1), last.unsqueeze(-1))
        for i in range(K + 1):
            going = (i <= accepted) & (start < length)
            text[row[going], start[going] + i] = block_[going, i]
        start = torch.where(start < length, start + accepted + 1, start)
    return text[:, :length]


@pytest.mark.parametrize("rule", [token, block])
@pytest.mark.parametrize("ragged", [False, True])
def test_generation_over_rounds_has_the_law_of_the_target(rule, ragged):
    """One round can look exact while generation is not: the joint of five tokens, two or more rounds."""
    p, q = torch.tensor([1 / 3, 2 / 3], dtype=F64), torch.tensor([2 / 3, 1 / 3], dtype=F64)
    text = generate(rule, q, p, 20_000, 5, lambda start: start % 4 if ragged else None)
    cells = torch.bincount((text * 2 ** torch.arange(5)).sum(-1), minlength=32).double()
    expected = torch.ones(1, dtype=F64)
    for _ in range(5):
        expected = torch.outer(p, expected).flatten()
    assert chi_square(cells, expected * len(text)) > 1e-3


def test_rows_are_independent_of_each_other():
    p, q = laws("dense", 5, 24).view(6, 4, 5), laws("dense", 5, 18).view(6, 3, 5)
    x, u, k = torch.randint(5, (6, 3)), torch.rand(6, 3, dtype=F64), torch.tensor([3, 0, 2, 1, 3, 3])
    g = torch.randn(6, 4, 5, dtype=F64)
    rules = (
        lambda at: token(p[at], q[at], x[at], u[at], k[at]),
        lambda at: block(p[at], q[at], x[at], u[at], k[at]),
        lambda at: match(p[at], x[at], u[at], k[at]),
        lambda at: coupled(p[at], x[at], g[at], k[at]),
    )
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    for rule in rules:
        whole, shuffled = rule(torch.arange(6)), rule(order)
        assert torch.equal(shuffled.accepted, whole.accepted[order])
        assert torch.equal(shuffled.law, whole.law[order])
        for b in range(6):
            alone = rule(torch.tensor([b]))
            assert alone.accepted == whole.accepted[b] and torch.equal(alone.law[0], whole.law[b])


@pytest.mark.parametrize("rule", [token, block])
def test_a_token_the_target_forbids_is_refused_at_u_zero(rule):
    p, q = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]]), torch.tensor([[[0.5, 0.5]]])
    verdict = rule(p, q, torch.tensor([[0]]), torch.zeros(1, 1))
    assert verdict.accepted.item() == 0 and verdict.law.tolist() == [[0.0, 1.0]]
    logits = [torch.tensor(law).log() for law in (p.tolist(), q.tolist())]
    assert (
        token_from_logits(*logits, torch.tensor([[0]]), torch.zeros(1, 1), None, torch.ones(1)).accepted == 0
    )


@pytest.mark.parametrize("rule", [token, block])
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_edge_laws_give_finite_laws_that_sum_to_one(rule, dtype):
    base = laws("dense", 5, 1)[0].to(dtype)
    ulp = base.clone()
    ulp[0] = (
        torch.nextafter(base[0].float(), torch.tensor(2.0)).to(dtype) if dtype == torch.float32 else ulp[0]
    )
    if dtype == F64:
        ulp[0] = torch.nextafter(base[0], torch.tensor(2.0, dtype=F64))
    eye, left = torch.eye(5, dtype=dtype), torch.tensor([0.5, 0.5, 0, 0, 0], dtype=dtype)
    pairs = [(base, base), (base, ulp), (ulp, base), (left, left.flip(0)), (left, eye[4]), (eye[1], eye[1])]
    pairs += [(eye[1], eye[2]), (base, eye[0]), (eye[0], base)]
    for (p, q), v, u in itertools.product(pairs, range(5), (0.0, 0.5, 1 - 2.0**-53)):
        if q[v] == 0:
            continue
        x, coins = torch.full((1, 3), v), torch.full((1, 3), u, dtype=F64)
        for k in (0, 1, 3):
            accepted, law = rule(p.expand(1, 4, 5), q.expand(1, 3, 5), x, coins, torch.tensor([k]))
            assert law.dtype == torch.promote_types(dtype, torch.float32)
            assert law.isfinite().all() and (law >= 0).all() and accepted <= k
            assert abs(law.sum().item() - 1) < (1e-2 if dtype == torch.bfloat16 else 1e-6)
            assert (law[0][p == 0] == 0).all()


@pytest.mark.parametrize("rule", [token, block])
def test_equal_laws_accept_every_draft_and_no_more(rule):
    """`accepted` counts drafts, the bonus apart; k counts drafts, the anchor apart."""
    p = laws("dense", 6, 4 * 50).view(50, 4, 6)
    x, u = draw(p[:, :3], torch.rand(50, 3, dtype=F64)), torch.rand(50, 3, dtype=F64)
    k = torch.arange(50) % 4
    accepted, law = rule(p, p[:, :3], x, u, k)
    assert torch.equal(accepted, k)
    assert torch.equal(law, p[torch.arange(50), k])


def test_the_residual_of_padded_laws_has_no_mass_on_the_padding():
    logits = torch.randn(2, 40, 3, 12)
    logits[..., 9:] = -math.inf
    p, q = probs(logits[0], Sampling()), probs(logits[1], Sampling(temperature=0.5))[:, :2]
    x = draw(q, torch.rand(40, 2, dtype=F64))
    for rule in (token, block):
        law = rule(p, q, x, torch.rand(40, 2, dtype=F64)).law
        assert (law[:, 9:] == 0).all()


def test_inputs_are_left_as_they_were():
    p, q = laws("dense", 3, 6).view(2, 3, 3), laws("dense", 3, 4).view(2, 2, 3)
    x, u, k = torch.tensor([[0, -1], [1, 2]]), torch.rand(2, 2), torch.tensor([1, 2])
    given = [t.clone() for t in (p, q, x, u, k)]
    for rule in (token, block):
        rule(p, q, x, u, k)
    match(p, x, u, k)
    coupled(p, x, torch.zeros(2, 3, 3), k)
    assert all(torch.equal(a, b) for a, b in zip(given, (p, q, x, u, k), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_fused_token_rule_is_the_reference(dtype):
    B, K, V = 300, 3, 7
    target, draft = (3 * torch.randn(2, B, K + 1, V)).to(dtype)
    target[:, :, 5] = -math.inf
    draft, x, k = draft[:, :K].clone(), torch.randint(V, (B, K)), torch.randint(K + 1, (B,))
    temperature, u = torch.rand(B, dtype=dtype) + 0.3, torch.rand(B, K, dtype=F64)
    past = torch.arange(K + 1) > k.unsqueeze(-1)
    target[past] = math.nan
    draft[past[:, 1:]] = math.nan
    x[past[:, 1:]] = -1
    regimes = [Sampling(t.item()) for t in temperature]
    reference = token(probs(target, regimes), probs(draft, regimes), x, u, k)
    fused = token_from_logits(target, draft, x, u, k, temperature)
    assert torch.equal(fused.accepted, reference.accepted)
    torch.testing.assert_close(
        fused.law, reference.law, rtol=1e-4 if dtype == torch.float32 else 1e-11, atol=1e-6
    )
    assert 0 < (reference.accepted < k).double().mean() < 1
