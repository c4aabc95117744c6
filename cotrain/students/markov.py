"""Guesses of a draft with a Markov head. This head adds to the logits a term that depends on the token before the
guess.

The states of such a guess are joined with that token's row in the Markov head's first table; the guess's head reads
both. B texts, T tokens, N guesses, n some of them, V vocabulary, Vd tokens of the Markov head.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cotrain.losses.guess import Guess, sent
from inference.models.markov import MarkovHead

Columns = Callable[[Tensor], Tensor]  # states or logits (n, ...) -> logits (n, columns)


def after_tokens(guesses: list[Guess], ids: Tensor, markov: MarkovHead | None, spread: Columns) -> list[Guess]:
    """Return the guesses with the Markov head's term added to their logits; the same guesses without a Markov head.

    ids (B, T): the texts, on the CPU. A guess at position t reads token t, as if all earlier drafts of the round had
    been accepted. spread: a function from the term (n, Vd) of the Markov head to logits (n, V).
    """
    if markov is None:
        return guesses

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
