"""Rules for trees are exact: every draft and every outcome of the coins, in float64, against the rules node by node."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from inference.models.replay import Recorded
from inference.verify import traversal, tree
from inference.verify.lossy_typical import lossy_typical
from tests import standin
from tests.exact import F64, distributions, edges
from tests.often import often
from tests.trees import MODES, Case, judged, topologies

RULES = {"tree": tree, "traversal": traversal}
SMALL = [parents for N in range(1, 4) for parents in topologies(N)]
FOUR = topologies(4)
LATER_DEEPER = (-1, 0, 0, 2)  # the second of two siblings has a child, the first has none


def cells(rule: str, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each draft in each cell of its coins: which draft, uniforms in the middle of the cell, and the chance."""
    thresholds = [judged(rule, p, q, x, case.parents)[0] for p, q, x in rows(case)]
    t = torch.tensor(thresholds, dtype=F64).view(-1, 1, case.N)
    passes = torch.tensor(list(itertools.product((True, False), repeat=case.N))).view(1, -1, case.N)
    u = torch.where(passes, t / 2, (1 + t) / 2)
    chance = case.weight.unsqueeze(-1) * torch.where(passes, t, 1 - t).prod(-1)
    return torch.arange(len(t)).repeat_interleave(u.shape[1]), u.flatten(0, 1), chance.flatten()


def rows(case: Case):
    return zip(case.p.tolist(), case.q.tolist(), case.x.tolist(), strict=True)


def enumerated(rule: str, case: Case) -> float:
    """The emitted distribution is the target's; returns the expected number accepted."""
    at, u, chance = cells(rule, case)
    q = None if case.mode == "deterministic" else case.q[at]
    verdict = RULES[rule](case.p[at], q, case.x[at], case.parents, u)
    assert (case.emitted(case.x[at], verdict, chance) - case.distributions.joint()).abs().max() < 1e-12
    torch.testing.assert_close(verdict.probs.sum(-1), torch.ones_like(chance), rtol=0, atol=1e-13)
    assert torch.equal((verdict.path >= 0).sum(-1), verdict.accepted)
    return (chance * verdict.accepted).sum().item()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kinds", [("dense", "dense"), ("truncated", "dense"), ("dense", "truncated")], ids="-".join)
def test_trees_of_up_to_three_nodes_emit_the_target_distribution(mode, kinds):
    for parents in SMALL:
        case = Case(parents, mode, kinds=kinds)
        by_tree, by_traversal = enumerated("tree", case), enumerated("traversal", case)
        assert by_traversal >= by_tree - 1e-12, parents


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("V", often([2, 3], {2}.__contains__))
def test_trees_of_four_nodes_emit_the_target_distribution(mode, V):
    gains = []
    for parents in FOUR if V == 2 else FOUR[::5]:
        case = Case(parents, mode, V)
        gains.append(enumerated("traversal", case) - enumerated("tree", case))
        assert gains[-1] >= -1e-12 or parents == LATER_DEEPER, parents
    assert mode == "deterministic" or max(gains) > 1e-3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("filler", [math.nan, math.inf, 0.0, 1.0])
