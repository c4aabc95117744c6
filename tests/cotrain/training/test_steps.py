"""Steps one after the other, and what they log; losses of texts beside distributions by depth, shares and cut
tokens."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain.acceptance import expected_calls_block
from cotrain.losses.batch import LossBatch
from cotrain.losses.guess import Guess
from cotrain.losses.spec import parse
from cotrain.teacher.target_distributions import FromStates
from cotrain.training import module as modules
from cotrain.training.distributed import counted, divisors
from cotrain.training.module import Stage
from tests.cotrain.losses.test_sequence import batch, calls
from tests.cotrain.training.test_module import alone, module_of
from tests.tiny import tiny

B, T, V, D = 3, 9, 7, 4


SAMPLED = torch.zeros(B, T - 1, dtype=torch.bool)


for row, (first, length) in enumerate(((1, 6), (3, 5), (0, 4))):
    SAMPLED[row, first : first + length] = True


def stepped(module: Any, at: int, *batches: dict[str, Any]) -> dict[str, float]:
    """What is found of the step that follows `at` steps, if it is watched."""
    module._trainer.global_step = at
    for one in batches:
        module.training_step(one, 0)
    return dict(module.step_figures)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_watched_step_is_logged_alone(accumulated: int) -> None:
    """Of the steps before it nothing is left, and nothing of it is shown at the steps behind."""

    def taught() -> Any:
        return alone(module_of(tiny(), tiny(layers=1, seed=3), [Stage(1.0, parse("kl+0.5*tv"))], 20), 20)

    module = taught()
    parts = [batch([0, 1]), batch([2, 3])][:accumulated]
    counts = torch.stack([counted(part) for part in parts]).sum(0)
    if accumulated > 1:
        parts = [part | {"counts": counts, "group": (i, accumulated)} for i, part in enumerate(parts)]
    figures = [stepped(module, at, *parts) for at in range(10)]
    assert [bool(one) for one in figures] == [at % 5 == 4 for at in range(10)]
    assert figures[4] == pytest.approx(figures[9])  # the weights stay: nothing adds up over steps
    assert figures[4]["loss"] == pytest.approx(figures[4]["loss_kl"] + figures[4]["loss_tv"])
    if accumulated == 1:
        part = parts[0]
        with torch.no_grad():
            p, q = (
                model(part["ids"]).logits.softmax(-1)[:, :-1][part["predicted"]]
                for model in (tiny(), tiny(layers=1, seed=3))
            )
        assert figures[4]["acceptance"] == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), rel=1e-5)
        best = p.gather(-1, q.argmax(-1, keepdim=True)).mean()
        assert figures[4]["acceptance_greedy_draft"] == pytest.approx(float(best), rel=1e-5)
    assert stepped(taught(), 4, *parts) == pytest.approx(figures[4])
    whole = stepped(taught(), 4, batch([0, 1, 2, 3][: 2 * accumulated]))
    assert figures[4]["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def test_counts_are_of_positions_and_tokens() -> None:
    sampled = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 0]]).bool()
    whole = {"predicted": torch.ones(3, 3, dtype=torch.bool), "sampled": sampled}
    assert counted(whole).tolist() == [9, 3]
    assert counted({"predicted": sampled}).tolist() == [3, 3]
    counts = divisors(torch.tensor([8.0, 0.0]), 2)
    assert (float(counts.positions), float(counts.tokens)) == (4.0, 1.0)


def test_judged_figures_are_by_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks, and where distributions differ, is of the regime, whichever temperature comes first."""
    module = alone(module_of(tiny(), tiny(layers=1, seed=3), [Stage(1.0, parse("kl"))], 4))
    module.temperature, module.held_out = 0.5, {0.0: "cold", 0.5: "own", 1.0: "warm"}  # type: ignore[dict-item]
    asked: list[tuple[Any, ...]] = []

    def scored(name: str) -> dict[str, Any]:
        tau, greedy = (lambda k, verify: (name, k, verify)), (lambda k: (name, k))
        return {"all": SimpleNamespace(tau=tau, tau_greedy=greedy, name=name)}

    monkeypatch.setattr(modules, "evaluate", lambda held, *_: scored(held))
    monkeypatch.setattr(modules, "figures", lambda scores: {"alpha/all": scores["all"].name})
    monkeypatch.setattr(modules, "divergence", lambda *given: asked.append(given) or "apart")
    monkeypatch.setattr(modules, "profile", lambda held, *_: held)
    module.judge()
    assert module.tau(3) == ("own", 3, "token") and module.tau(2, "sampled", "block") == ("own", 2, "block")
    assert module.tau(3, "greedy", "block") == ("own", 3)
    assert module.acceptance() == {"alpha_T0/all": "cold", "alpha_T0.5/all": "own", "alpha_T1/all": "warm"}
    assert module.profiles() == module.held_out and list(module.scores()) == [0.0, 0.5, 1.0]
    decode: Any = object()
    assert module.divergence(decode) == "apart" and asked[0][0] == "own" and asked[0][3] is decode


