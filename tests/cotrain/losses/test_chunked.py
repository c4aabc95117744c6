"""Losses in chunks against the same losses on whole (B,T,V) distributions: value, gradient, statistics, memory."""

from functools import partial

import pytest
import torch
from torch import nn

from cotrain import losses
from cotrain.losses import chunked
from cotrain.students.base import Guess
from cotrain.teacher.target_distributions import FromStates
from inference.sampling import draw, keep_top_k

B, T, V, DP, DQ = 3, 5, 11, 6, 4
MASK = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 1, 1]]).bool()


def parts(dtype=torch.float64):
    """hidden_p, head_p, hidden_q, head_q: distributions that are far from uniform."""
    torch.manual_seed(1)
    head_p, head_q = nn.Linear(DP, V, dtype=dtype), nn.Linear(DQ, V, dtype=dtype)
    hidden_p, hidden_q = 3 * torch.randn(B, T, DP, dtype=dtype), 3 * torch.randn(B, T, DQ, dtype=dtype)
    return hidden_p, head_p, hidden_q.requires_grad_(), head_q


def asked(hidden_p, head_p, hidden_q, head_q, parameters=()):
    """The target's distributions, and a guess at every place."""
    return FromStates(hidden_p, head_p), Guess.everywhere(hidden_q, head_q, tuple(parameters))


def plain(hidden_p, head_p, hidden_q, head_q, temperature=1.0):
    logits = head_p(hidden_p).detach() / temperature, head_q(hidden_q) / temperature
    return logits[0].log_softmax(-1), logits[1].log_softmax(-1)


def slopes(value, hidden_q, head_q):
    return torch.autograd.grad(value, [hidden_q, *head_q.parameters()])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 512])
@pytest.mark.parametrize("loss", [losses.kl, losses.tv, losses.nla, losses.lk], ids=lambda f: f.__name__)
def test_equals_the_plain_form(loss, chunk, ahead):
    given = parts()
    parameters = list(given[3].parameters()) if ahead else ()
    value, found = chunked.chunked(loss, *asked(*given, parameters), MASK, 0.7, chunk=chunk)
    logp, logq = plain(*given, 0.7)
    truth = loss(logp, logq)[MASK].sum()
    torch.testing.assert_close(value, truth)
    torch.testing.assert_close(slopes(value, *given[2:]), slopes(truth, *given[2:]))
    alpha = torch.minimum(logp.exp(), logq.exp()).sum(-1).detach()
    torch.testing.assert_close(found.alphas, alpha * MASK)
    torch.testing.assert_close(found.alpha, alpha[MASK].mean())
    torch.testing.assert_close(found.entropy, -(logp.exp() * logp).sum(-1)[MASK].mean())
    top = logp.exp().gather(-1, logq.argmax(-1, keepdim=True)).squeeze(-1)
    torch.testing.assert_close(found.alpha_greedy, top[MASK].mean())
    assert found.positions == MASK.sum() and not found.alpha.requires_grad


@pytest.mark.parametrize("shape", [(B,), (B, T)])
def test_a_temperature_for_each_row_or_position(shape):
    given = parts()
    t = torch.rand(shape, dtype=torch.float64) + 0.3
    value, _ = chunked.chunked(losses.kl, *asked(*given), MASK, t, chunk=4)
    spread = t.reshape(*shape, *(1,) * (3 - len(shape)))
    torch.testing.assert_close(value, losses.kl(*plain(*given, spread))[MASK].sum())


def test_temperature_zero_trains_on_the_argmax_and_reports_agreement():
    given = parts()
    t = torch.tensor([0.0, 1.0, 0.0])
    value, found = chunked.chunked(losses.nla, *asked(*given), MASK, t, chunk=4)
    logp, logq = plain(*given)
    best = logp.argmax(-1)
    truth = torch.where(t[:, None] == 0, losses.greedy(logp, logq), losses.nla(logp, logq))
    torch.testing.assert_close(value, truth[MASK].sum())
    agree = (best == logq.argmax(-1)).double()
    alpha = torch.where(t[:, None] == 0, agree, losses.alpha(logp, logq))
    torch.testing.assert_close(found.alphas, (alpha * MASK).detach())
    assert 0 < agree[MASK].mean() < 1
    with pytest.raises(ValueError, match="rkl"):
        chunked.chunked(losses.rkl, *asked(*given), MASK, 0)