def test_nothing_past_a_rows_nodes_is_read(rule, filler):
    B, V, parents = 60, 5, (-1, -1, 0, 0, 1, 4)
    N = len(parents)
    p, q = distributions("dense", V, B * (N + 1)).view(B, N + 1, V), distributions("dense", V, B * N).view(B, N, V)
    x, u, k = torch.rand(B, N, V).argsort(-1)[..., 0], torch.rand(B, N), torch.arange(B) % (N + 1)
    clean = RULES[rule](p, q, x, parents, u, k)
    past = torch.arange(N) >= k.unsqueeze(-1)
    p_filled = torch.cat([p[:, :1], p[:, 1:].masked_fill(past.unsqueeze(-1), filler)], 1)
    q_filled, x_filled = q.masked_fill(past.unsqueeze(-1), filler), x.masked_fill(past, -1)
    given = [t.clone() for t in (p_filled, q_filled, x_filled)]
    filled = RULES[rule](p_filled, q_filled, x_filled, parents, u.masked_fill(past, 0.0), k)
    assert all(torch.equal(a, b) for a, b in zip(clean, filled, strict=True))
    assert all(torch.allclose(a, b, equal_nan=True) for a, b in zip(given, (p_filled, q_filled, x_filled), strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", often([torch.float32, F64, torch.bfloat16], lambda dtype: dtype != F64))
def test_edge_distributions_give_finite_distributions_that_sum_to_one(rule, dtype):
    """Equal, one ulp apart, disjoint and one-hot distributions; a node that its draft gives no mass; u = 0 where p =
    0."""
    pairs = edges(dtype)
    pairs.append((pairs[0][0], torch.full((5,), math.nan, dtype=dtype)))
    for (p, q), first, coin in itertools.product(pairs, range(5), (0.0, 0.5, 1 - 2.0**-53)):
        x = torch.tensor([[first, (first + 1) % 5, (first + 2) % 5, first]])
        u, p4, q4 = torch.full((1, 4), coin, dtype=F64), p.expand(1, 5, 5), q.expand(1, 4, 5)
        accepted, path, probs = RULES[rule](p4, q4, x, (-1, -1, -1, 0), u)
        assert probs.dtype == torch.promote_types(dtype, torch.float32)
        assert probs.isfinite().all() and (probs >= 0).all() and (probs[0][p == 0] == 0).all()
        assert abs(probs.sum().item() - 1) < (1e-2 if dtype == torch.bfloat16 else 1e-6)
        emitted = x[0, path[0, : accepted[0]]]
        assert (p[emitted] > 0).all() and (q[emitted] > 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_recorded_verification_reads_and_copies_nothing(rule):
    """On the stand-in device, as a CUDA graph, replayed with other numbers: those of the host."""
    B, V, parents = 5, 6, (-1, -1, 0, 0, 1, 4)
    N = len(parents)

    def drafts() -> dict[str, torch.Tensor]:
        x = torch.rand(B, N, V).argsort(-1)[..., 0]
        tensors = {
            "p": distributions("dense", V, B * (N + 1)).view(B, N + 1, V),
            "q": distributions("dense", V, B * N).view(B, N, V),
        }
        return tensors | {"x": x, "u": torch.rand(B, N), "k": torch.randint(N + 1, (B,))}

    def verdict(at):
        return RULES[rule](at["p"], at["q"], at["x"], parents, at["u"], at["k"])

    with standin.device() as gpu:
        replays = Recorded(SimpleNamespace(device=torch.device("cuda:0")))
        for n in range(3):
            given = drafts()
            there = {name: value.to("cuda:0") for name, value in given.items()}
            before = (sum(gpu.d2h.values()), sum(gpu.h2d.values()))
            recorded = replays("verdict", there, lambda: lambda **at: verdict(at), {})
            moved = (sum(gpu.d2h.values()), sum(gpu.h2d.values()))
            assert n == 0 or moved == before
            assert not replays.failed
            for one, other in zip(recorded, verdict(given), strict=True):
                torch.testing.assert_close(one.cpu(), other)


def test_typical_acceptance_takes_the_deepest_path():
    p = torch.tensor([0.7, 0.2, 0.1]).expand(3, 5, 3)  # threshold .09: all but nothing; .3 exp(-H) = .135
    x = torch.tensor([[1, 0, 2, 0], [2, 0, 0, 0], [1, 1, 1, 2]])
    parents = (-1, -1, 0, 1)
    verification = lossy_typical(p, x, parents, torch.tensor([4, 4, 1]), epsilon=0.15, delta=0.3)
    assert verification.path.tolist() == [[1, 3], [1, 3], [0, -1]] and verification.accepted.tolist() == [2, 2, 1]
    assert torch.equal(verification.probs, p[:, 0])
    strict = lossy_typical(p, x, parents, epsilon=0.9, delta=3.0)
    assert strict.accepted.tolist() == [0, 0, 0]
    assert lossy_typical(p[:, :1], x[:, :0], ()).accepted.tolist() == [0, 0, 0]
    drawn = lossy_typical(p[:, :2], torch.arange(3).unsqueeze(1), (-1,))
    assert drawn.accepted.tolist() == [1, 1, 1]  # whatever the draft drew: the text has the draft's distribution
