"""Loss expressions: the sums that they stand for, and those that raise."""

import pytest
import torch

from cotrain import acceptance, losses
from cotrain.losses import spec
from cotrain.losses.spec import parse


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return draw[0].log_softmax(-1), draw[1].log_softmax(-1)


def test_a_name_is_the_loss_and_a_sum_is_weighted() -> None:
    logp, logq = distributions()
    x = torch.tensor([1, 0, 4])
    assert parse("nla").position is losses.nla and parse("nla").takes == ""
    parsed = parse(" 0.1*kl + 0.9 * tv")
    assert parsed.position is not None
    torch.testing.assert_close(
        parsed.position(logp, logq), 0.1 * losses.kl(logp, logq) + 0.9 * losses.tv(logp, logq), atol=1e-12, rtol=0
    )
    mixed = parse("kl+2*mix")
    assert mixed.position is not None and mixed.takes == "text" and parse("tvpp").takes == "drawn"
    torch.testing.assert_close(
        mixed.position(logp, logq, x), losses.kl(logp, logq) + 2 * losses.mix(logp, logq, x), atol=1e-12, rtol=0
    )


def test_a_named_sum_is_written_out() -> None:
    """mix is .1 ce + 1.8 tv, which is DSpark's .1 (-log q(x)) + .9 sum |p - q|; a name that comes twice is one term."""
    (logp, logq), x = distributions(), torch.tensor([1, 0, 4])
    parsed = parse("ce+0.5*mix")
    assert [(term.name, term.weight) for term in parsed.terms] == [("ce", pytest.approx(1.05)), ("tv", 0.9)]
    assert parsed.takes == "text" and parsed.merged and parsed.position is not None
    text = -logq.gather(-1, x[:, None])[:, 0]
    expected = 1.05 * text + 0.45 * (logp.exp() - logq.exp()).abs().sum(-1)
    torch.testing.assert_close(parsed.position(logp, logq, x), expected, atol=1e-12, rtol=0)


def test_a_loss_is_one_function_and_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def surprise(logp: torch.Tensor, logq: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return -losses.ce(logp, logq, x)

    monkeypatch.setitem(spec.LOSSES, "surprise", spec.LossDefinition(surprise, takes="text"))
    parsed = parse("2*surprise+kl")
    (logp, logq), x = distributions(), torch.tensor([1, 0, 4])
    assert parsed.takes == "text" and not parsed.merged and parsed.position is not None
    torch.testing.assert_close(
        parsed.position(logp, logq, x), losses.kl(logp, logq) - 2 * losses.ce(logp, logq, x), atol=1e-12, rtol=0
    )


def test_sequence_losses_are_those_of_acceptance() -> None:
    logp, logq = -torch.rand(2, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lengths = torch.tensor([6, 4])
    r, l = acceptance.r_from(logp, logq), acceptance.l_from(logp, logq)
    expected = {
        "length": acceptance.length(r, 3, lengths).mean(),
        "length_block": acceptance.length_block(l, 3, lengths).mean(),
        "calls": 1 / acceptance.tau(r, 3, lengths),
        "calls_block": 1 / acceptance.tau_block(l, 3, lengths),
    }
    for name, value in expected.items():
        parsed = parse(f"0.5*{name}+kl")
        (term,) = parsed.sequence
        assert term.weight == 0.5 and parsed.position is losses.kl and not parsed.weighted
        count = {"texts": len(lengths), "tokens": lengths.sum()}[term.loss.over]
        torch.testing.assert_close(term.loss.function(logp, logq, 3, lengths) / count, value)
    assert parse("calls").position is None and parse("calls_tv").weighted and parse("calls_tv").position is losses.tv


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("klx", "'klx' is none of kl, tv"),
        ("kl + ", "'' is none of"),
        ("a*kl", "'a' in 'a\\*kl' is no number"),
        ("mix+tvpp", "at once"),
        ("calls_tv+kl", "stands alone"),
    ],
)
def test_other_expressions_raise(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"loss: .*{message}"):
        parse(expression)


def test_calls_under_block_verification_by_hand() -> None:
    """q is twice p, then a quarter of it: a round accepts both drafts with probability 1/2, under the token rule with
    1/4; the third token then costs a call of its own."""
    logp = torch.full((1, 3), 0.1, dtype=torch.float64).log()
    logq = (logp + torch.tensor([2, 0.25, 1.0]).log()).requires_grad_()
    (term,) = parse("calls_block").sequence
    total = term.loss.function(logp, logq, 2, torch.tensor([3]))
    assert total.item() == pytest.approx(1.5) and term.loss.over == "tokens"
    total.backward()
    assert logq.grad is not None and logq.grad[0].tolist() == pytest.approx([-0.5, -0.5, 0])  # both in one product
