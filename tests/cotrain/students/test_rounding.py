"""Weights in 4 bits: how they are rounded, how they learn, and how rounding errors compensate one another."""

from typing import Any

import pytest
import torch
from torch import nn

from cotrain.students import rounding
from cotrain.students.early_exit import EarlyExitStudent
from cotrain.students.rounding import compensated, products
from inference.models.packing import GROUP, best_scales, in_groups
from inference.models.pretrained import decoder_layers
from inference.proposers.early_exit import FourBits, untrained_exit
from tests.tiny import tiny

TEXTS = [torch.randint(32, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 30, 1, 17, 40, 25)]


def test_a_weight_is_rounded_to_the_nearest_of_sixteen_numbers() -> None:
    """Of its group's scale; those outside become the last, and those that are represented stay."""
    one = FourBits(2, 2 * GROUP)
    scales = torch.tensor([[0.5, -2.0], [1.0, 0.25]])
    numbers = torch.randint(-8, 8, (2, 2, GROUP)).float()
    numbers[0, 0, :3] = torch.tensor([-9.4, 7.6, 3.4])
    one.begin((numbers * scales.unsqueeze(2)).flatten(1), scales)
    wanted = numbers.clone()
    wanted[0, 0, :3] = torch.tensor([-8.0, 7.0, 3.0])
    torch.testing.assert_close(one.rounded(), (wanted * scales.unsqueeze(2)).flatten(1))


def test_gradients_pass_the_rounding_inside_its_range_alone() -> None:
    """Those of the numbers are the scale; that of a gain is the sum over its group of the rounded weights."""
    one = FourBits(1, GROUP)
    numbers = torch.linspace(-9, 8, GROUP).unsqueeze(0)
    one.begin(3 * numbers, torch.tensor([[3.0]]))
    assert one.numbers.min() == -8 and one.numbers.max() == 7  # so that all can learn
    one.numbers.data.copy_(numbers)
    one.rounded().sum().backward()  # type: ignore[no-untyped-call]
    numbers_grad, gain_grad = (weight.grad for weight in (one.numbers, one.gain))
    assert numbers_grad is not None and gain_grad is not None
    whole = numbers.round()
    assert torch.equal(numbers_grad, 3.0 * ((whole >= -8) & (whole <= 7)))
    torch.testing.assert_close(gain_grad, one.rounded().sum().view(1, 1).detach())


def test_scales_have_less_error_than_that_of_the_largest_number() -> None:
    """And none for a group that 4 bits represent, of whichever sign, or for zeros."""
    torch.manual_seed(0)
    groups = torch.randn(50, 3, GROUP)
    numbers = torch.randint(-7, 8, (50, 3, GROUP)).float()
    numbers[..., 5] = -8

    def errors(of: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        scale = scale.unsqueeze(-1)
        return ((of / scale).round().clamp(-8, 7) * scale - of).square().sum(-1)

    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1) / -8
    found = errors(groups, best_scales(groups))
    assert (found <= errors(groups, largest.bfloat16().float()) + 1e-6).all() and found.mean() < 0.9 * errors(
        groups, largest
    ).mean()
    for sign in (0.5, -0.5):
        assert not errors(sign * numbers, best_scales(sign * numbers)).any()
    assert best_scales(torch.zeros(1, 1, GROUP)).isfinite().all()


def test_products_are_those_of_the_inputs() -> None:
    """Of each module over all texts; of two that read one tensor, the same."""
    torch.manual_seed(0)
    target = tiny(hidden=32)
    layer = decoder_layers(target)[1]
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    modules = {name: layer.get_submodule(name) for name in names}
    seen = {name: list[torch.Tensor]() for name in names}
    hooks = [
        module.register_forward_hook(lambda _, args, __, name=name: seen[name].append(args[0][0]))
        for name, module in modules.items()
    ]
    sums = products(target, modules, TEXTS)
    for hook in hooks:
        hook.remove()
    for name, inputs in seen.items():
        x = torch.cat(inputs).float()
        torch.testing.assert_close(sums[name], x.T @ x, rtol=1e-4, atol=1e-4)
    assert sums["self_attn.q_proj"] is sums["self_attn.k_proj"]
    assert not any(module._forward_pre_hooks for module in modules.values())


@pytest.mark.parametrize("inputs", [16, 64, 160])
def test_errors_of_correlated_inputs_compensate_one_another(inputs: int) -> None:
    """Outputs are nearer to the weight's than those of the nearest numbers, by far if few directions have mass; what is
    rounded is what is returned."""
    torch.manual_seed(0)
    weight, x = (
        torch.randn(20, inputs),
        torch.randn(500, inputs // 8) @ torch.randn(inputs // 8, inputs) + 0.1 * torch.randn(500, inputs),
    )

    def error(numbers: torch.Tensor, scales: torch.Tensor) -> float:
        one = FourBits(20, inputs)
        one.begin(numbers, scales)
        return float((x @ (one.rounded().detach() - weight).T).square().mean())

    scales = best_scales(in_groups(weight))
    assert error(compensated(weight, scales, x.T @ x), scales) < 0.35 * error(weight, scales)
    dead = x.clone()
    dead[:, 3] = 0  # an input that is always 0 hinders nothing
    assert compensated(weight, scales, dead.T @ dead).isfinite().all()
    assert compensated(weight, scales, 0 * dead.T @ dead).isfinite().all()


@pytest.mark.parametrize("shared", [1, 2**31])
def test_an_exit_is_rounded_for_the_texts_it_reads(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass over them or in several, and nearer to the target than with the nearest numbers."""
    monkeypatch.setattr(rounding, "SHARED", shared)
    target = tiny(hidden=32, layers=3)
    network = untrained_exit(target, 2, 0, 1, 4).double()
    student = EarlyExitStudent(network, target)

    before = [one.numbers.clone() for layer in network.layers for one in layer.values()]  # type: ignore[operator,union-attr]
    nearest = _outputs_apart(network, target)
    student.fit(iter(TEXTS))
    assert _outputs_apart(network, target) < 0.8 * nearest
    after = [one.numbers for layer in network.layers for one in layer.values()]  # type: ignore[operator,union-attr]
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def _outputs_apart(network: Any, target: Any) -> float:
    """The mean squared change of the first layer's query, key and value projections on the texts, over the target's."""
    layer, changes = decoder_layers(target)[0], network.layers[0]
    total = 0.0
    for name in ("q_proj", "k_proj", "v_proj"):
        module = getattr(layer.self_attn, name)
        assert isinstance(module, nn.Linear)
        squares = products(target, {0: module}, TEXTS)[0].double()
        error = changes[f"self_attn/{name}"].rounded().detach().double() - module.weight.detach()
        total += float((error @ squares * error).sum())
    return total
