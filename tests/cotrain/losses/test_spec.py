"""Loss expressions: the sums that they stand for, and those that raise."""

import pytest
import torch

from cotrain import acceptance
from cotrain.losses import divergences
from cotrain.losses.names import LOSSES, LossDefinition
from cotrain.losses.spec import parse


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return draw[0].log_softmax(-1), draw[1].log_softmax(-1)


def test_a_name_is_the_loss_and_a_sum_is_weighted() -> None:
    logp, logq = distributions()
    assert parse("nla").position is divergences.nla
    torch.testing.assert_close(parse("0.25*tv").position(logp, logq), 0.25 * divergences.tv(logp, logq))
    torch.testing.assert_close(
        parse(" 0.1*kl + 0.9 * tv").position(logp, logq),
        0.1 * divergences.kl(logp, logq) + 0.9 * divergences.tv(logp, logq),
        atol=1e-12,
        rtol=0,
    )


def test_a_name_that_comes_twice_is_one_term() -> None:
    logp, logq = distributions()
    parsed = parse("kl+0.5*tv+0.25*kl")
    assert [(term.name, term.weight) for term in parsed.terms] == [("kl", 1.25), ("tv", 0.5)]
    expected = 1.25 * divergences.kl(logp, logq) + 0.25 * (logp.exp() - logq.exp()).abs().sum(-1)
    torch.testing.assert_close(parsed.position(logp, logq), expected, atol=1e-12, rtol=0)


def test_a_loss_is_one_function_and_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def surprise(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
        return -divergences.nla(logp, logq)

    monkeypatch.setattr(divergences, "surprise", surprise, raising=False)
    monkeypatch.setitem(LOSSES, "surprise", LossDefinition())
    logp, logq = distributions()
    torch.testing.assert_close(
        parse("2*surprise+kl").position(logp, logq),
        divergences.kl(logp, logq) - 2 * divergences.nla(logp, logq),
        atol=1e-12,
        rtol=0,
    )


def test_sequence_losses_are_those_of_acceptance() -> None:
    logp, logq = -torch.rand(2, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lengths = torch.tensor([6, 4])
    r, l = acceptance.r_from(logp, logq), acceptance.l_from(logp, logq)
    expected = {
        "calls": 1 / acceptance.tau(r, 3, lengths),
        "calls_block": acceptance.expected_calls_block(l, 3, lengths).sum() / lengths.sum(),
    }
    for name, value in expected.items():
        parsed = parse(f"0.5*{name}+kl")
        (term,) = parsed.sequence
        assert term.weight == 0.5 and parsed.position is divergences.kl and not parsed.weighted
        torch.testing.assert_close(term.function(logp, logq, 3, lengths) / lengths.sum(), value)
    assert (
        parse("calls").position is None and parse("calls_tv").weighted and parse("calls_tv").position is divergences.tv
    )


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("klx", "'klx' is not one of kl, tv"),
        ("kl+rkl", "rkl was removed: use kl"),
        ("kl + ", "'' is not one of"),
        ("a*kl", "'a' in 'a\\*kl' is not a number"),
        ("calls_tv+kl", "cannot be part of a sum"),
    ],
)
def test_other_expressions_raise(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"loss.first: .*{message}"):
        parse(expression)


def test_calls_under_block_verification_by_hand() -> None:
    """q is twice p, then a quarter of it: a round accepts both drafts with probability 1/2, under the token rule with
    1/4; the third token then costs a call of its own."""
    logp = torch.full((1, 3), 0.1, dtype=torch.float64).log()
    logq = (logp + torch.tensor([2, 0.25, 1.0]).log()).requires_grad_()
    (term,) = parse("calls_block").sequence
    total = term.function(logp, logq, 2, torch.tensor([3]))
    assert total.item() == pytest.approx(1.5)
    total.backward()
    assert logq.grad[0].tolist() == pytest.approx([-0.5, -0.5, 0])  # both in one product
