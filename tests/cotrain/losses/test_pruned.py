"""Losses of a draft with a pruned vocabulary, over its own columns and one for all other tokens, against the same
losses over all columns; and distributions of the target that are computed once for all guesses."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain.losses import chunked
from cotrain.losses.guess import Guess, Pruned
from cotrain.losses.names import LOSSES
from cotrain.losses.spec import parse
from cotrain.teacher.target_distributions import FromStates, Masses, Remembered, remembered
from inference.models.small_heads import spread_logits
from inference.sampling import keep_top_k, keep_top_p
from tests import standin

B, T, D, V = 3, 6, 4, 11
IDS = torch.tensor([0, 2, 3, 7, 10])
F64 = torch.float64
CUTS = {
    "plain": None,
    "top_k": partial(keep_top_k, k=4),
    "top_k, many": partial(keep_top_k, k=8),
    "top_p": partial(keep_top_p, p=0.8),
}
TEMPERATURES = {"1": 1.0, "0": 0.0, "of texts": torch.tensor([1.0, 0.0, 0.6]), "of tokens": torch.rand(B, T)}
NAMES = [name for name, loss in LOSSES.items() if not loss.sequence and name != "greedy"]


def given() -> tuple[FromStates, Guess, Tensor, Tensor]:
    """The target, a pruned guess at some positions, weights of positions (B, T), and tokens (B, T)."""
    torch.manual_seed(5)
    head_p, head_q = nn.Linear(D, V, dtype=F64), nn.Linear(D, len(IDS), dtype=F64)
    theirs, at = 2 * torch.randn(B, T, D, dtype=F64), torch.randperm(B * T)[:13]
    states = (2 * torch.randn(13, D, dtype=F64)).requires_grad_()
    guess = Guess(
        0,
        at,
        states,
        lambda one: spread_logits(head_q(one), IDS, V),
        tuple(head_q.parameters()),
        pruned=Pruned(IDS, head_q, V),
    )
    weights = torch.rand(B, T, dtype=F64) * (torch.rand(B, T) < 0.8)
    return FromStates(theirs, head_p), guess, weights, torch.randint(V, (B, T))


def slopes(value: Tensor, guess: Guess) -> Any:
    return torch.autograd.grad(value, [guess.states, *guess.parameters])


# every cut meets every temperature, and every loss each of both
BOTH = [*product(CUTS, TEMPERATURES)]
EVERY = [(name, *BOTH[(5 * place + i) % 16]) for i, name in enumerate(NAMES) for place in range(4)]


@pytest.mark.parametrize(("name", "cut", "temperature"), [*EVERY, ("tv", "top_k, many", "1")])
def test_gradients_and_acceptance_are_those_over_all_columns(name: str, cut: str, temperature: str) -> None:
    target, guess, weights, _ = given()
    asked: Any = (weights, TEMPERATURES[temperature])
    found = []
    for chunk, one in ((4, guess), (100, guess.whole())):
        value, statistics = chunked.chunked(parse(name).position, target, one, *asked, chunk=chunk, truncate=CUTS[cut])
        found.append((value, slopes(value, guess), statistics))
    (narrow, ours, seen), (whole, theirs, every) = found
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        (seen.alpha, seen.alpha_greedy, seen.alphas), (every.alpha, every.alpha_greedy, every.alphas)
    )
    if name not in ("kl", "lk"):  # at q = 0 these have a term of p alone
        torch.testing.assert_close(narrow, whole)


SOME = [("plain", "1"), ("top_k", "0"), ("top_k, many", "of texts"), ("top_p", "of tokens"), ("top_p", "of texts")]


@pytest.mark.parametrize(("cut", "temperature"), SOME)
def test_logs_of_tokens(cut: str, temperature: str) -> None:
    """Of a token in the vocabulary as over all columns; of any other, q is 0 and p that of all other tokens."""
    target, guess, weights, x = given()
    mask, asked = weights > 0, {"temperature": TEMPERATURES[temperature], "truncate": CUTS[cut], "chunk": 4}
    (logp, logq), (p, q) = (chunked.token_logs(target, one, x, mask, **asked) for one in (guess, guess.whole()))  # type: ignore[arg-type]
    known, guessed = torch.isin(x, IDS), torch.zeros(B * T).index_fill(0, guess.at, 1).view(B, T).bool() & mask
    torch.testing.assert_close(logq, q)
    torch.testing.assert_close(logp[known | ~guessed], p[known | ~guessed])
    assert bool((logp >= p - 1e-9)[guessed].all()) and bool((logq == -torch.inf)[guessed & ~known].all())


@pytest.mark.parametrize(("cut", "temperature"), [one for one in SOME if one[1] != "of tokens"])
def test_comparisons_are_those_over_all_columns(cut: str, temperature: str) -> None:
    """All figures but kl, and but log p of a token outside the vocabulary."""
    target, guess, weights, x = given()
    asked: Any = (x, weights > 0, TEMPERATURES[temperature])
    ours, theirs = (
        chunked.compared(target, one, *asked, chunk=4, truncate=CUTS[cut]) for one in (guess, guess.whole())
    )
    known = torch.isin(x.flatten()[ours.at], IDS)
    assert bool(known.any()) and bool((~known).any())
    for name, one, other in zip(ours._fields, ours, theirs, strict=True):
        if name == "logp":
            one, other = one[known], other[known]
        if name != "kl":
            torch.testing.assert_close(one, other, msg=name)


def test_what_is_computed_once_is_what_each_guess_would_compute() -> None:
    """For guesses at some positions each, pruned and whole, of texts and tokens at their own temperatures."""
    target, guess, weights, _ = given()
    mask = weights > 0
    for one in (guess, guess.whole()):
        parts = [
            Guess(j, at, one.states[: len(at)], one.head, pruned=one.pruned) for j, at in enumerate(one.at.split(5))
        ]
        for temperature in map(torch.as_tensor, (torch.rand(B), torch.rand(B, T))):
            once = remembered(target, parts, mask, temperature, keep, 3)
            assert isinstance(once, Remembered)
            each = chunked.over_positions(temperature, mask.shape, target.states)
            for part in parts:
                at = part.at[mask.flatten()[part.at]]
                args: Any = (at, each[at], keep, part.pruned)
                torch.testing.assert_close(once.logs(*args), target.logs(*args))
    wanted = torch.zeros(B * T).index_fill(0, guess.at, 1).bool() & mask.flatten()
    assert len(once.values) == int(wanted.sum()), "other positions are not computed"  # type: ignore[union-attr]


def test_the_masses_of_a_text_are_computed_once() -> None:
    """For texts of other batches too, at whatever positions guesses are. A cut target, or a text at temperature 0, has
    none: p is then no softmax of the draft's columns."""
    target, guess, weights, _ = given()
    mask, keys, each = weights > 0, [4, 9, 2], torch.tensor([1.0, 0.6, 1.7])
    head: Any = target.head

    def part(ids: Tensor) -> Any:
        return lambda states: states @ head.weight[ids].T + head.bias[ids]

    masses, read = Masses(part), []
    for t, cut in ((torch.tensor([1.0, 0.0, 1.0]), None), (each, keep)):
        remembered(target, [guess], mask, t, cut, 3, masses, keys)
        assert not masses.texts
    counted = FromStates(target.states, lambda states: read.append(len(states)) or head(states))
    first: Any = remembered(counted, [guess], mask, each, None, 3, masses, keys)
    wanted: Any = remembered(target, [guess], mask, each, None, 3)
    torch.testing.assert_close(first.values, wanted.values)
    assert sum(read) == 1 + int(mask.sum())  # one shows how many bytes there are
    assert all(both.untyped_storage().nbytes() == both.numel() * 8 for _, both in masses.texts.values())
    order, fewer = [2, 0], guess.at[guess.at < 2 * T]
    again: Any = remembered(
        FromStates(counted.states[order], counted.head),
        [replace(guess, at=fewer)],
        mask[order],
        each[order],
        None,
        3,
        masses,
        [keys[one] for one in order],
    )
    assert sum(read) == 2 + int(mask.sum())
    plain: Any = remembered(
        FromStates(target.states[order], head), [replace(guess, at=fewer)], mask[order], each[order], None, 3
    )
    torch.testing.assert_close(again.values, plain.values)
    other = mask.clone()
    other[1] = ~other[1]  # as if a text counted other positions: computed again
    torch.testing.assert_close(
        remembered(target, [guess], other, each, None, 3, masses, keys).values,  # type: ignore[union-attr]
        remembered(target, [guess], other, each, None, 3).values,  # type: ignore[union-attr]
    )


keep = partial(keep_top_k, k=5)


def test_too_many_bytes_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU remembers eight times as many."""
    target, guess, weights, _ = given()
    needed = int((weights.flatten()[guess.at] > 0).sum()) * (len(IDS) + 1) * 8
    asked: Any = [guess], weights > 0, torch.ones(B), None, 4
    for limit, expected in ((needed, Remembered), (needed - 1, FromStates)):
        monkeypatch.setattr("cotrain.teacher.target_distributions.REMEMBERED", limit)
        assert type(remembered(target, *asked)) is expected
    with standin.device():
        there = FromStates(target.states.to("cuda"), nn.Linear(D, V, dtype=F64).to("cuda"))
        for limit, expected in ((needed / 8, Remembered), (needed / 8 - 1, FromStates)):
            monkeypatch.setattr("cotrain.teacher.target_distributions.REMEMBERED", limit)
            assert type(remembered(there, *asked)) is expected
