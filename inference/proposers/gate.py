"""When look-up drafts instead of a model: the better rate of tokens, from what was counted on held-out text.

A gate reads how long an end of the text stood earlier and where, which earlier text decides alone. It never sees a
token that a model drew: to drop or swap such a draft after a look would change the distribution of the text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from inference.lookup.match import Match

LONGEST = 16  # ends of as many tokens or more share their counts
WEIGHT = 8.0  # rounds that what is known of ends one token shorter counts as


@dataclass(frozen=True)
class Gate:
    """found[where][n][j]: P(a look-up's first j + 1 drafts are accepted), where 0 is the row's own text and 1 a
    datastore, n = 0 .. LONGEST the tokens of the end that stood there; model[where][n][j]: the same of the model's
    drafts at such places. step: what a draft of the model takes; column: what each draft of any kind adds to the
    target's pass; both in plain target steps.
    """

    found: Sequence[Sequence[Sequence[float]]]
    model: Sequence[Sequence[Sequence[float]]]
    step: float
    column: float

    @classmethod
    def uncalibrated(cls, depths: int = 16) -> "Gate":
        """Before anything was counted: a model of acceptance 0.7, and of a look-up n / (n + 2), a step a tenth."""
        found = [[(n / (n + 2)) ** (j + 1) for j in range(depths)] for n in range(LONGEST + 1)]
        model = [[0.7 ** (j + 1) for j in range(depths)]] * (LONGEST + 1)
        return cls([found, found], [model, model], 0.1, 0.02)

    def looked_up(self, match: Match, k: int) -> int:
        """How many of a look-up's drafts are taken, 0: the model drafts k. The number of most tokens a second, if that
        is at least the model's."""
        where, n = int(match.stored), min(match.length, LONGEST)
        drafted = sum(self.model[where][n][:k])
        best, most = 0, (1 + drafted) / (1 + (self.step + self.column) * k)
        accepted = 0.0
        for count, survival in enumerate(self.found[where][n][: min(len(match.drafts), k)], 1):
            accepted += survival
            rate = (1 + accepted) / (1 + self.column * count)
            if rate >= most:
                best, most = count, rate
        return best

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "Gate":
        """Raises ValueError for keys that are missing or unknown."""
        names = {item.name for item in fields(cls)}
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


def calibrated(places: Iterable[Place], depths: int, step: float, column: float) -> Gate:
    """The gate of what was counted at places of held-out text that the target wrote under the settings to be served.

    A look-up's draft is certain, so on text of the target's distribution a draft is accepted as often as the text has
    that token there. A look-up's counts of ends of n tokens lean on those of n - 1 tokens, the model's on those of all
    places, see `WEIGHT`. depths: drafts of a round, of either.
    """
    cells: list[list[list[Place]]] = [[[] for _ in range(LONGEST + 1)] for _ in range(2)]
    for place in places:
        cells[place.match.stored][min(place.match.length, LONGEST)].append(place)
    pooled = [place for part in cells for cell in part for place in cell]
    always = _leaning([_accepted(pooled, depths)], [0.0] * depths)[0]
    model = [[_leaning([_accepted(cell, depths)], always)[0] for cell in part] for part in cells]
    found = [_leaning([_found(cell, depths) for cell in part], [0.0] * depths) for part in cells]
    return Gate(found, model, step, column)


Counts = list[tuple[int, int]]  # by depth: rounds that accepted all drafts up to it, and rounds that drafted it


def _found(cell: list[Place], depths: int) -> Counts:
    """Of look-up's drafts."""
    return [(sum(place.right > depth for place in cell), sum(len(place.match.drafts) > depth for place in cell))
            for depth in range(depths)]  # fmt: skip


def _accepted(cell: list[Place], depths: int) -> Counts:
    """Of the model's drafts."""
    counts = [place.accepted for place in cell if place.accepted is not None]
    return [(sum(count > depth for count in counts), len(counts)) for depth in range(depths)]


def _leaning(counts: list[Counts], first: list[float]) -> list[list[float]]:
    """Survival of each cell by depth, with `WEIGHT` rounds of the cell before it, `first` before all."""
    shares, before = [], first
    for cell in counts:
        before = [(hits + WEIGHT * mean) / (rounds + WEIGHT) for (hits, rounds), mean in zip(cell, before, strict=True)]
        shares.append(before)
    return shares
