"""Divergences per position: values and gradients by hand, edges, bounds, a wide vocabulary."""

import itertools
import math

import pytest
import torch

from cotrain.losses import divergences as losses
from cotrain.losses.names import LOSSES

TINY = -math.log(torch.finfo(torch.float32).tiny)


def pair(n=4, vocab=5, scale=1.5, dtype=torch.float64):
    """log p and the logits z of q, (n,V), no ties."""
    g = torch.Generator().manual_seed(1)
    draw = torch.randn(2, n, vocab, generator=g, dtype=torch.float64).to(dtype) * scale
    return draw[0].log_softmax(-1), draw[1]


def total(a):
    return a.sum(-1, keepdim=True)


def onehot(x, q):
    return torch.nn.functional.one_hot(x, q.shape[-1]).to(q)


def inside(p, q):
    return (q <= p).to(q)


def g_tv(p, q):
    return -q * (inside(p, q) - total(q * inside(p, q)))


def g_lk(p, q):
    w = torch.exp(-3 * total(torch.minimum(p, q)))
    return w * (q - p) + (1 - w) * g_tv(p, q)


def g_greedy_draft(p, q):
    sharp = q**4 / total(q**4)
    return -4 * sharp * (p - total(p * sharp))


CLOSED = {
    losses.kl: lambda p, q: q - p,
    losses.tv: g_tv,
    losses.nla: lambda p, q: g_tv(p, q) / total(torch.minimum(p, q)),
    losses.lk: g_lk,
    losses.greedy: lambda p, q: q - onehot(p.argmax(-1), q),
    losses.greedy_draft: g_greedy_draft,
}
NAMED = {getattr(losses, one.function or name) for name, one in LOSSES.items() if not one.sequence}
assert NAMED == {*CLOSED}, "give each loss its gradient by the draft's logits in CLOSED"
EVERY = pytest.mark.parametrize("loss", CLOSED, ids=lambda f: f.__name__)


@EVERY
def test_gradient_is_the_closed_form(loss):
    logp, z = pair()
    z.requires_grad_()
    loss(logp, z.log_softmax(-1)).sum().backward()
    q = z.detach().softmax(-1)
    torch.testing.assert_close(z.grad, CLOSED[loss](logp.exp(), q), atol=1e-12, rtol=0)


VALUES = {
    losses.kl: math.log(2) / 3,
    losses.tv: 1 / 3,
    losses.nla: math.log(3 / 2),
    losses.greedy: math.log(3),
    losses.greedy_draft: 1 - (16 / 17 / 3 + 2 / 17 / 3),
    losses.lk: math.exp(-2) * math.log(2) / 3 + (1 - math.exp(-2)) / 3,
}


@pytest.mark.parametrize("loss", VALUES, ids=lambda f: f.__name__)
def test_value_by_hand(loss):
    """p = (1/3, 2/3), q = (2/3, 1/3)."""
    p, q = torch.tensor([1 / 3, 2 / 3]).double(), torch.tensor([2 / 3, 1 / 3]).double()
    assert loss(p.log(), q.log()).item() == pytest.approx(VALUES[loss], abs=1e-7)


def test_lk_takes_an_aggregated_alpha_and_eta():
    logp, z = pair()
    logq = z.log_softmax(-1)
    kl, tv = losses.kl(logp, logq), losses.tv(logp, logq)
    w = math.exp(-10 * 0.3)
    torch.testing.assert_close(losses.lk(logp, logq, 10.0, torch.tensor(0.3)), w * kl + (1 - w) * tv)


def test_equal_distributions_cost_nothing():
    logp, _ = pair()
    for loss in (losses.kl, losses.tv, losses.nla, losses.lk):
        q = logp.clone().requires_grad_()
        value = loss(logp, q)
        torch.testing.assert_close(value, torch.zeros(4).double(), atol=1e-12, rtol=0)
        value.sum().backward()
        assert q.grad.isfinite().all()


