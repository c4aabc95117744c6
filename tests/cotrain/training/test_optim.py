"""Optimisers move what they should, and the schedule is a function of progress."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from cotrain.training import optim
from cotrain.training.optim import trapezoid
from cotrain.training.progress import Progress
from tests.folders import VOCABULARY, network
from tests.student_kinds import STUDENTS, target


def stepped(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(ids, labels=ids).loss.backward()
    optimizer.step()


def test_muon_moves_every_parameter_and_resumes_exactly() -> None:
    def fresh() -> tuple[LlamaForCausalLM, optim.MuonAdamW]:
        model = network()
        return model, optim.MuonAdamW(model, lr=1e-2, embedding_lr=1e-3, weight_decay=0.1)

    model, optimizer = fresh()
    before = copy.deepcopy(model.state_dict())
    stepped(model, optimizer, 0)
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    again, resumed = fresh()
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(model, optimizer, 1)
    stepped(again, resumed, 1)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_muon_takes_the_matrices_of_the_layers_and_one_schedule_drives_both() -> None:
    model = network()
    optimizer = optim.MuonAdamW(model, lr=1e-2, embedding_lr=1e-3, weight_decay=0.1)
    muon, rest = (group["params"] for group in optimizer.param_groups)
    assert len(muon) == 2 * 7 and {p.ndim for p in muon} == {2}
    assert any(p is model.model.embed_tokens.weight for p in rest) and len(rest) == 2 * 2 + 2
    schedule = trapezoid(optimizer, Progress(10), warmup=0.2, decay=0.4)
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 5e-4]
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.parts[0].param_groups + optimizer.parts[1].param_groups] == [1e-2, 1e-3]


@pytest.mark.parametrize("kind", STUDENTS)
def test_muon_learns_the_matrices_of_every_kind_and_no_head(kind: str) -> None:
    draft = STUDENTS[kind](target()).network
    optimizer = optim.MuonAdamW(draft, lr=1e-2, weight_decay=0.1)
    named = {id(parameter): name for name, parameter in draft.named_parameters()}
    groups = {type(part).__name__: part.param_groups[0]["params"] for part in optimizer.parts}
    assert sum(len(group) for group in groups.values()) == sum(p.requires_grad for p in draft.parameters())
    assert not [named[id(p)] for p in groups.get("Muon", []) if p.ndim != 2 or "head" in named[id(p)]]


def test_adamw_decays_matrices_only() -> None:
    groups = optim.adamw(network(), 1e-3, 0.1, [0.9, 0.95]).param_groups
    assert [(group["weight_decay"], {p.ndim for p in group["params"]}) for group in groups] == [(0.1, {2}), (0.0, {1})]


def test_the_trapezoid_rises_stays_and_falls_to_zero() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule, rates = trapezoid(optimizer, Progress(10), warmup=0.4, decay=0.3), []
    for _ in range(11):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0])


def rates(steps: int, warmup: float, decay: float, seconds: float = 0.0) -> list[float]:
    """Of every step, each of which takes so many seconds of a budget of a minute."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    progress = Progress(steps, 1.0 if seconds else None)
    schedule, factors = trapezoid(optimizer, progress, warmup, decay), []
    for _ in range(steps):
        factors.append(schedule.get_last_lr()[0])
        optimizer.step()
        progress.elapsed += seconds
        schedule.step()
    return factors


def test_warm_up_and_decay_are_fractions_of_any_length() -> None:
    for steps in (10, 200, 2300):
        assert max(rates(steps, 0.02, 0.5)) == 1
    assert rates(4, 0.0, 0.0) == [1, 1, 1, 1]


def test_a_budget_of_time_ends_the_schedule_with_it() -> None:
    factors = rates(1000, 0.0, 0.5, seconds=6.0)  # ten steps a minute
    assert factors[:11] == pytest.approx([1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0]) and not any(factors[11:])
    assert rates(4, 0.0, 0.5, seconds=6.0) == pytest.approx([1, 1, 1, 0.5])  # steps are the nearer end