def test_weights_scale_the_loss_and_not_the_statistics():
    given = parts()
    weights = torch.rand(B, T, dtype=torch.float64) * MASK
    value, found = chunked.chunked(losses.tv, *asked(*given), weights, chunk=4)
    tv = losses.tv(*plain(*given))
    torch.testing.assert_close(value, (tv * weights).sum())
    torch.testing.assert_close(found.alpha, 1 - tv[MASK].mean().detach())


def test_truncation_cuts_p_in_the_loss_and_both_in_the_report():
    given = parts()
    value, found = chunked.chunked(losses.kl, *asked(*given), MASK, truncate=partial(keep_top_k, k=3), chunk=4)
    logp, logq = plain(*given)

    def nucleus(probs):
        least = probs.topk(3).values[..., -1:]
        kept = probs * (probs >= least)
        return (kept / kept.sum(-1, keepdim=True)).log()

    torch.testing.assert_close(value, losses.kl(nucleus(logp.exp()), logq)[MASK].sum())
    both = losses.alpha(nucleus(logp.exp()), nucleus(logq.exp()))
    torch.testing.assert_close(found.alpha, both[MASK].mean().detach())


def test_losses_that_take_tokens():
    given = parts()
    x, u = torch.randint(V, (B, T)), torch.rand(B, T, dtype=torch.float64)
    logp, logq = plain(*given)
    value, _ = chunked.chunked(losses.mix, *asked(*given), MASK, x=x, chunk=4)
    torch.testing.assert_close(value, losses.mix(logp, logq, x)[MASK].sum())
    value, _ = chunked.chunked(losses.tvpp, *asked(*given), MASK, u=u, chunk=4)
    truth = losses.tvpp(logp, logq, draw(logq.exp(), u))[MASK].sum()
    torch.testing.assert_close(value, truth)
    torch.testing.assert_close(slopes(value, *given[2:]), slopes(truth, *given[2:]))
    with pytest.raises(ValueError, match="not both"):
        chunked.chunked(losses.mix, *asked(*given), MASK, x=x, u=u)


def test_only_the_draft_learns():
    hidden_p, head_p, hidden_q, head_q = parts()
    hidden_p.requires_grad_()
    chunked.chunked(losses.kl, *asked(hidden_p, head_p, hidden_q, head_q), MASK, chunk=4)[0].backward()
    assert hidden_p.grad is None and head_p.weight.grad is None
    assert head_q.weight.grad.abs().sum() > 0
    assert (hidden_q.grad[~MASK] == 0).all() and (hidden_q.grad[MASK] != 0).any(-1).all()


