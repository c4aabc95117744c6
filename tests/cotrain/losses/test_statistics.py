"""A loss in chunks with all of its options together, against one pass over whole distributions: value, slopes,
figures."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain import losses
from cotrain.losses.chunked import chunked, compared, token_logs
from cotrain.losses.guess import Guess
from cotrain.teacher.target_distributions import FromStates
from inference.sampling import draw, keep_top_k

B, V, D, KEPT = 4, 11, 3, 6


def parts(length: int) -> tuple[Tensor, nn.Linear, Tensor, nn.Linear, Tensor, Tensor, Tensor]:
    """States and heads of both sides, weights of places, tokens and uniforms; length = B: rows look like columns."""
    torch.manual_seed(length)
    head_p, head_q = (nn.Linear(D, V, dtype=torch.float64) for _ in range(2))
    ours, theirs = (2 * torch.randn(B, length, D, dtype=torch.float64) for _ in range(2))
    weight = torch.rand(B, length, dtype=torch.float64) * (torch.rand(B, length) < 0.7)
    return theirs, head_p, ours.requires_grad_(), head_q, weight, torch.randint(V, (B, length)), torch.rand(B, length)


def distributions(
    theirs: Tensor, head_p: Any, ours: Tensor, head_q: Any, t: Tensor, cut: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """log p as served, log q as trained, log q as served, (B, T, V)."""
    logits = [head(states) / t.unsqueeze(-1) for head, states in ((head_p, theirs), (head_q, ours))]
    served = [keep_top_k(one.flatten(0, 1), KEPT).view(one.shape) if cut else one for one in logits]
    return served[0].log_softmax(-1).detach(), logits[1].log_softmax(-1), served[1].log_softmax(-1).detach()


def mean(logp: Tensor, logq: Tensor, x: Tensor) -> Tensor:
    return losses.kl(logp, logq) + 0.5 * losses.ce(logp, logq, x)


@pytest.mark.parametrize("length", [B, 7])
@pytest.mark.parametrize("hardest", [1.0, 0.4])
@pytest.mark.parametrize(("chunk", "ahead"), [(3, True), (3, False), (512, True)])
@pytest.mark.parametrize("form", ["number", "rows", "places"])
def test_all_options_together_are_one_pass(length: int, hardest: float, chunk: int, ahead: bool, form: str) -> None:
    theirs, head_p, ours, head_q, weight, x, _ = parts(length)
    rows = torch.tensor([0.5, 1.0, 2.0, 0.8], dtype=torch.float64)
    t = {"number": 0.7, "rows": rows, "places": rows.unsqueeze(1) + torch.arange(length) / 9}[form]
    spread = torch.as_tensor(t, dtype=torch.float64)
    whole = (spread.unsqueeze(1) if form == "rows" else spread).expand(B, length)
    terms = [lambda p, q, x: losses.kl(p, q), lambda p, q, x: 0.5 * losses.ce(p, q, x)]
    guess = Guess.everywhere(ours, head_q, tuple(head_q.parameters()) if ahead else ())
    value, found = chunked(
        mean, FromStates(theirs, head_p), guess, weight, t, chunk=chunk, x=x, hardest=hardest, terms=terms,
        truncate=partial(keep_top_k, k=KEPT),
    )  # fmt: skip
    logp, logq, served = distributions(theirs, head_p, ours, head_q, whole, cut=True)
    counted = weight > 0
    each = (mean(logp, logq, x) * weight)[counted]
    top = each.topk(round(hardest * len(each))).indices if hardest < 1 else torch.arange(len(each))
    truth = each[top].sum() / hardest
    torch.testing.assert_close(value, truth)
    wanted = torch.autograd.grad(truth, [ours, *head_q.parameters()])
    torch.testing.assert_close(torch.autograd.grad(value, [ours, *head_q.parameters()]), wanted)
    apart = [(term(logp, logq, x) * weight)[counted][top].sum() / hardest for term in terms]
    torch.testing.assert_close(found.terms, torch.stack(apart).detach())
    torch.testing.assert_close(found.terms.sum(), value.detach())
    alpha = torch.minimum(logp.exp(), served.exp()).sum(-1).detach()
    torch.testing.assert_close(found.alphas, alpha * counted)
    torch.testing.assert_close(found.alpha, alpha[counted].mean())
    torch.testing.assert_close(found.alpha_greedy, losses.alpha_greedy(logp, logq)[counted].mean().detach())
    torch.testing.assert_close(found.entropy, losses.entropy(logp)[counted].mean())
    assert found.positions == int(counted.sum())


@pytest.mark.parametrize("ahead", [False, True])
def test_drawn_tokens_are_of_the_draft(ahead: bool) -> None:
    """By the uniform of their own place."""
    theirs, head_p, ours, head_q, weight, _, u = parts(5)
    guess = Guess.everywhere(ours, head_q, tuple(head_q.parameters()) if ahead else ())
    value, _ = chunked(losses.tvpp, FromStates(theirs, head_p), guess, weight, 0.7, chunk=4, u=u)
    logp, logq, _ = distributions(theirs, head_p, ours, head_q, torch.full((B, 5), 0.7, dtype=torch.float64), cut=False)
    x = draw(logq.detach().exp().flatten(0, 1), u.flatten()).view(B, 5)
    torch.testing.assert_close(value, (losses.tvpp(logp, logq, x) * weight).sum())


def test_what_is_compared_is_one_pass_too() -> None:
    theirs, head_p, ours, head_q, weight, x, _ = parts(7)
    rows, mask = torch.tensor([0.5, 1.0, 2.0, 0.8], dtype=torch.float64), weight > 0
    asked = FromStates(theirs, head_p), Guess.everywhere(ours, head_q), x, mask, rows
    logp, logq, served = distributions(theirs, head_p, ours, head_q, rows.unsqueeze(1).expand(B, 7), cut=True)
    with torch.no_grad():
        found = compared(*asked, chunk=4, truncate=partial(keep_top_k, k=KEPT))
    wanted = {
        "logp": logp.gather(-1, x[..., None])[..., 0], "logq": served.gather(-1, x[..., None])[..., 0],
        "kl": losses.kl(logp, logq), "alpha": losses.alpha(logp, served), "entropy": losses.entropy(logq),
        "alpha_greedy": losses.alpha_greedy(logp, logq), "hit": (logq.argmax(-1) == x).double(),
        "confidence": logq.exp().amax(-1),
    }  # fmt: skip
    assert found.at.tolist() == mask.flatten().nonzero().squeeze(-1).tolist()
    for name, values in wanted.items():
        torch.testing.assert_close(getattr(found, name), values[mask].detach(), msg=name)
    p, q = token_logs(*asked, chunk=4, truncate=partial(keep_top_k, k=KEPT))
    torch.testing.assert_close(p[mask], wanted["logp"][mask])
    torch.testing.assert_close(q[mask], logq.gather(-1, x[..., None])[..., 0][mask])
    assert (p[~mask] == 0).all() and (q[~mask] == -torch.inf).all()
