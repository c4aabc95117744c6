"""Guesses of a draft with a Markov head, which adds to the logits a term that depends on the token before.

The states of such a guess are joined with that token's row in the Markov head's first table; the guess's head reads
both. N guesses, D width, r rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cotrain.losses.guess import Guess, sent
from inference.models.markov import MarkovHead

Columns = Callable[[Tensor], Tensor]  # states or logits (n, ...) -> logits (n, columns)


def after_tokens(guesses: Sequence[Guess], ids: Tensor, markov: MarkovHead, spread: Columns) -> list[Guess]:
    """Return the guesses with a term added to their logits, which the Markov head computes from the token before each
    guess.

    ids (B, T): the texts, on the CPU. The token before a guess is read from them, as if the round had accepted all its
    earlier drafts.
    spread: from the term (n, Vd) of the Markov head to columns (n, V), as the guesses' logits have them.
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
