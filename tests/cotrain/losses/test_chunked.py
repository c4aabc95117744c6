"""Losses in chunks against the same losses on whole (B,T,V) distributions: value, gradient, statistics, memory."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain.losses import chunked
from cotrain.losses import divergences as losses
from cotrain.losses.chunked import chunk_positions, compared, token_logs
from cotrain.losses.guess import Guess
from cotrain.teacher.target_distributions import FromStates
from inference.sampling import keep_top_k
from studies.heads import run

B, T, V, DP, DQ = 3, 5, 11, 6, 4
MASK = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 1, 1]]).bool()


def parts(dtype=torch.float64):
    """hidden_p, head_p, hidden_q, head_q: distributions that are far from uniform."""
    torch.manual_seed(1)
    head_p, head_q = nn.Linear(DP, V, dtype=dtype), nn.Linear(DQ, V, dtype=dtype)
    hidden_p, hidden_q = 3 * torch.randn(B, T, DP, dtype=dtype), 3 * torch.randn(B, T, DQ, dtype=dtype)
    return hidden_p, head_p, hidden_q.requires_grad_(), head_q


def target_and_guess(hidden_p, head_p, hidden_q, head_q, parameters=()):
    """The target's distributions, and a guess at every position."""
    return FromStates(hidden_p, head_p), Guess.everywhere(hidden_q, head_q, tuple(parameters))


def plain(hidden_p, head_p, hidden_q, head_q, temperature=1.0):
    logits = head_p(hidden_p).detach() / temperature, head_q(hidden_q) / temperature
    return logits[0].log_softmax(-1), logits[1].log_softmax(-1)


def slopes(value, hidden_q, head_q):
    return torch.autograd.grad(value, [hidden_q, *head_q.parameters()])


def test_temperature_zero_trains_on_the_argmax_and_reports_agreement():
    given = parts()
    t = torch.tensor([0.0, 1.0, 0.0])
    value, statistics = chunked.chunked(losses.nla, *target_and_guess(*given), MASK, t, chunk=4)
    logp, logq = plain(*given)
    best = logp.argmax(-1)
    truth = torch.where(t[:, None] == 0, losses.greedy(logp, logq), losses.nla(logp, logq))
    torch.testing.assert_close(value, truth[MASK].sum())
    agree = (best == logq.argmax(-1)).double()
    alpha = torch.where(t[:, None] == 0, agree, losses.alpha(logp, logq))
    torch.testing.assert_close(statistics.alphas, (alpha * MASK).detach())
    assert 0 < agree[MASK].mean() < 1


def test_only_the_draft_learns():
    hidden_p, head_p, hidden_q, head_q = parts()
    hidden_p.requires_grad_()
    chunked.chunked(losses.kl, *target_and_guess(hidden_p, head_p, hidden_q, head_q), MASK, chunk=4)[0].backward()
    assert hidden_p.grad is None and head_p.weight.grad is None
    assert head_q.weight.grad.abs().sum() > 0
    assert (hidden_q.grad[~MASK] == 0).all() and (hidden_q.grad[MASK] != 0).any(-1).all()


