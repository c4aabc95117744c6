"""Guesses made at a share of their positions: averaged over the shares that might be drawn, their sums and slopes are
those of guesses at every position."""

import pytest
import torch
from torch import Tensor

from cotrain.losses.batch import LossBatch
from cotrain.losses.guess import Guess
from cotrain.losses.spec import parse

ROWS, LENGTH, VOCABULARY = 2, 6, 5


class Known:
    """A target whose log probabilities (B * T, V) are given."""

    trained = False

    def __init__(self) -> None:
        self.table = torch.randn(ROWS * LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(1)).double()

    def logs(self, at: Tensor, temperature: Tensor, truncate: object, pruned=None) -> Tensor:
        return self.table[at].log_softmax(-1)


def asked() -> LossBatch:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    return LossBatch(Known(), ids, torch.ones(ROWS), torch.ones(ROWS, LENGTH - 1, dtype=torch.bool), None, 512)


def guesses(states: Tensor, at: Tensor, share: float) -> list[Guess]:
    head = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3)).double()
    flat = states.flatten(0, 1)
    return [
        Guess.everywhere(states, lambda x: x @ head, depth=0),
        Guess(1, at, flat[at], lambda x: x @ head, (), share),
    ]


def slope(at: Tensor, share: float, name: str) -> Tensor:
    states = torch.randn(ROWS, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(4)).double().requires_grad_()
    made, one = guesses(states, at, share), asked()
    if name == "logs":  # linear in the log probabilities of the second depth, as a slope of a sequence loss is
        _, logq = one.logs(made)
        weight = torch.randn(logq.shape[:2], generator=torch.Generator().manual_seed(5)).double()
        value = (logq[..., 1] * weight).sum()
    else:
        weight = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(6)).double()
        value = one.of_positions(parse(name), made[1], weight, True)[0]
    value.backward()
    assert states.grad is not None
    return states.grad


@pytest.mark.parametrize("name", ["logs", "kl", "tv", "0.3*kl+0.7*tv"])
@pytest.mark.parametrize("parts", [2, 3])
def test_the_mean_over_shares_is_the_slope_of_all_positions(name: str, parts: int) -> None:
    every = torch.arange(ROWS * LENGTH)
    each = [slope(every[part::parts], 1 / parts, name) for part in range(parts)]
    wanted = slope(every, 1.0, name)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(torch.stack(each).mean(0), wanted)