def asked(cut: bool = False) -> tuple[LossBatch, Tensor, nn.Linear, Tensor]:
    """A target's distributions, log p of each token that comes next, a draft's head and states of three depths."""
    torch.manual_seed(4)
    head_p, head_q = (nn.Linear(D, V, dtype=torch.float64) for _ in range(2))
    theirs, ours = torch.randn(B, T, D, dtype=torch.float64), torch.randn(3, B, T, D, dtype=torch.float64)
    ids = torch.randint(V, (B, T))
    truncate = (
        (lambda logits: logits.masked_fill(logits < logits.topk(4, -1).values[:, -1:], -math.inf)) if cut else None
    )
    question = LossBatch(FromStates(theirs, head_p), ids, torch.ones(B, dtype=torch.float64), SAMPLED, truncate, 512)
    logits = head_p(theirs).flatten(0, 1)
    logp = (truncate(logits) if truncate else logits).log_softmax(-1).view(B, T, V).detach()
    return question, logp.gather(-1, ids.roll(-1, 1).unsqueeze(-1))[..., 0], head_q, ours.requires_grad_()


def guessed(head: Callable[[Tensor], Tensor], states: Tensor, at: Tensor | None = None) -> list[Guess]:
    """Of three depths; the last at some places alone, which stand for all."""
    every = torch.arange(B * T)
    some = every if at is None else at
    share = len(some) / len(every)
    return [
        *(Guess(j, every, states[j].flatten(0, 1), head) for j in (0, 1)),
        Guess(2, some, states[2].flatten(0, 1)[some], head, share=share),
    ]


def chances(logp: Tensor, ids: Tensor, head: nn.Linear, states: Tensor) -> list[Tensor]:
    """Of each text (L, 3): acceptance of its tokens by depth, 1 where p gives them nothing."""
    x = ids.roll(-1, 1).unsqueeze(-1)
    logq = torch.stack([head(one).log_softmax(-1).gather(-1, x)[..., 0] for one in states], -1)
    never = (logp == -math.inf).unsqueeze(-1)
    apart = (logq - logp.masked_fill(logp == -math.inf, 0.0).unsqueeze(-1)).masked_fill(never, 0.0)
    r = apart.exp().clamp(max=1)
    return [r[row, :-1][SAMPLED[row]] for row in range(B)]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_calls_of_a_text_count_k_drafts_a_round(k: int, cut: bool) -> None:
    """With the weight of the loss in a sum, and tokens that a cut gives nothing."""
    one, logp, head, states = asked(cut)
    assert not cut or bool((logp[:, :-1][SAMPLED] == -math.inf).any())
    (term,) = parse("2*calls").sequence
    value = one.of_texts(term, one.logs(guessed(head, states)), k)
    truth = 2 * sum(calls(r, k) for r in chances(logp, one.ids, head, states))
    torch.testing.assert_close(value, truth)
    torch.testing.assert_close(torch.autograd.grad(value, states), torch.autograd.grad(truth, states))


def test_edges_of_a_cut_leave_block_calls_a_number() -> None:
    """A token that p gives nothing, before one that a draft of few tokens does not know."""
    one, logp, head, states = asked(cut=True)

    def pruned(given: Tensor) -> Tensor:
        return head(given).masked_fill(torch.arange(V) > 3, -math.inf)

    (term,) = parse("calls_block").sequence
    value = one.of_texts(term, one.logs(guessed(pruned, states)), 3)
    x = one.ids.roll(-1, 1).unsqueeze(-1)
    logq = torch.stack([pruned(part).log_softmax(-1).gather(-1, x)[..., 0] for part in states.detach()], -1)
    edge = (logp == -math.inf).unsqueeze(-1).expand_as(logq)
    assert bool((edge[:, :-1][SAMPLED] & (logq[:, :-1][SAMPLED] > -math.inf)).any())
    l = (logq - logp.masked_fill(logp == -math.inf, 0.0).unsqueeze(-1)).masked_fill(edge, 0.0)
    truth = sum(expected_calls_block(l[row, :-1][SAMPLED[row]][None], 3).sum() for row in range(B))
    torch.testing.assert_close(value.detach(), truth)
    assert torch.autograd.grad(value, states)[0].isfinite().all()


def test_positions_not_drawn_count_as_the_average_of_those_drawn() -> None:
    """Of the places that are asked for: a guess at others tells nothing of a text."""
    one, logp, head, states = asked()
    inside = torch.nn.functional.pad(SAMPLED & (SAMPLED.cumsum(1) > 2), (0, 1)).flatten()  # a round drafts there
    drawn = torch.arange(B * T) % 2 == 0
    with torch.no_grad():
        _, logq = one.logs(guessed(head, states, drawn.nonzero().squeeze(-1)))
    r = torch.stack([head(s).log_softmax(-1) for s in states]).detach()[2]
    x = one.ids.roll(-1, 1).unsqueeze(-1)
    ratio = (r.gather(-1, x)[..., 0] - logp).exp().clamp(max=1).flatten()
    average = float(ratio[drawn & inside].mean().log())
    for row in range(B):
        places = SAMPLED[row].nonzero().squeeze(-1)
        for column, place in list(enumerate(places.tolist()))[2:]:
            at = row * T + place
            exact = float(r.flatten(0, 1)[at, one.ids.roll(-1, 1).flatten()[at]])
            assert float(logq[row, column, 2]) == pytest.approx(exact if drawn[at] else average)