def test_no_distribution_outlives_its_chunk():
    """Between forward and backward nothing of width V is stored, and no head reads more than a chunk."""
    hidden_p, head_p, hidden_q, head_q = parts()
    seen, saved = [], []
    for head in (head_p, head_q):
        head.register_forward_hook(lambda _, inputs, out: seen.append(len(out)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        value, _ = chunked.chunked(losses.kl, *target_and_guess(hidden_p, head_p, hidden_q, head_q), MASK, chunk=4)
    assert seen == [4, 4, 4, 4, 2, 2]
    assert all(V not in shape for shape in saved)
    value.backward()
    assert len(seen) == 12 and max(seen) == 4


def test_an_empty_mask_is_a_zero_that_differentiates():
    given = parts()
    value, statistics = chunked.chunked(losses.nla, *target_and_guess(*given), torch.zeros_like(MASK))
    assert value.item() == 0 and statistics.positions == 0 and statistics.alpha.item() == 0
    assert all((g == 0).all() for g in slopes(value, *given[2:]))


def test_half_precision_is_raised_before_the_softmax():
    hidden_p, head_p, hidden_q, head_q = parts(torch.bfloat16)
    value, statistics = chunked.chunked(losses.kl, *target_and_guess(hidden_p, head_p, hidden_q, head_q), MASK, 0.3)
    logp, logq = (head(h).float() / 0.3 for head, h in ((head_p, hidden_p), (head_q, hidden_q)))
    truth = losses.kl(logp.log_softmax(-1), logq.log_softmax(-1))[MASK].sum()
    torch.testing.assert_close(value, truth, rtol=1e-5, atol=1e-5)
    assert value.dtype == statistics.alpha.dtype == torch.float32


def test_comparisons_are_of_the_draft_as_served():
    given = parts()
    logp, logq = plain(*given)
    x = logp.argmax(-1)
    mask = torch.rand(B, T) < 0.7
    comparison = chunked.compared(*target_and_guess(*given), x, mask, 0.0, chunk=4)
    agree = (logq.argmax(-1) == x)[mask]
    assert (comparison.logp == 0).all() and torch.equal(comparison.logq == 0, agree)
    assert torch.equal(comparison.alpha, agree.double()) and torch.equal(comparison.alpha_greedy, agree.double())
    assert comparison.kl.isfinite().all()
    torch.testing.assert_close(comparison.entropy, losses.entropy(logq)[mask])
    torch.testing.assert_close(comparison.confidence, logq.exp().amax(-1)[mask])


@pytest.mark.parametrize("t", [-0.1, torch.ones(T), torch.tensor([1.0, -1.0, 1.0])])
def test_a_temperature_that_does_not_fit_raises(t):
    with pytest.raises(ValueError, match="temperature"):
        chunked.chunked(losses.kl, *target_and_guess(*parts()), MASK, t)


def test_eager_gradients_include_weights_and_later_factors():
    """With weights of positions, a mean and a factor after the sum, and a frozen bias."""
    given, weights = parts(), torch.rand(B, T).double() * MASK
    given[3].bias.requires_grad_(False)
    results = []
    for parameters in ((), list(given[3].parameters())):
        value, seen = chunked.chunked(losses.nla, *target_and_guess(*given, parameters), weights, 0.7, chunk=3)
        results.append((torch.autograd.grad(3 * value / seen.positions, [given[2], given[3].weight]), seen.alpha))
    torch.testing.assert_close(results[0], results[1])


def test_eager_gradients_compute_a_chunk_once():
    hidden_p, head_p, hidden_q, head_q = parts()
    passes = []

    def counted(states):
        passes.append(len(states))
        return head_q(states)

    for parameters, expected in (((), 2), (list(head_q.parameters()), 1)):
        passes.clear()
        value, _ = chunked.chunked(
            losses.kl, *target_and_guess(hidden_p, head_p, hidden_q, counted, parameters), MASK, chunk=4
        )
        value.backward()
        assert sum(passes) == expected * MASK.sum()


ROWS, D, TOP = 4, 3, 6


def inputs(length: int) -> tuple[Tensor, nn.Linear, Tensor, nn.Linear, Tensor, Tensor]:
    """States and heads of both sides, weights of positions and tokens; with length = ROWS, rows and columns have the
    same shape."""
    torch.manual_seed(length)
    head_p, head_q = (nn.Linear(D, V, dtype=torch.float64) for _ in range(2))
    ours, theirs = (2 * torch.randn(ROWS, length, D, dtype=torch.float64) for _ in range(2))
    weight = torch.rand(ROWS, length, dtype=torch.float64) * (torch.rand(ROWS, length) < 0.7)
    return (
        theirs,
        head_p,
        ours.requires_grad_(),
        head_q,
        weight,
        torch.randint(V, (ROWS, length)),
    )


def distributions(
    theirs: Tensor, head_p: Any, ours: Tensor, head_q: Any, t: Tensor, cut: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """log p as served, log q as trained, log q as served, (ROWS, T, V)."""
    logits = [head(states) / t.unsqueeze(-1) for head, states in ((head_p, theirs), (head_q, ours))]
    served = [keep_top_k(one.flatten(0, 1), TOP).view(one.shape) if cut else one for one in logits]
    return served[0].log_softmax(-1).detach(), logits[1].log_softmax(-1), served[1].log_softmax(-1).detach()


def mean(logp: Tensor, logq: Tensor) -> Tensor:
    return losses.kl(logp, logq) + 0.5 * losses.nla(logp, logq)


@pytest.mark.parametrize("length", [ROWS, 7])
@pytest.mark.parametrize(
    ("chunk", "eager", "form"),
    [
        (3, True, "number"),
        (512, True, "rows"),
        (3, False, "rows"),
        (1, True, "positions"),
        (512, False, "positions"),
    ],
)
def test_all_options_together_equal_whole_distributions(length: int, chunk: int, eager: bool, form: str) -> None:
    theirs, head_p, ours, head_q, weight, _ = inputs(length)
    rows = torch.tensor([0.5, 1.0, 2.0, 0.8], dtype=torch.float64)
    t = {"number": 0.7, "rows": rows, "positions": rows.unsqueeze(1) + torch.arange(length) / 9}[form]
    spread = torch.as_tensor(t, dtype=torch.float64)
    whole = (spread.unsqueeze(1) if form == "rows" else spread).expand(ROWS, length)
    terms = [losses.kl, lambda p, q: 0.5 * losses.nla(p, q)]
    guess = Guess.everywhere(ours, head_q, tuple(head_q.parameters()) if eager else ())
    value, statistics = chunked.chunked(
        mean,
        FromStates(theirs, head_p),
        guess,
        weight,
        t,
        chunk=chunk,
        terms=terms,
        truncate=partial(keep_top_k, k=TOP),
    )
    logp, logq, served = distributions(theirs, head_p, ours, head_q, whole, cut=True)
    counted = weight > 0
    truth = (mean(logp, logq) * weight)[counted].sum()
    torch.testing.assert_close(value, truth)
    expected = torch.autograd.grad(truth, [ours, *head_q.parameters()])
    torch.testing.assert_close(torch.autograd.grad(value, [ours, *head_q.parameters()]), expected)
    apart = [(term(logp, logq) * weight)[counted].sum() for term in terms]
    torch.testing.assert_close(statistics.terms, torch.stack(apart).detach())
    torch.testing.assert_close(statistics.terms.sum(), value.detach())
    alpha = torch.minimum(logp.exp(), served.exp()).sum(-1).detach()
    torch.testing.assert_close(statistics.alphas, alpha * counted)
    torch.testing.assert_close(statistics.alpha, alpha[counted].mean())
    torch.testing.assert_close(statistics.alpha_greedy, losses.alpha_greedy(logp, logq)[counted].mean().detach())
    assert statistics.positions == int(counted.sum())


def test_comparisons_equal_whole_distributions() -> None:
    theirs, head_p, ours, head_q, weight, x = inputs(7)
    rows, mask = torch.tensor([0.5, 1.0, 2.0, 0.8], dtype=torch.float64), weight > 0
    asked = FromStates(theirs, head_p), Guess.everywhere(ours, head_q), x, mask, rows
    logp, logq, served = distributions(theirs, head_p, ours, head_q, rows.unsqueeze(1).expand(ROWS, 7), cut=True)
    with torch.no_grad():
        comparison = compared(*asked, chunk=4, truncate=partial(keep_top_k, k=TOP))
    expected = {
        "logp": logp.gather(-1, x[..., None])[..., 0],
        "logq": served.gather(-1, x[..., None])[..., 0],
        "kl": losses.kl(logp, logq),
        "alpha": losses.alpha(logp, served),
        "entropy": losses.entropy(logq),
        "alpha_greedy": losses.alpha_greedy(logp, logq),
        "hit": (logq.argmax(-1) == x).double(),
        "confidence": logq.exp().amax(-1),
    }
    assert comparison.at.tolist() == mask.flatten().nonzero().squeeze(-1).tolist()
    for name, values in expected.items():
        torch.testing.assert_close(getattr(comparison, name), values[mask].detach(), msg=name)
    p, q = token_logs(*asked, chunk=4, truncate=partial(keep_top_k, k=TOP))
    torch.testing.assert_close(p[mask], expected["logp"][mask])
    torch.testing.assert_close(q[mask], logq.gather(-1, x[..., None])[..., 0][mask])
    assert (p[~mask] == 0).all() and (q[~mask] == -torch.inf).all()


@pytest.mark.thorough
@pytest.mark.timeout(600)  # two processes at 12,000 tokens, a quarter of a minute each on a busy machine
def test_both_sides_agree_and_chunks_take_less_memory() -> None:
    figures = run(12_000, 2_048, repeats=1)  # 0.46 here; with half of the tokens it is 0.6
    assert max(figures["apart"]) < 0.01
    assert figures["memory"] < 0.7


def test_chunks_fit_a_cpus_cache_and_fill_a_gpu() -> None:
    assert chunk_positions(8192, "cpu") * 8192 == 2**21 < chunk_positions(8192, "cuda") * 8192 <= 2**27
    assert chunk_positions(200_000, "cpu") == 192 == chunk_positions(10**6, "cuda")
