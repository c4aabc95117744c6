"""Losses of whole texts in training steps, of one batch and of several, against a recursion by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from cotrain.data.texts import Learnt, Texts, joined_texts
from cotrain.losses import divergences as losses
from cotrain.losses.spec import LossSpec, parse
from cotrain.training.distributed import Grouped
from cotrain.training.module import Distillation, Stage
from tests.cotrain.training.test_module import alone, module_of
from tests.tiny import tiny

PROMPTS, LENGTHS = (
    [2, 7, 4, 1],
    [12, 9, 13, 6],
)  # completions of 10, 2, 9 and 5 tokens, which start at different columns
K = 4  # of `module_of`


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny()


def conversations() -> Texts:
    ids = torch.randint(32, (4, max(LENGTHS)), generator=torch.Generator().manual_seed(2))
    return Texts(ids, torch.tensor(PROMPTS), torch.tensor(LENGTHS), ["a"] * 4)


def batch(rows: list[int], prompts: bool = False) -> dict[str, Any]:
    part = Learnt(joined_texts([conversations().at(1.0, whole=prompts)]))
    items = [part[row] for row in rows]
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def learnt(module: Distillation, *batches: dict[str, Any]) -> tuple[float, Tensor]:
    """The mean of the losses and of the gradients, as a trainer accumulates them."""
    module.draft.zero_grad()
    values = [module.training_step(one, 0) / len(batches) for one in batches]
    for loss in values:
        loss.backward()
    slopes = [p.grad.flatten() for p in module.draft.parameters() if p.grad is not None]
    return sum(loss.item() for loss in values), torch.cat(slopes).clone()


def distributions(model: LlamaForCausalLM, row: int) -> Tensor:
    """log distribution of each token of a completion, of its text alone -> (tokens, V)."""
    ids = conversations().ids[row : row + 1, : LENGTHS[row]]
    return model(ids).logits[0, PROMPTS[row] - 1 : -1].log_softmax(-1)


def ratios(target: LlamaForCausalLM, small: LlamaForCausalLM, row: int) -> Tensor:
    x = conversations().ids[row, PROMPTS[row] : LENGTHS[row], None]
    logp, logq = (distributions(model, row).gather(1, x)[:, 0] for model in (target, small))
    return (logq - logp.detach()).exp().clamp(max=1)


def calls(r: Tensor, k: int = K) -> Tensor:
    """Expected target calls, backwards: a round at t that accepts n drafts is followed by one at t + n + 1. r: of each
    token, or of each token and depth."""
    r = r.unsqueeze(1).expand(-1, k) if r.ndim == 1 else r
    expected = [r.new_zeros(())] * (len(r) + k + 2)
    for t in reversed(range(len(r))):
        total, reached = r.new_ones(()), r.new_ones(())
        for n in range(k + 1):
            passes = r[t + n, n] if n < min(k, r.shape[1]) and t + n < len(r) else r.new_zeros(())
            total = total + reached * (1 - passes) * expected[t + n + 1]
            reached = reached * passes
        expected[t] = total
    return expected[0]


def slopes(value: Tensor, small: LlamaForCausalLM) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(small.parameters()))])


@pytest.mark.parametrize("prompts", [False, True])
def test_calls_are_those_of_the_completion_alone(target: LlamaForCausalLM, prompts: bool) -> None:
    small = tiny(layers=1, seed=3)
    value, slope = learnt(
        alone(module_of(target, small, [Stage(1.0, parse("calls"))], 1)), batch([0, 1, 2, 3], prompts)
    )
    tokens = sum(end - start for start, end in zip(PROMPTS, LENGTHS, strict=True))
    expected = sum(calls(ratios(target, small, row)) for row in range(4)) / tokens
    assert value == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(slope, slopes(expected, small), rtol=0, atol=1e-6)


def test_positions_are_weighted_by_saved_calls(target: LlamaForCausalLM) -> None:
    small, expected = tiny(layers=1, seed=3), []
    value, slope = learnt(
        alone(module_of(target, small, [Stage(1.0, parse("calls_tv"))], 1)), batch([0, 1, 2, 3], True)
    )
    for row in range(4):
        r = ratios(target, small, row).detach().requires_grad_()
        (saved,) = torch.autograd.grad(-calls(r), r)
        logp, logq = distributions(target, row).detach(), distributions(small, row)
        expected.append((saved * losses.tv(logp, logq)).sum())
    mean = torch.stack(expected).sum() / 26
    assert value == pytest.approx(mean.item(), abs=1e-6)
    torch.testing.assert_close(slope, slopes(mean, small), rtol=0, atol=1e-6)


def test_texts_of_one_token_save_no_calls(target: LlamaForCausalLM) -> None:
    """Each takes one call whatever is drafted, so the loss is exactly 0."""
    one = batch([0, 1])
    one["sampled"] = one["predicted"] = torch.arange(12) == torch.tensor([[1], [6]])
    value, slope = learnt(alone(module_of(target, tiny(layers=1, seed=3), [Stage(1.0, parse("calls_tv"))], 1)), one)
    assert value == 0 and bool((slope == 0).all())


@pytest.mark.parametrize("name", ["kl", "0.5*calls_block+kl", "calls_tv"])
def test_two_ragged_batches_are_the_large_one(target: LlamaForCausalLM, name: str) -> None:
    module = alone(module_of(target, tiny(layers=1, seed=3), [Stage(1.0, parse(name))], 1))
    whole = learnt(module, batch([0, 1, 2, 3]))
    halves = list(Grouped([batch([0, 2]), batch([1, 3])], 2))
    value, slope = learnt(module, *halves)
    assert value == pytest.approx(whole[0], abs=1e-6)
    torch.testing.assert_close(slope, whole[1], rtol=0, atol=1e-7)
    apart = learnt(module, batch([0, 2]), batch([1, 3]))[1]  # means of means
    assert (apart - whole[1]).norm() > 0.05 * whole[1].norm()


def test_a_nan_loss_raises_with_its_step_and_texts(target: LlamaForCausalLM) -> None:
    module = alone(module_of(target, tiny(layers=1, seed=3), [Stage(1.0, LossSpec(broken))], 9), steps=9, at=6)
    with pytest.raises(ValueError, match="the loss of step 7 is nan, on texts 1, 3$"):
        module.training_step(batch([1, 3]), 0)


def broken(logp: Tensor, logq: Tensor) -> Tensor:
    return losses.kl(logp, logq) * math.nan
