"""Checks that every draft over the target's states passes: packed texts in training, CUDA graphs in serving."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cotrain.students.base import Seen
from cotrain.students.eagle import EagleStudent
from cotrain.teacher.target_model import served
from inference import Engine, Sampling
from inference.policy import Fixed
from inference.proposers.base import Proposer
from tests import standin
from tests.tiny import tiny


def check_packed_texts(student: EagleStudent, packed: Tensor, cut: int) -> None:
    """Guesses of two texts packed into one row, packed (1, T), the first of `cut` tokens, are those of each alone."""
    positions = torch.tensor([[*range(cut), *range(packed.shape[1] - cut)]])
    read = served(student.target, layers=student.reads)[0]
    parts = packed[:, :cut], packed[:, cut:]
    with torch.no_grad():
        alone = [Seen(dict(read(part))) for part in parts]  # type: ignore[arg-type]
    whole = Seen({layer: torch.cat([seen.states[layer] for seen in alone], 1) for layer in student.reads})
    guesses = student.guesses({"ids": packed, "position_ids": positions}, whole)
    assert len(guesses) == 3
    for depth, guess in enumerate(guesses):
        theirs = [student.guesses({"ids": part}, seen)[depth] for part, seen in zip(parts, alone, strict=True)]
        assert guess.at.tolist() == [*theirs[0].at.tolist(), *(cut + theirs[1].at).tolist()]
        expected = torch.cat([one.head(one.states) for one in theirs]).log_softmax(-1)
        torch.testing.assert_close(guess.head(guess.states).log_softmax(-1), expected)


def check_text_on_a_device(
    proposer: Callable[[Any], Proposer], prompts: list[list[int]], whole: dict[str, Any], sampling: Sampling,
    compile: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Text on the stand-in device is that of the host, by replayed rounds too; slots grow under them. proposer: made
    for a target; whole: the other arguments of `Engine.generate`."""
    monkeypatch.setattr("inference.proposers.eagle.FIRST_SLOTS", 8)
    monkeypatch.setattr("inference.models.replay.WARMUP", 1)

    def output(device: str) -> Any:
        target = tiny().to(device)
        engine = Engine(
            target, proposer(target), policy=Fixed(3), rows=3, compile=compile and target.device.type != "cpu"
        )
        return engine.generate(prompts, sampling=sampling, **whole)

    expected = output("cpu")
    with standin.device() as gpu:
        there = output("cuda")
        assert there.tokens == expected.tokens and there.stats.accepted == expected.stats.accepted
        assert not compile or gpu.recordings
