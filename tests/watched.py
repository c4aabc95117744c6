"""A proposer whose proposals are kept as they were made."""

from typing import Any, NamedTuple

from torch import Tensor


class Round(NamedTuple):
    """texts (B,) before the round, temperatures of their rows, drafts x (B, K), their distributions q (B, K, V) or
    None, and how many each row has, k (B,)."""

    texts: list[list[int]]
    temperatures: list[float]
    x: Tensor
    q: Tensor | None
    k: Any


class Watched:
    """`rounds`: one `Round` for each that it drafted."""

    def __init__(self, proposer: Any) -> None:
        self.proposer, self.rounds = proposer, list[Round]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.proposer, name)

    def propose(self, round: Any) -> Any:
        texts, heat = [list(text) for text in round.texts], [row.sampling.temperature for row in round.rows]
        found = self.proposer.propose(round)
        self.rounds.append(Round(texts, heat, found.x.clone(), None if found.q is None else found.q.clone(), found.k))
        return found
