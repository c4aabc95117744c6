"""Losses over guesses of several depths: equal depths cost the same as one guess, others match a computation by
hand."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from cotrain.losses import divergences as losses
from cotrain.losses.batch import DECAY, shares
from cotrain.students.base import Guess, Seen
from cotrain.students.independent import IndependentStudent
from cotrain.training.module import Distillation
from tests.cotrain.losses.test_sequence import LENGTHS, PROMPTS, K, batch, calls, conversations, learnt
from tests.cotrain.students.test_every_student import teaching
from tests.cotrain.training.test_module import alone
from tests.student_kinds import STUDENTS
from tests.tiny import tiny

CONVERSATIONS = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny()


class Copied(IndependentStudent):
    """An independent draft with one guess a depth, all of the same distribution."""

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        (one,) = super().guesses(batch, seen)
        return [Guess(depth, one.at, one.states, one.head, one.parameters) for depth in range(K)]


def module(student: Any, target: LlamaForCausalLM, name: str, **settings: Any) -> Distillation:
    return teaching(student, name, target, k=K, **settings)


@pytest.mark.parametrize(("name", "chunk"), [("calls", 512), ("calls_block", 5), ("calls_tv", 512)])
def test_equal_depths_cost_the_same_as_one_guess(target: LlamaForCausalLM, name: str, chunk: int) -> None:
    results = []
    for kind in (IndependentStudent, Copied):
        small = tiny(layers=1, seed=3)
        results.append(learnt(module(kind(small), target, name, chunk=chunk), batch(CONVERSATIONS, True)))
    (value, slope), (expected, other) = results
    assert value == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(slope, other, atol=1e-6, rtol=1e-5)


def ratios(student: Any, target: LlamaForCausalLM, row: int) -> Tensor:
    """(tokens, depths): min(1, q / p) of each token of a completion, of its text alone."""
    first, ids = PROMPTS[row], conversations().ids[row : row + 1, : LENGTHS[row]]
    states = target(ids, output_hidden_states=True)
    x, logp = ids[0, first:], states.logits[0, first - 1 : -1].log_softmax(-1)
    by_depth = []
    for guess in student.guesses({"ids": ids}, Seen({-1: states.hidden_states[-1].detach()})):
        grid = torch.full((ids.shape[1], 32), -torch.inf).double()
        grid[guess.at] = guess.head(guess.states).log_softmax(-1)
        by_depth.append((grid[first - 1 : -1].gather(1, x[:, None]) - logp.gather(1, x[:, None]).detach())[:, 0])
    return torch.stack(by_depth, 1).exp().clamp(max=1)


def test_calls_by_depth_match_a_recursion_by_hand(target: LlamaForCausalLM) -> None:
    student = STUDENTS["heads"](target)
    value, slope = learnt(module(student, target, "calls"), batch(CONVERSATIONS))
    expected = sum(calls(ratios(student, target, row)) for row in range(4)) / 26
    assert value == pytest.approx(expected.item(), abs=1e-6)
    by_hand = torch.autograd.grad(expected, list(student.network.parameters()))
    torch.testing.assert_close(slope, torch.cat([one.flatten() for one in by_hand]), atol=1e-6, rtol=1e-5)


def test_depths_are_weighted_by_saved_calls(target: LlamaForCausalLM) -> None:
    """Exact weights by finite differences of all acceptances of a depth, or weights by decay; both sum to 1."""
    student = STUDENTS["heads"](target)
    with torch.no_grad():
        each = [ratios(student, target, row) for row in range(4)]
    saved = []
    for depth in range(3):
        more = [one.clone() for one in each]
        for one in more:
            one[:, depth] += 1e-6
        saved.append(float(sum(calls(one) for one in each) - sum(calls(one) for one in more)) / 1e-6)
    exact = torch.tensor(saved) / sum(saved)
    losses_of = {}
    for decay in (None, 0.5):
        distillation = module(student, target, "kl", decay=decay)
        losses_of[decay] = learnt(distillation, batch(CONVERSATIONS, True))[0]
    one = batch(CONVERSATIONS, True)
    alone_at = [_kl(student, target, one, depth) for depth in range(3)]
    assert losses_of[None] == pytest.approx(float((exact * torch.tensor(alone_at)).sum()), rel=1e-4)
    plain = torch.tensor([1, 0.5, 0.25]) / 1.75
    assert losses_of[0.5] == pytest.approx(float((plain * torch.tensor(alone_at)).sum()), rel=1e-5)
    assert abs(losses_of[None] - losses_of[0.5]) > 1e-3


def _kl(student: Any, target: LlamaForCausalLM, one: dict[str, Any], depth: int) -> float:
    """Forward KL summed over a depth's guesses of rounds that start at a predicted token, divided by all predicted
    positions."""
    with torch.no_grad():
        states = target(one["ids"], output_hidden_states=True)
        guess = student.guesses(one, Seen({-1: states.hidden_states[-1]}))[depth]
        every = torch.nn.functional.pad(one["predicted"], (0, 1))
        inside = (every & (every.roll(depth, 1)) & (torch.arange(every.shape[1]) >= depth)).flatten()[guess.at]
        logp = states.logits.log_softmax(-1).flatten(0, 1)[guess.at]
        values = losses.kl(logp, guess.head(guess.states).log_softmax(-1))
    return float(values[inside].sum() / one["predicted"].sum())


def test_weights_without_texts_of_the_target_decay() -> None:
    three = [Guess(depth, torch.arange(2), torch.zeros(2, 3), lambda states: states) for depth in range(3)]
    plain = torch.tensor([1, DECAY, DECAY**2]) / (1 + DECAY + DECAY**2)
    for saved in (None, torch.zeros(3), torch.tensor([-1.0, 0.0, 0.0])):
        torch.testing.assert_close(shares(three, None, saved), plain)
    torch.testing.assert_close(shares(three, None, torch.tensor([3.0, 1.0, -1.0])), torch.tensor([0.75, 0.25, 0.0]))
    torch.testing.assert_close(shares(three, 1.0, torch.tensor([3.0, 1.0, 0.0])), torch.full((3,), 1 / 3))
    torch.testing.assert_close(shares(three, 0.0, torch.tensor([1.0, 1.0, 0.0])), torch.tensor([1.0, 0.0, 0.0]))


def test_parts_of_a_sum_are_logged_by_name_and_add_up_over_depths(target: LlamaForCausalLM) -> None:
    distillation = alone(module(STUDENTS["heads"](target), target, "0.1*kl+1.8*tv+0.5*calls"), 100, at=24)
    value, _ = learnt(distillation, batch(CONVERSATIONS))
    parts = {name: one for name, one in distillation.step_figures.items() if name.startswith("loss_")}
    assert set(parts) == {"loss_kl", "loss_tv", "loss_calls"}
    assert sum(parts.values()) == pytest.approx(value) == pytest.approx(distillation.step_figures["loss"])
    assert {"acceptance", "acceptance_depth_2", "acceptance_depth_3"} <= set(distillation.step_figures)
