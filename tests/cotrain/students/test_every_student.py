"""What every kind of student must do, whatever it reads: a new kind passes by standing in `student_kinds.STUDENTS`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cotrain.data.texts import Texts
from cotrain.evaluation.held_out import evaluate, held_out
from cotrain.losses.spec import parse
from cotrain.students.base import ANY, KINDS, UNTRAINED, Guess, Seen, refuse_mixed, student_class
from cotrain.teacher.target_model import served, split
from cotrain.training.module import Distillation
from cotrain.training.stages import Stage
from inference import Engine
from inference.policy import Fixed
from tests.student_kinds import SERVED, STUDENTS, VOCABULARY, target
from tests.watched import Watched

IDS = torch.randint(VOCABULARY, (3, 14), generator=torch.Generator().manual_seed(4))
EVERY = pytest.mark.parametrize("kind", STUDENTS)


def seen(kind: Any, ids: Tensor) -> Seen:
    model = target()
    with torch.no_grad():
        return Seen(dict(served(model, layers=kind.reads)[0](ids)))  # type: ignore[arg-type]


def distributions(guess: Guess) -> Tensor:
    return guess.head(guess.states).log_softmax(-1)


def guesses(kind: Any, ids: Tensor, states: Seen | None = None) -> list[Guess]:
    return list(kind.guesses({"ids": ids, "temperature": torch.ones(len(ids))}, states or seen(kind, ids)))


@EVERY
def test_places_and_depths_are_those_of_rounds(kind: str) -> None:
    found = guesses(STUDENTS[kind](target()), IDS)
    refuse_mixed(found)
    for guess in found:
        assert guess.at.dtype == torch.int64 and len(guess.at) == len(guess.states) == len(guess.at.unique())
        places = torch.zeros(IDS.numel(), dtype=torch.bool).index_fill(0, guess.at, True).view(IDS.shape)
        assert bool(places[:, max(guess.depth, 0) + 2 :].all())  # a round may start anywhere behind a prompt of two
        assert distributions(guess).shape == (len(guess.at), VOCABULARY)


@EVERY
def test_a_guess_reads_nothing_that_its_round_does_not_have(kind: str) -> None:
    """At place t and depth j: no token behind t, and of the target no state from the anchor's on, at place t - j."""
    student = STUDENTS[kind](target())
    states = seen(student, IDS)
    before = guesses(student, IDS, states)
    for cut in range(3, IDS.shape[1] - 1):
        ids, later = IDS.clone(), torch.arange(IDS.shape[1]) > cut
        ids[:, later] = (ids[:, later] + 7) % VOCABULARY
        for j, guess in enumerate(before):
            hidden = torch.arange(IDS.shape[1]) >= cut - max(guess.depth, 0)
            changed = {layer: one + 3.0 * hidden[:, None] for layer, one in states.states.items()}
            other = guesses(student, ids, Seen(changed))[j]
            here = guess.at % IDS.shape[1] <= cut if guess.depth == ANY else guess.at % IDS.shape[1] == cut
            torch.testing.assert_close(distributions(other)[here], distributions(guess)[here])
            if cut + max(guess.depth, 0) + 1 < IDS.shape[1]:  # what changes is seen where it may be
                assert not torch.allclose(distributions(other)[~here], distributions(guess)[~here])


@EVERY
@pytest.mark.parametrize("name", ["kl", "calls", "calls_tv", "0.5*tv+0.5*length"])
def test_every_loss_reaches_every_parameter(kind: str, name: str) -> None:
    student = STUDENTS[kind](target())
    module = Distillation(student, target(), [Stage(1.0, parse(name))], *([None] * 2), {})  # type: ignore[arg-type]
    module._trainer = SimpleNamespace(global_step=0, max_steps=1, world_size=1)  # type: ignore[assignment]
    predicted = torch.ones(3, 13, dtype=torch.bool)
    module.training_step({"ids": IDS, "predicted": predicted, "key": torch.arange(3), "temperature": torch.ones(3)}, 0)\
        .backward()  # fmt: skip
    slopes = {name: weight.grad for name, weight in student.network.named_parameters()}
    assert slopes and not [name for name, slope in slopes.items() if slope is None or not bool(slope.abs().sum() > 0)]


