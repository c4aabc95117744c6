"""Tools that decide whether a rule is exact: enumeration over drafts, coins and lengths, and chi-square.

Rules are run as black boxes. A rule tests place i by u_i < threshold_i; bisection on its own answers finds
the thresholds, each pattern of passes and refusals is run once inside its cell and weighted by the cell's
size, and random u confirm that nothing but the cell matters.
"""

import itertools
import math

import torch

from inference.sampling import Sampling, one_hot, probs

F64 = torch.float64


def chi_square(counts: torch.Tensor, expected: torch.Tensor, lost: int = 1) -> float:
    """P-value of Pearson's statistic with cells - lost degrees of freedom."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    df = torch.tensor((counts.numel() - lost) / 2, dtype=F64)
    return torch.special.gammaincc(df, statistic.double() / 2).item()


def distributions(kind: str, V: int, n: int) -> torch.Tensor:
    """n random distributions (n, V): dense, with zeros, or one-hot."""
    distribution = (2 * torch.randn(n, V, dtype=F64)).softmax(-1)
    if kind == "truncated":
        distribution = probs(distribution.log(), Sampling(top_k=max(V - 1, 1), top_p=0.9))
    return one_hot(distribution.argmax(-1), distribution) if kind == "greedy" else distribution


def edges(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs p, q of five tokens: equal, one ulp apart, disjoint and one-hot distributions."""
    base = distributions("dense", 5, 1)[0].to(dtype)
    ulp = torch.cat([torch.nextafter(base[:1], torch.ones(1, dtype=dtype)), base[1:]])
    eye, left = torch.eye(5, dtype=dtype), torch.tensor([0.5, 0.5, 0, 0, 0], dtype=dtype)
    pairs = [(base, base), (base, ulp), (ulp, base), (left, left.flip(0)), (left, eye[4]), (eye[1], eye[1])]
    return [*pairs, (eye[1], eye[2]), (base, eye[0]), (eye[0], base)]


class Tree:
    """Random distributions after every prefix: p[i] (V^i, V) for i <= K, q[i] for i < K, prefixes in base V."""

    def __init__(self, V: int, K: int, kinds: tuple[str, str]) -> None:
        self.V, self.K = V, K
        self.p = [distributions(kinds[0], V, V**i) for i in range(K + 1)]
        self.q = [distributions(kinds[1], V, V**i) for i in range(K)]

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
        """The target's distribution of K + 1 tokens, (V^(K+1),)."""
        probs = torch.ones(1, dtype=F64)
        for p in self.p:
            probs = (probs.unsqueeze(-1) * p).flatten()
        return probs

    def emitted(self, x: torch.Tensor, verdict, weight: torch.Tensor) -> torch.Tensor:
        """Joint distribution of K + 1 tokens when the verdicts' tokens, weighted, are followed by draws from p."""
        probs = torch.zeros(1, dtype=F64)
        for n, p in enumerate(self.p):
            stop = verdict.accepted == n
            mass = (weight.unsqueeze(-1) * verdict.probs)[stop]
            ended = torch.zeros_like(p).index_add_(0, self.number(x[stop, :n]), mass)
            probs = (probs.unsqueeze(-1) * p + ended).flatten()
        return probs


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
    """For each length k: the emitted joint distribution, and the expected number accepted."""
    p, q, x, weight, k = all_lengths(tree)
    t = thresholds(rule, p, q, x, k)
    found = {int(length): [torch.zeros_like(tree.joint()), 0.0] for length in k.unique()}
    for pattern in itertools.product((False, True), repeat=tree.K):
        cell = torch.tensor(pattern).expand_as(t)
        verdict = rule(p, q, x, inside(cell, t), k)
        torch.testing.assert_close(verdict.probs.sum(-1), torch.ones_like(weight), rtol=0, atol=1e-13)
        mass = weight * torch.where(cell, t, 1 - t).prod(-1)
        for length, sums in found.items():
            of = k == length
            one = type(verdict)(verdict.accepted[of], verdict.probs[of])
            sums[0] += tree.emitted(x[of], one, mass[of])
            sums[1] += (mass[of] * one.accepted).sum().item()
    for _ in range(4):
        u = torch.rand_like(t)
        there, same = rule(p, q, x, u, k), rule(p, q, x, inside(u < t, t), k)
        assert torch.equal(there.accepted, same.accepted) and torch.equal(there.probs, same.probs)
    return {length: tuple(sums) for length, sums in found.items()}
