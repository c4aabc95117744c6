"""When look-up drafts instead of a model: the better rate of tokens, from what was counted on held-out text.

A gate reads how long an end of the text stood earlier and where, which earlier text decides alone. It never sees a
token that a model drew: to drop or swap such a draft after a look would change the law of the text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from inference.lookup.match import Match

LONGEST = 16  # ends of as many tokens or more share their counts
WEIGHT = 8.0  # rounds that what is known of ends one token shorter counts as


@dataclass(frozen=True)
class Gate:
    """found[where][n][j]: P(a look-up's first j + 1 drafts are accepted), where 0 is the row's own text and 1 a
    datastore, n = 0 .. LONGEST the tokens of the end that stood there. model[where][n]: tokens that a round of the
    model's drafts accepts at such a place. drafting: what the model's drafting takes in a round, column: what each
    draft of any kind adds to the target's pass, both in plain target steps. k: drafts of the model in a round.
    """

    found: Sequence[Sequence[Sequence[float]]]
    model: Sequence[Sequence[float]]
    drafting: float
    column: float
    k: int

    def looked_up(self, match: Match) -> int:
        """How many of a look-up's drafts are taken; 0: the model drafts. The number of most tokens a second, if that
        is at least the model's."""
        where, n = int(match.stored), min(match.length, LONGEST)
        survival = self.found[where][n]
        best, most = 0, (1 + self.model[where][n]) / (1 + self.drafting + self.column * self.k)
        accepted = 0.0
        for count in range(1, min(len(match.drafts), len(survival)) + 1):
            accepted += survival[count - 1]
            rate = (1 + accepted) / (1 + self.column * count)
            if rate >= most:
                best, most = count, rate
        return best

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "Gate":
        """Raises ValueError for keys that are missing or unknown."""
        names = set(cls.__dataclass_fields__)
        if odd := set(values) ^ names:
            raise ValueError(f"gate: keys missing or unknown: {', '.join(sorted(odd))}")
        return cls(**values)


@dataclass(frozen=True)
class Place:
    """A place of a held-out text. match: what look-up found there; right: how many of its drafts the text then had;
    accepted: how many drafts of the model a round from there accepted, None where none began."""

    match: Match
    right: int
    accepted: int | None = None


def calibrated(places: Iterable[Place], depths: int, drafting: float, column: float, k: int) -> Gate:
    """The gate of what was counted at places of held-out text that the target wrote under the settings to be served.

    A look-up's draft is certain, so on text of the target's law a draft is accepted as often as the text has that
    token there. Counts of ends of n tokens lean on those of n - 1 tokens, see `WEIGHT`. depths: drafts of a look-up.
    """
    parts: list[list[list[Place]]] = [[[] for _ in range(LONGEST + 1)] for _ in range(2)]
    for place in places:
        parts[place.match.stored][min(place.match.length, LONGEST)].append(place)
    everywhere = [place for part in parts for cell in part for place in cell]
    found = [_leaning([[_survives(cell, j) for cell in part] for j in range(depths)], depths) for part in parts]
    model = _means([_accepted(cell) for part in parts for cell in part], _accepted(everywhere))
    return Gate(found, [model[: LONGEST + 1], model[LONGEST + 1 :]], drafting, column, k)


def _survives(cell: list[Place], depth: int) -> tuple[float, int]:
    """Rounds that had all drafts up to that depth right, of those that drafted it."""
    drafted = [place for place in cell if len(place.match.drafts) > depth]
    return float(sum(place.right > depth for place in drafted)), len(drafted)


def _accepted(cell: list[Place]) -> tuple[float, int]:
    """Drafts of the model that were accepted, and the rounds."""
    counts = [place.accepted for place in cell if place.accepted is not None]
    return float(sum(counts)), len(counts)


def _leaning(counts: list[list[tuple[float, int]]], depths: int) -> list[list[float]]:
    """Survival [n][depth] of counts [depth][n], each with `WEIGHT` rounds of the cell one token shorter."""
    shares: list[list[float]] = []
    for depth in range(depths):
        mean, column = 0.0, []
        for hits, rounds in counts[depth]:
            mean = (hits + WEIGHT * mean) / (rounds + WEIGHT)
            column.append(mean)
        shares.append(column)
    return [list(row) for row in zip(*shares, strict=True)] if depths else [[] for _ in range(LONGEST + 1)]


def _means(counts: list[tuple[float, int]], pooled: tuple[float, int]) -> list[float]:
    """Mean of each cell, with `WEIGHT` rounds of all."""
    mean = pooled[0] / pooled[1] if pooled[1] else 0.0
    return [(total + WEIGHT * mean) / (rounds + WEIGHT) for total, rounds in counts]
