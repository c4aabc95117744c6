"""Banned words and the caller's own processors in whole calls of an engine."""

import torch

from inference import Engine, Sampling
from inference.proposers import NGram
from tests.tiny import tiny


def test_a_banned_word_may_begin_in_the_prompt() -> None:
    """The only id that greedy decoding would emit first is banned after the prompt's last id."""
    sampling = Sampling(0.0)
    first = Engine(tiny()).generate([[3, 5]], max_new_tokens=1, sampling=sampling, ignore_eos=True).tokens[0][0]
    banned = Sampling(0.0, banned=((3, 5, first),))
    for proposer in (None, NGram()):
        out = Engine(tiny(), proposer).generate([[3, 5]], max_new_tokens=1, sampling=banned, ignore_eos=True)
        assert out.tokens[0][0] != first


def test_own_processors_act_one_after_the_other() -> None:
    def only(*allowed: int):  # type: ignore[no-untyped-def]
        mask = torch.tensor([id in allowed for id in range(32)])
        return lambda ids, x: x.masked_fill(~mask, -torch.inf)

    sampling = Sampling(1.0, processors=(only(4, 7, 9), only(7, 11)))
    for proposer in (None, NGram()):
        out = Engine(tiny(), proposer).generate([[3, 5]] * 4, max_new_tokens=6, sampling=sampling, ignore_eos=True)
        assert {id for text in out.tokens for id in text} == {7}
