"""Feature drafts: first weights, packed texts, pruned vocabularies, folders, and rounds on CUDA graphs."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import inference.proposers.eagle as eagle_module
from cotrain.config.drafts import DRAFTS
from cotrain.students.base import Guess, Seen
from cotrain.students.eagle import EagleStudent
from cotrain.teacher.target_model import served
from inference import Engine
from inference.drafts.published import fused
from inference.proposers.eagle import EagleNetwork
from tests import kinds
from tests.tiny import PROMPTS, tiny
from tests.watched import Watched

IDS = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(4))


def draft(kind: str = "eagle", **settings: Any) -> Any:
    sizes = {"intermediate": 24, "head_dim": 8, "kv_heads": 1, "depths": 3}
    return DRAFTS[kind].model_construct(**sizes | settings)


def started(target: Any, init: Any = None, **settings: Any) -> EagleStudent:
    init = init or SimpleNamespace(kind="target_layers", layers=[0, -1])
    return EagleStudent(EagleStudent.initial(draft(**settings), init, target).to(target.dtype), target)  # type: ignore[arg-type]


def guessed(student: EagleStudent, ids: Tensor, states: Seen | None = None, **batch: Tensor) -> list[Guess]:
    if states is None:
        states = Seen(served(student.target, layers=student.reads)[0](ids))  # type: ignore[arg-type]
    return student.guesses({"ids": ids, **batch}, states)


def distributions(guess: Guess) -> Tensor:
    return guess.head(guess.states).log_softmax(-1)


def test_layers_are_low_middle_and_high_ones() -> None:
    assert fused(16) == (2, 8, 13) and fused(32) == (2, 16, 29)
    for count in range(1, 12):
        assert all(low <= high < count for low, high in pairwise(fused(count)))


def test_it_begins_as_the_last_layer_of_the_target() -> None:
    """It ignores the newest token: its first guess at a position is the target's distribution one position earlier."""
    target = tiny()
    (first, *_), p = guessed(started(target), IDS), target(IDS).logits.log_softmax(-1).detach()
    at = torch.stack((first.at // 12, first.at % 12))
    assert bool((at[1] > 0).all()) and len(first.at) == 22
    torch.testing.assert_close(distributions(first), p[at[0], at[1] - 1], atol=1e-5, rtol=1e-4)


def test_nan_states_become_finite_features() -> None:
    proposer = eagle_module.Eagle(kinds.eagle(tiny()))
    states = {layer: torch.full((1, 3, 16), torch.nan, dtype=torch.float64) for layer in proposer.reads}
    assert bool(proposer._features(states).isfinite().all())


class Sometimes:
    """No drafts in some rounds, for any row; then accepted tokens wait."""

    def lengths(self, texts: Any) -> list[int]:
        return [3 * (sum(map(len, texts)) % 9 == 0)] * len(texts)


def test_rounds_without_drafts_lose_no_features() -> None:
    """Acceptance by a policy that pauses is that of the same rounds with every row alone."""
    target = tiny()
    watched = Watched(eagle_module.Eagle(kinds.eagle(target)))
    engine = Engine(target, watched, rows=1, policy=Sometimes())
    out = engine.generate([PROMPTS[1]], max_new_tokens=60, seed=5, ignore_eos=True)
    watched.rounds.clear()
    assert engine.generate([PROMPTS[1]], max_new_tokens=60, seed=5, ignore_eos=True).tokens == out.tokens
    for one in watched.rounds:
        (first, *_) = guessed(EagleStudent(watched.network, target), torch.tensor(one.texts))
        torch.testing.assert_close(one.q[:, 0], distributions(first)[-1:].exp(), atol=1e-6, rtol=1e-5)
    assert max(len(later.texts[0]) - len(earlier.texts[0]) for earlier, later in pairwise(watched.rounds)) > 4


def test_other_settings_raise() -> None:
    target = tiny()
    with pytest.raises(ValueError, match=r"draft\.depths"):
        started(target, depths=None)
    with pytest.raises(ValueError, match=r"init\.layers=\[5\]"):
        started(target, SimpleNamespace(kind="target_layers", layers=[5]))
    network = started(target, SimpleNamespace(kind="scratch", layers=[])).network
    assert isinstance(network, EagleNetwork) and network.config.intermediate_size == 24
