"""Guesses of a draft with a Markov head, which adds to the logits a term that depends on the token before.

The output head of such a guess reads its state joined with the row of the Markov head's first table.
N guesses, D width, r rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cotrain.losses.guess import Guess, sent
from inference.models.markov import MarkovHead

Columns = Callable[[Tensor], Tensor]  # states or logits (n, ...) -> logits (n, columns)


def after_tokens(guesses: Sequence[Guess], ids: Tensor, markov: MarkovHead, spread: Columns) -> list[Guess]:
    """Return the guesses with a term added to the logits, which the Markov head computes from the token before each
    guess.

    ids (B, T): the text, on the CPU. The token before a guess is read from it, as if the round had accepted all its
    earlier drafts.
    spread: a function that maps the term (n, Vd) to (n, V), the shape of the guesses' logits.
    """

    def joined(guess: Guess) -> Guess:
        states, width = guess.states, guess.states.shape[-1]
        rows = markov.markov_w1(sent(ids.flatten()[guess.at], states.device)).to(states)

        def with_term(head: Columns, place: Columns) -> Columns:
            return lambda read: head(read[..., :width]) + place(markov.markov_w2(read[..., width:]))

        head, pruned = with_term(guess.head, spread), guess.pruned
        if pruned is not None:
            pruned = pruned._replace(head=with_term(pruned.head, lambda term: term))
        parameters = (*guess.parameters, *markov.markov_w2.parameters())
        return replace(guess, states=torch.cat((states, rows), -1), head=head, parameters=parameters, pruned=pruned)

    return [joined(guess) for guess in guesses]
