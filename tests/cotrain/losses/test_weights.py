"""Weights of losses in an expression."""

import torch

from cotrain.losses.divergences import kl
from cotrain.losses.spec import parse


def test_a_single_loss_has_its_weight() -> None:
    logp, logq = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    for name in ("tv", "kl"):
        alone, weighted = (parse(text).position for text in (name, f"0.25*{name}"))
        assert alone is not None and weighted is not None
        torch.testing.assert_close(weighted(logp, logq), 0.25 * alone(logp, logq))
    both = parse("0.5*kl + 2*calls")
    assert both.position is not None and [term.weight for term in both.sequence] == [2.0]
    torch.testing.assert_close(both.position(logp, logq), 0.5 * kl(logp, logq))
