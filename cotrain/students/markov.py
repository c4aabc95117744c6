"""Guesses of a draft with a Markov head, which adds to the logits a term that depends on the token before.

The output head of such a guess reads its state joined with the row of the Markov head's first table.
N guesses, D width, r rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cotrain.losses.guess import Guess
from inference.models.markov import MarkovHead


def after_tokens(
    guesses: Sequence[Guess], ids: Tensor, markov: MarkovHead, spread: Callable[[Tensor], Tensor]
) -> list[Guess]:
    """Return the guesses with a term added to the logits, which the Markov head computes from the token before each
    guess.

    ids (B, T): the text. The token before a guess is read from it, as if the round had accepted all its earlier drafts.
    spread: a function that maps the term (n, Vd) to (n, V), the shape of the guesses' logits.
    """

    def joined(guess: Guess) -> Guess:
        states, width = guess.states, guess.states.shape[-1]
        rows = markov.markov_w1(ids.flatten()[guess.at.to(ids.device)]).to(states)

        def head(read: Tensor) -> Tensor:
            return guess.head(read[..., :width]) + spread(markov.markov_w2(read[..., width:]))

        pruned = guess.pruned
        if pruned is not None:
            plain = pruned.head
            pruned = pruned._replace(head=lambda read: plain(read[..., :width]) + markov.markov_w2(read[..., width:]))
        parameters = (*guess.parameters, *markov.markov_w2.parameters())
        return replace(guess, states=torch.cat((states, rows), -1), head=head, parameters=parameters, pruned=pruned)

    return [joined(guess) for guess in guesses]