def test_one_hot_target_makes_nla_cross_entropy():
    _, z = pair()
    logq = z.log_softmax(-1)
    x = torch.tensor([1, 4, 0, 2])
    logp = torch.full_like(z, -torch.inf).scatter(-1, x[:, None], 0.0)
    cross = torch.nn.functional.cross_entropy(z, x, reduction="none")
    for loss in (losses.nla, losses.kl, losses.greedy):
        torch.testing.assert_close(loss(logp, logq), cross)


def edges(dtype=torch.float32):
    """Pairs of log distributions: one-hot, truncated, pruned, disjoint, saturated, equal."""
    inf = torch.inf
    full = torch.tensor([0.1, -1.0, 0.3, 0.0]).log_softmax(-1)
    hot = torch.tensor([0.0, -inf, -inf, -inf])
    cut = torch.tensor([0.2, 0.5, -inf, -inf]).log_softmax(-1)
    other = torch.tensor([-inf, -inf, 0.4, 0.1]).log_softmax(-1)
    sharp = torch.tensor([300.0, -300.0, 0.0, 10.0]).log_softmax(-1)
    distributions = [full, hot, cut, other, sharp]
    both = list(itertools.product(distributions, distributions))
    return torch.stack([a for a, _ in both]).to(dtype), torch.stack([b for _, b in both]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@EVERY
def test_edges_are_finite(loss, dtype):
    logp, logq = edges(dtype)
    logp, logq = logp.requires_grad_(), logq.requires_grad_()
    value = loss(logp, logq)
    assert value.dtype == torch.promote_types(dtype, torch.float32) and value.isfinite().all()
    value.sum().backward()
    assert logp.grad is None or logp.grad.isfinite().all()
    assert logq.grad.isfinite().all()


def test_zero_overlap_is_the_floor_with_zero_gradient():
    logp = torch.tensor([[0.0, -torch.inf], [0.5, 0.5]])
    logq = torch.tensor([[-torch.inf, 0.0], [0.4, 0.6]]).requires_grad_()
    value = losses.nla(logp, logq)
    (grad,) = torch.autograd.grad(value.sum(), logq)
    assert value[0].item() == pytest.approx(TINY)
    assert (grad[0] == 0).all() and (grad[1] != 0).any()


def test_overlap_below_float32_still_teaches():
    """p and q share nothing that float32 can hold; nla keeps the slope that tv has lost."""
    logp = torch.tensor([[0.0, -200.0]])
    z = torch.tensor([[-200.0, 0.0]], requires_grad=True)
    for loss in (losses.nla, losses.kl):
        value = loss(logp, z.log_softmax(-1))
        assert value.item() == pytest.approx(200, abs=1)
        (grad,) = torch.autograd.grad(value.sum(), z)
        assert grad.abs().max() > 0.4


@pytest.mark.parametrize("loss", [losses.nla, losses.lk, losses.greedy_draft], ids=lambda f: f.__name__)
def test_wide_vocabulary(loss):
    """151,936 tokens in bfloat16 logits agree with float64 to float32's sums."""
    g = torch.Generator().manual_seed(0)
    zp, zq = (5 * torch.randn(1, 151_936, generator=g)).bfloat16(), (5 * torch.randn(1, 151_936, generator=g))
    logp, logq = zp.float().log_softmax(-1), zq.log_softmax(-1)
    exact = loss(zp.double().log_softmax(-1), zq.double().log_softmax(-1))
    torch.testing.assert_close(loss(logp, logq).double(), exact, atol=5e-5, rtol=5e-5)  # sums differ by CPU


def test_greedy_acceptance_and_entropy():
    logp, logq = torch.tensor([0.2, 0.3, 0.5]).log(), torch.tensor([0.1, 0.8, 0.1]).log()
    hot = torch.tensor([-torch.inf, 0.0, -torch.inf])
    assert losses.alpha_greedy(logp, logq).item() == pytest.approx(0.3)
    assert losses.alpha(logp, hot).item() == pytest.approx(0.3)  # the same: greedy drafting is a one-hot q
    assert losses.entropy(hot).item() == 0
    assert losses.entropy(torch.zeros(8).log_softmax(-1)).item() == pytest.approx(math.log(8))
    near = losses.greedy_draft(logp, logq, sharp=50.0).item()
    assert near == pytest.approx(1 - 0.3, abs=1e-6)
