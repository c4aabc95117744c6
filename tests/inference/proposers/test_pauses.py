"""Rounds in which no row drafts, while rows enter, leave and move, change nothing of what is drafted later."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.models.replay import Compiled
from inference.proposers import Independent
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


@pytest.mark.thorough
@pytest.mark.parametrize(("policy", "first"), [(Late(), 0), (InTurns(), 1)], ids=["late", "in turns"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drafted_after_a_pause_is_as_if_alone(kind: str, policy: Any, first: int) -> None:
    """Every other row under one policy, the rows between them under the other."""
    target = tiny(positions=64)
    many = Engine(target, KINDS[kind].proposer(target), rows=4, policy=policy).generate(PROMPTS, **WHOLE)
    one = Engine(target, KINDS[kind].proposer(target), rows=1, policy=policy)
    for n, prompt in list(enumerate(PROMPTS))[first::2]:
        alone = one.generate([prompt], max_new_tokens=LIMITS[n], sampling=SAMPLING[n], ids=[n], ignore_eos=True)
        assert (many.tokens[n], many.stats.rows[n]) == (alone.tokens[0], alone.stats.rows[0]), n
    assert sum(many.stats.drafted) > 20


@pytest.mark.parametrize("pause", [2, 3])
def test_rounds_without_drafts_leave_no_hole_in_the_cache(pause: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is the target has every draft accepted, unless its cache lacks an id."""

    class Pausing:
        round = 0

        def lengths(self, texts: list[list[int]]) -> list[int]:
            self.round += 1
            return [4 if self.round % pause == 0 else 0] * len(texts)

    monkeypatch.setattr(torch, "compile", lambda module, *_: module)  # as it is
    monkeypatch.setattr(Compiled, "failed", False)
    for compile in (False, True):
        engine = Engine(tiny(), Independent(tiny(), compile=compile), policy=Pausing(), rows=2)
        stats = engine.generate([[3, 5, 7], [9, 2]], max_new_tokens=40, sampling=Sampling(0.8), ignore_eos=True).stats
        assert stats.accepted == stats.drafted
