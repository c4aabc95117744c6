"""Checks that every draft over the target's states passes: packed texts in training, CUDA graphs in serving."""

import torch
from torch import Tensor

from cotrain.students.base import Seen
from cotrain.students.eagle import EagleStudent
from cotrain.teacher.target_model import served


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
