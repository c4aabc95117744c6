"""Rounds in which no row drafts, while rows enter, leave and move, change nothing of what is drafted later."""

from collections.abc import Sequence
from typing import Any

import pytest

from inference import Engine
from tests.inference.test_every_proposer import LIMITS, PROMPTS, SAMPLING, WHOLE
from tests.kinds import KINDS
from tests.tiny import tiny


class Late:
    """Drafts once a text is long, so that rows of different ages wait together before the first draft."""

    def lengths(self, texts: Sequence[list[int]]) -> list[int]:
        return [3 if len(text) >= 20 else 0 for text in texts]


class InTurns:
    """Drafts and pauses by the length of the text, six tokens each."""

    def lengths(self, texts: Sequence[list[int]]) -> list[int]:
        return [3 * (len(text) // 6 % 2) for text in texts]


@pytest.mark.parametrize("policy", [Late(), InTurns()], ids=["late", "in turns"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drafted_after_a_pause_is_as_if_alone(kind: str, policy: Any) -> None:
    target = tiny(positions=64)
    many = Engine(target, KINDS[kind].proposer(target), rows=4, policy=policy).generate(PROMPTS, **WHOLE)
    one = Engine(target, KINDS[kind].proposer(target), rows=1, policy=policy)
    for n, prompt in enumerate(PROMPTS):
        alone = one.generate([prompt], max_new_tokens=LIMITS[n], sampling=SAMPLING[n], ids=[n], ignore_eos=True)
        assert (many.tokens[n], many.stats.rows[n]) == (alone.tokens[0], alone.stats.rows[0]), n
    assert sum(many.stats.drafted) > 20