@EVERY
def test_what_is_saved_is_what_is_loaded(kind: str, tmp_path: Path) -> None:
    student = STUDENTS[kind](target())
    student.network.float()
    student.save(tmp_path)
    again = type(student).load(tmp_path, target().float())
    states = Seen({layer: one.float() for layer, one in seen(student, IDS).states.items()})
    ours = type(student)(student.network, target().float())
    for one, other in zip(guesses(ours, IDS, states), guesses(again, IDS, states), strict=True):
        assert one.depth == other.depth and torch.equal(one.at, other.at)
        assert torch.allclose(distributions(one), distributions(other), atol=1e-5)


@EVERY
def test_of_other_weights_is_the_same_student(kind: str) -> None:
    student, other = STUDENTS[kind](target()), STUDENTS[kind](target())
    with torch.no_grad():
        for weight in other.network.parameters():
            weight *= 1.5
    states = seen(student, IDS)
    for one, wanted in zip(guesses(student.of(other.network), IDS, states), guesses(other, IDS, states), strict=True):
        assert torch.equal(distributions(one), distributions(wanted))


@pytest.mark.parametrize("kind", SERVED)
def test_the_distribution_that_learns_is_the_distribution_that_is_served(kind: str) -> None:
    """At each drafted token of real rounds, the text with its drafts being read as a text to learn from."""
    model = target()
    student = STUDENTS[kind](model)
    watched = Watched(student.proposer())
    engine = Engine(model, watched, policy=Fixed(3), rows=3)
    engine.generate(IDS[:, :4].tolist(), max_new_tokens=12)
    checked = 0
    for found in watched.rounds:
        for b, text in enumerate(found.texts):
            whole = torch.tensor([text + found.x[b, : found.k[b]].tolist()])
            for guess in guesses(student, whole):
                for depth in range(found.k[b]) if guess.depth == ANY else [guess.depth] * (guess.depth < found.k[b]):
                    here = guess.at == len(text) - 1 + depth
                    wanted = distributions(guess)[here][0].exp()
                    torch.testing.assert_close(found.q[b, depth].double(), wanted, atol=1e-5, rtol=1e-4)
                    checked += 1
    assert checked > 20


def test_of_head_kinds_acceptance_has_a_depth() -> None:
    """r (N, L, K), alphas and tau against passes made by hand."""
    model = target()
    student = STUDENTS["heads"](model)
    texts = Texts(IDS, torch.tensor([3, 5, 2]), torch.tensor([14, 11, 13]), ["a", "b", "a"])
    found = evaluate(held_out(served(model)[0], texts, 1.0), student, split(model)[1])["all"]
    order, alphas = [0, 2, 1], torch.zeros(3, dtype=torch.float64)  # by domain
    with torch.no_grad():
        p = model(IDS).logits.log_softmax(-1)
        each = guesses(student, IDS)
    for row, b in enumerate(order):
        for column, t in enumerate(range(int(texts.prompt[b]), int(texts.length[b]))):
            for j, guess in enumerate(each):
                q = distributions(guess)[guess.at == b * 14 + t - 1]
                if not len(q):  # a round that would start in the prompt's first tokens
                    assert found.r[row, column, j] == 0
                    continue
                r = (q[0, IDS[b, t]] - p[b, t - 1, IDS[b, t]]).exp().clamp(max=1)
                torch.testing.assert_close(found.r[row, column, j].double(), r.detach(), atol=1e-6, rtol=1e-5)
                alphas[j] += torch.minimum(q[0], p[b, t - 1]).exp().sum().item()
    assert found.r.shape == (3, 13, 3) and found.alpha == pytest.approx(found.alphas[0])
    assert found.alphas == pytest.approx((alphas / 28).tolist(), abs=1e-6)
    assert found.tau(3) == found.tau(8) > found.tau(1) > 1 and found.calls(8).shape == (3,)


def test_what_is_no_kind_is_refused() -> None:
    assert student_class("independent").kind == "independent" and set(KINDS) - UNTRAINED <= set(STUDENTS)
    with pytest.raises(ValueError, match="draft.kind: 'medusae' is none of independent"):
        student_class("medusae")
    one = Guess.everywhere(torch.zeros(1, 2, 3), lambda states: states)
    for wrong in ([], [one, one], [Guess(1, one.at, one.states, one.head)]):
        with pytest.raises(ValueError, match="guesses of depths"):
            refuse_mixed(wrong)
