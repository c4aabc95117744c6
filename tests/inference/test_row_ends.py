"""A row ends at the first of all that may end it: the target's end tokens, stop ids, stop strings and its limit."""

from itertools import product

import pytest
from transformers import LlamaForCausalLM

from inference import Engine, Sampling
from inference.policy import Fixed
from inference.proposers import Independent
from tests import folders
from tests.often import often
from tests.tiny import near, tiny

PROMPT, LENGTH = [[40, 41, 42]], 40
WAYS = ("end", "stop_ids", "stop", "limit")


@pytest.fixture(scope="module")
def text() -> list[int]:
    """What the target says without an end, all tokens at temperature 0."""
    (tokens,) = (
        Engine(target(None)).generate(PROMPT, max_new_tokens=LENGTH, sampling=Sampling(0.0), ignore_eos=True).tokens
    )
    return tokens


def target(end: int | None) -> LlamaForCausalLM:
    return tiny(folders.VOCABULARY, seed=12, eos=end)


def first(text: list[int], least: int) -> int:
    """The first position from `least` on whose token did not occur before."""
    return next(i for i in range(least, len(text)) if text[i] not in text[:i])


CASES = [(used, (3, 8, 13), True) for used in product([False, True], repeat=3)]
CASES += [((True, True, True), order, False) for order in ((3, 8, 13), (13, 8, 3), (8, 3, 13))]


# all three in every order, and without what is first
OFTEN = (CASES[7], CASES[3], CASES[1], *CASES[9:])


@pytest.mark.parametrize(("used", "order", "drafted"), often(CASES, OFTEN.__contains__))
def test_the_first_end_counts_whatever_else_is_asked_for(
    text: list[int], used: tuple[bool, ...], order: tuple[int, ...], drafted: bool
) -> None:
    """used: the target's end token, a stop id, a stop string; each would end the text at another position."""
    tokenizer = folders.tokenizer()
    at = [first(text, least) for least in order]
    end, stop_id, string = (position if one else None for one, position in zip(used, at, strict=True))
    model = target(text[end] if end is not None else None)
    sampling = Sampling(
        0.0,
        stop_ids=(text[stop_id],) if stop_id is not None else (),
        stop=(tokenizer.decode(text[: string + 1])[-6:],) if string is not None else (),
    )
    proposer = Independent(near(model, 0.05)) if drafted else None
    engine = Engine(model, proposer, policy=Fixed(4), tokenizer=tokenizer)
    ends = [position + 1 for position in (end, stop_id) if position is not None]
    if string is not None:
        ends.append(next(n for n in range(1, LENGTH) if sampling.stop[0] in tokenizer.decode(text[:n])))
    for limit in {20, *ends, *(n - 1 for n in ends)}:  # also with the last token that is allowed, and just before
        out = engine.generate(PROMPT, max_new_tokens=limit, sampling=sampling)
        assert out.tokens == [text[: min([*ends, limit])]]
        assert out.finish == ["stop" if any(n <= limit for n in ends) else "length"]
        by_id = any(position is not None and len(out.tokens[0]) == position + 1 for position in (end, stop_id))
        assert out.text == [tokenizer.decode(out.tokens[0][:-1] if by_id else out.tokens[0])]