def test_no_distribution_outlives_its_chunk():
    """Between forward and backward nothing of width V is kept, and no head sees more than a chunk."""
    hidden_p, head_p, hidden_q, head_q = parts()
    seen, kept = [], []
    for head in (head_p, head_q):
        head.register_forward_hook(lambda _, inputs, out: seen.append(len(out)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        value, _ = chunked.chunked(losses.kl, *asked(hidden_p, head_p, hidden_q, head_q), MASK, chunk=4)
    assert seen == [4, 4, 4, 4, 2, 2]
    assert all(V not in shape for shape in kept)
    value.backward()
    assert len(seen) == 12 and max(seen) == 4


def test_an_empty_mask_is_a_zero_that_differentiates():
    given = parts()
    value, found = chunked.chunked(losses.nla, *asked(*given), torch.zeros_like(MASK))
    assert value.item() == 0 and found.positions == 0 and found.alpha.item() == 0
    assert all((g == 0).all() for g in slopes(value, *given[2:]))


def test_half_precision_is_raised_before_the_softmax():
    hidden_p, head_p, hidden_q, head_q = parts(torch.bfloat16)
    value, found = chunked.chunked(losses.kl, *asked(hidden_p, head_p, hidden_q, head_q), MASK, 0.3)
    logp, logq = (head(h).float() / 0.3 for head, h in ((head_p, hidden_p), (head_q, hidden_q)))
    truth = losses.kl(logp.log_softmax(-1), logq.log_softmax(-1))[MASK].sum()
    torch.testing.assert_close(value, truth, rtol=1e-5, atol=1e-5)
    assert value.dtype == found.alpha.dtype == torch.float32


def test_token_logs():
    given = parts()
    x = torch.randint(V, (B, T))
    logp_x, logq_x = chunked.token_logs(*asked(*given), x, torch.ones_like(MASK), 0.7, chunk=4)
    logp, logq = (a.gather(-1, x[..., None]).squeeze(-1) for a in plain(*given, 0.7))
    torch.testing.assert_close((logp_x, logq_x), (logp, logq))
    torch.testing.assert_close(slopes(logq_x.sum(), *given[2:]), slopes(logq.sum(), *given[2:]))


def test_comparisons_are_of_the_draft_as_served():
    given = parts()
    logp, logq = plain(*given)
    x = logp.argmax(-1)
    mask = torch.rand(B, T) < 0.7
    found = chunked.compared(*asked(*given), x, mask, 0.0, chunk=4)
    agree = (logq.argmax(-1) == x)[mask]
    assert (found.logp == 0).all() and torch.equal(found.logq == 0, agree)
    assert torch.equal(found.alpha, agree.double()) and torch.equal(found.alpha_greedy, agree.double())
    assert found.kl.isfinite().all()
    torch.testing.assert_close(found.entropy, losses.entropy(logq)[mask])
    torch.testing.assert_close(found.confidence, logq.exp().amax(-1)[mask])
    warm = chunked.compared(*asked(*given), x, mask, 0.7, truncate=partial(keep_top_k, k=3))
    _, whole = chunked.chunked(losses.kl, *asked(*given), mask, 0.7, truncate=partial(keep_top_k, k=3))
    torch.testing.assert_close(warm.alpha.mean(), whole.alpha)
    torch.testing.assert_close(warm.alpha_greedy.mean(), whole.alpha_greedy)
    logs = chunked.token_logs(*asked(*given), x, mask, 0.7)
    plainly = chunked.compared(*asked(*given), x, mask, 0.7)
    torch.testing.assert_close((plainly.logp, plainly.logq), (logs[0][mask], logs[1][mask]))


@pytest.mark.parametrize("t", [-0.1, torch.ones(T), torch.tensor([1.0, -1.0, 1.0])])
def test_a_temperature_that_does_not_fit_is_refused(t):
    with pytest.raises(ValueError, match="temperature"):
        chunked.chunked(losses.kl, *asked(*parts()), MASK, t)


def test_the_hardest_positions_alone_keep_the_size_of_the_sum():
    given = parts()
    every = losses.kl(*plain(*given))[MASK]
    found, _ = chunked.chunked(losses.kl, *asked(*given), MASK, hardest=0.5, chunk=3)
    torch.testing.assert_close(found, every.topk(round(len(every) / 2)).values.sum() * 2)
    with pytest.raises(ValueError, match="hardest"):
        chunked.chunked(losses.kl, *asked(*given), MASK, hardest=0.0)


def test_gradients_made_ahead_carry_weights_and_what_comes_after():
    """Weights of positions, a loss that draws, a mean and a factor behind the sum, a frozen bias."""
    given, weights, u = parts(), torch.rand(B, T).double() * MASK, torch.rand(B, T).double()
    given[3].bias.requires_grad_(False)
    found = []
    for parameters in ((), list(given[3].parameters())):
        value, seen = chunked.chunked(losses.tvpp, *asked(*given, parameters), weights, 0.7, chunk=3, u=u)
        found.append((torch.autograd.grad(3 * value / seen.positions, [given[2], given[3].weight]), seen.alpha))
    torch.testing.assert_close(found[0], found[1])


def test_gradients_made_ahead_compute_a_chunk_once():
    hidden_p, head_p, hidden_q, head_q = parts()
    passes = []

    def counted(states):
        passes.append(len(states))
        return head_q(states)

    for parameters, expected in (((), 2), (list(head_q.parameters()), 1)):
        passes.clear()
        value, _ = chunked.chunked(losses.kl, *asked(hidden_p, head_p, hidden_q, counted, parameters), MASK, chunk=4)
        value.backward()
        assert sum(passes) == expected * MASK.sum()
