"""A proposer that is made of others: each of them learns of every row, whichever of them drafted."""

from collections.abc import Sequence

from inference.models.passes import States
from inference.proposers.base import Host, Outcome, Proposer


class OfParts(Proposer):
    """parts: the proposers that it is made of; each sees what rows enter, move and gain."""

    parts: tuple[Proposer, ...]

    def open(self, host: Host) -> None:
        for part in self.parts:
            part.open(host)

    def admit(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        for part in self.parts:
            part.admit(low, prompts, states)

    def stage(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        for part in self.parts:
            part.stage(low, prompts, states)

    def enter(self, source: int, target: int, prompt: list[int]) -> None:
        for part in self.parts:
            part.enter(source, target, prompt)

    def commit(self, outcome: Outcome) -> None:
        for part in self.parts:
            part.commit(outcome)

    def move(self, source: int, target: int) -> None:
        for part in self.parts:
            part.move(source, target)
