"""What planted bugs survived elsewhere: settings, caches and checks where one case in many tells them apart."""

import pytest
import torch

from inference import Engine, Sampling
from inference.exactness.agreement import check_logits
from inference.exactness.ties import Difference, is_tie
from inference.models.compiled import Compiled
from inference.models.lm import LM
from inference.proposers import Independent, NGram
from tests.tiny import tiny


def test_a_banned_word_may_begin_in_the_prompt() -> None:
    """The one id that could follow is banned behind the prompt's last one."""
    sampling = Sampling(0.0)
    first = Engine(tiny()).generate([[3, 5]], max_new_tokens=1, sampling=sampling, ignore_eos=True).tokens[0][0]
    banned = Sampling(0.0, banned=((3, 5, first),))
    for proposer in (None, NGram()):
        found = Engine(tiny(), proposer).generate([[3, 5]], max_new_tokens=1, sampling=banned, ignore_eos=True)
        assert found.tokens[0][0] != first


def test_own_processors_act_one_after_the_other() -> None:
    def only(*kept: int):  # type: ignore[no-untyped-def]
        keep = torch.tensor([id in kept for id in range(32)])
        return lambda ids, x: x.masked_fill(~keep, -torch.inf)

    sampling = Sampling(1.0, processors=(only(4, 7, 9), only(7, 11)))
    for proposer in (None, NGram()):
        found = Engine(tiny(), proposer).generate([[3, 5]] * 4, max_new_tokens=6, sampling=sampling, ignore_eos=True)
        assert {id for text in found.tokens for id in text} == {7}


def test_a_wrong_token_of_wide_passes_alone_is_held_against_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = tiny(), LM.forward

    def wrong(self, ids, start, *rest, **settings):  # type: ignore[no-untyped-def]
        made = right(self, ids, start, *rest, **settings)
        if ids.shape[1] == 1:
            return made
        logits = made.logits.clone()
        logits[:, -1, 3] += 5.0
        return made._replace(logits=logits)

    monkeypatch.setattr(LM, "forward", wrong)
    found = check_logits(LM(model, 2), [[3, 5], [4]], [[1, 2, 3, 4], [5, 6, 7, 8]], 4)
    assert found.worst > found.worst_limit and not found.passed and found.worst > 10 * found.one


def test_a_token_that_leaves_the_kept_ones_makes_a_tie() -> None:
    """Plain decoding's own token is at the edge of the kept ones; moved down it is cut, and the other is emitted."""
    logits, g = torch.tensor([3.0, 1.0, 0.99]), torch.tensor([0.0, 5.0, -5.0])
    assert is_tie(Difference(3.0, logits, g, 1, 0), 0.02, Sampling(top_k=2))
    assert not is_tie(Difference(3.0, logits, g, 1, 0), 0.001, Sampling(top_k=2))


@pytest.mark.parametrize("pause", [2, 3])
def test_no_hole_is_left_behind_rounds_without_drafts(pause: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
