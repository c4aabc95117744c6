"""Look-up combined with a draft model. In each round a `Gate` decides, for each row, whether look-up or the model
drafts.

The gate compares expected rates of tokens, from counts on held-out text. It reads the length of look-up's match (the
number of last tokens of the text that occurred earlier) and the place of the match (the text itself or a datastore).
Both depend only on earlier text. The gate never reads a token that the model drew: dropping or replacing a draft
because of its token would change the distribution of the text.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.drafts.causal_lm import CausalLM
from inference.drafts.weight_files import CONFIG, read_json, wrong_keys
from inference.lookup.suffixes import Match
from inference.proposers.base import CompositeProposer, LoadArguments, Numbers, Proposal, Proposer, Round, RoundView
from inference.proposers.early_exit import EarlyExit, ExitNetwork
from inference.proposers.independent import Independent
from inference.proposers.quantised import Quantised, QuantisedNetwork
from inference.proposers.retrieval import Retrieval, chains
from inference.sampling import one_hot

LONGEST = 16  # matches of so many tokens or more are counted together
WEIGHT = 8.0  # the estimate for matches one token shorter counts as much as this many rounds


@dataclass(frozen=True)
class Gate:
    """The acceptance rates and costs that decide between look-up and model.

    lookup[s][n][j]: P(the first j + 1 drafts of a look-up are accepted). s = 0 if the match is in the row's own text, 1
    if it is in a datastore. n = 0 to LONGEST is the length of the match, in tokens. model[s][n][j]: P(the first j + 1
    drafts of the model are accepted) at positions with such a match. step: the time of one draft of the model. column:
    the time that one more draft adds to the target pass. Both times are in units of a plain target step.
    """

    lookup: Sequence[Sequence[Sequence[float]]]
    model: Sequence[Sequence[Sequence[float]]]
    step: float
    column: float

    @classmethod
    def uncalibrated(cls, depths: int = 16) -> "Gate":
        """Return a gate with default values instead of counted ones: acceptance is 0.7 per draft of a model, and n / (n
        + 2) per draft of a look-up; a draft takes a tenth of a target step. depths: the largest number of drafts per
        round."""
        lookup = [[(n / (n + 2)) ** (j + 1) for j in range(depths)] for n in range(LONGEST + 1)]
        model = [[0.7 ** (j + 1) for j in range(depths)]] * (LONGEST + 1)
        return cls([lookup, lookup], [model, model], 0.1, 0.02)

    def looked_up(self, match: Match, k: int) -> int:
        """Return how many of the look-up's drafts to use: the number with the highest expected rate of tokens. Return 0
        if drafts of the model have a higher rate. match: the look-up's result for the row's text. k: the row's draft
        length."""
        source, n = int(match.stored), min(match.length, LONGEST)
        count, rate = _best(self.lookup[source][n][: min(len(match.drafts), k)], self.column)
        return count if rate >= self._of_model(match, k)[1] else 0

    def modelled(self, match: Match, k: int) -> int:
        """Return how many drafts of the model have the highest expected rate of tokens, from 1 to k, or 0 if k is 0."""
        return self._of_model(match, k)[0]

    def _of_model(self, match: Match, k: int) -> tuple[int, float]:
        survivals = self.model[int(match.stored)][min(match.length, LONGEST)][:k]
        return _best(survivals, self.step + self.column)

    def to_json(self) -> dict[str, Any]:
        """Return the contents of the key `gate` in config.json. There the field `lookup` has the key `found`."""
        return {_KEYS.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "Gate":
        """Return the gate that the key `gate` in config.json describes. values: the key's contents. Raises ValueError
        if keys are missing or unknown."""
        names = {_KEYS.get(item.name, item.name): item.name for item in fields(cls)}
        if wrong := wrong_keys(values, names.keys()):
            raise ValueError(f"lookup.gate of config.json: {wrong}: use the config.json that cotrain wrote")
        return cls(**{names[key]: value for key, value in values.items()})


_KEYS = {"lookup": "found"}  # field of `Gate` -> its key in config.json, where that has another name


@dataclass(frozen=True)
class HeldOutPosition:
    """A position in a held-out text. match: look-up's result at this position. right: number of look-up's drafts that
    equal the text's next tokens. accepted: number of the model's drafts that were accepted in the round that began
    here; None if no round began here."""

    match: Match
    right: int
    accepted: int | None = None


def calibrated_gate(positions: Iterable[HeldOutPosition], depths: int, step: float, column: float) -> Gate:
    """Return a gate with rates that are counted at positions of held-out texts. The target must have generated these
    texts under the settings to be served.

    depths: the largest number of drafts per round. step: the time of one draft of the model. column: the time that one
    more draft adds to the target pass. Both times are in units of a plain target step. A look-up's draft has
    probability 1 under q, so its acceptance rate is the fraction of positions at which the text has the drafted token.
    Rates of look-up for matches of n tokens are smoothed towards the rates for n - 1 tokens. Rates of the model are
    smoothed towards its rates over all positions. The rate that is smoothed towards counts as much as `WEIGHT` rounds.
    """
    cells: list[list[list[HeldOutPosition]]] = [[[] for _ in range(LONGEST + 1)] for _ in range(2)]
    for position in positions:
        cells[position.match.stored][min(position.match.length, LONGEST)].append(position)
    pooled = [position for part in cells for cell in part for position in cell]
    always = _smoothed([_model_counts(pooled, depths)], [0.0] * depths)[0]
    model = [[_smoothed([_model_counts(cell, depths)], always)[0] for cell in part] for part in cells]
    lookup = [_smoothed([_lookup_counts(cell, depths) for cell in part], [0.0] * depths) for part in cells]
    return Gate(lookup, model, step, column)


DepthCounts = list[tuple[int, int]]  # by depth: rounds that accepted all drafts up to it, and rounds that drafted it


def _lookup_counts(cell: list[HeldOutPosition], depths: int) -> DepthCounts:
    return [
        (sum(one.right > depth for one in cell), sum(len(one.match.drafts) > depth for one in cell))
        for depth in range(depths)
    ]


def _model_counts(cell: list[HeldOutPosition], depths: int) -> DepthCounts:
    counts = [position.accepted for position in cell if position.accepted is not None]
    return [(sum(count > depth for count in counts), len(counts)) for depth in range(depths)]


def _smoothed(counts: list[DepthCounts], first: list[float]) -> list[list[float]]:
    """Return, for each cell and depth, P(all drafts down to that depth are accepted). Each estimate is smoothed towards
    the previous cell's, which counts as much as `WEIGHT` rounds. counts: for each cell, its counts by depth. first: the
    estimates by depth before the first cell."""
    shares, before = [], first
    for cell in counts:
        before = [(hits + WEIGHT * mean) / (rounds + WEIGHT) for (hits, rounds), mean in zip(cell, before, strict=True)]
        shares.append(before)
    return shares


def _best(survivals: Sequence[float], cost: float) -> tuple[int, float]:
    """Return the number of drafts, of one and more, with the highest expected rate of tokens, and this rate; 0 and 0 if
    there are no drafts. survivals: P(the first j + 1 drafts are accepted). cost: of a draft, in plain target steps."""
    best, most, accepted = 0, 0.0, 0.0
    for count, survival in enumerate(survivals, 1):
        accepted += survival
        rate = (1 + accepted) / (1 + cost * count)
        if rate >= most:
            best, most = count, rate
    return best, most


class Hybrid(CompositeProposer):
    """A proposer that drafts with `retrieval` or with `model`, as the gate decides (SAM decoding: Hu et al. 2024,
    2411.10666). retrieval: None for `Retrieval()`. gate: None for `Gate.uncalibrated()`.

    The gate decides before a token is drawn, from earlier text alone. Each row's drafts are therefore drawn from the
    returned distributions: one-hot for look-up, the model's for the model. The model does not run for rows that use
    look-up; it reads their new tokens when it next drafts for them. The model must draft chains.
    """

    network_class: Any = CausalLM
    model_class: Any = Independent

    def __init__(self, model: Proposer, retrieval: Retrieval | None = None, gate: Gate | None = None) -> None:
        self.model, self.retrieval, self.gate = model, retrieval or Retrieval(), gate or Gate.uncalibrated()
        self.shortens = gate is not None
        self.reads, self.greedy = model.reads, model.greedy
        self.parts = (self.retrieval, model)

    def __copy__(self) -> "Hybrid":
        """Return a hybrid with copies of the parts, which shares no state with this one."""
        return type(self)(copy(self.model), copy(self.retrieval), self.gate if self.shortens else None)

    @classmethod
    def fits(cls, network: PreTrainedModel, target: PreTrainedModel, where: str) -> None:
        Retrieval.fits(network, target, where)
        cls.model_class.fits(network, target, where)

    @classmethod
    def load(cls, folder: Path, arguments: LoadArguments) -> "Hybrid":
        """Return a hybrid for the folder of a draft of `model_class`. The key `lookup` in the folder's config.json has
        the settings of look-up and the gate. Raises FileNotFoundError if the folder or the datastore does not exist,
        and ValueError if one of them is damaged or does not fit the target, or if settings are wrong."""
        model = cls.model_class.load(folder, arguments)
        return cls.of_settings(model, read_json(folder / CONFIG).get("lookup") or {})

    @classmethod
    def of_settings(cls, model: Proposer, lookup: Mapping[str, Any]) -> "Hybrid":
        """Return a hybrid of `model` and a look-up. lookup: the contents of the key `lookup` in config.json."""
        gate = lookup.get("gate")
        return cls(model, Retrieval.of_settings(lookup), Gate.of_json(gate) if gate else None)

    @property
    def weights(self) -> str | None:
        return self.model.weights

    @property
    def context(self) -> int | None:
        return self.model.context

    def propose(self, round: Round) -> Proposal:
        matches = self.retrieval.find(round.texts, round.k)
        drafts = [match.drafts[: self.gate.looked_up(match, k)] for match, k in zip(matches, round.k, strict=True)]
        rows = zip(drafts, matches, round.k, strict=True)
        asked = [0 if draft else self.gate.modelled(match, k) if self.shortens else k for draft, match, k in rows]
        if not max(asked):
            return chains(drafts, round.texts)
        if not any(drafts):
            return self.model.propose(PartialRound(round, asked))
        part = PartialRound(round, asked, chains(drafts, round.texts))
        return mixed(part, self.model.propose(part))


class HybridExit(Hybrid):
    """A `Hybrid` whose model is an early exit."""

    network_class = ExitNetwork
    model_class = EarlyExit


class HybridQuantised(Hybrid):
    """A `Hybrid` whose model is the target in fewer bits."""

    network_class = QuantisedNetwork
    model_class = Quantised


class PartialRound(RoundView):
    """A round in which the model drafts for some rows only; its k is 0 for the other rows. sure: look-up's drafts for
    the other rows, copied to the device together with the numbers that the model sends; None if there are none."""

    def __init__(self, round: Round, k: list[int], sure: Proposal | None = None) -> None:
        super().__init__(round, k)
        self.sure = sure
        self.sent: dict[str, Tensor] = {}

    def send(self, k: list[int] | None = None, **numbers: Numbers) -> dict[str, Tensor]:
        own = self.k if k is None else k
        if self.sure is not None:
            own = [a + b for a, b in zip(own, self.sure.k, strict=True)]
            numbers |= {} if self.sent else {"sure": self.sure.x.tolist(), "looked_up": self.sure.k}
        self.sent = self.round.send(own, **numbers)
        return self.sent

    def draw(self, probs: Tensor, depth: int | Tensor) -> Tensor:
        """Return ids (A,) drawn from probs (A, V). Rows that use look-up get look-up's token at this depth (0-based)
        instead."""
        if self.sure is not None and isinstance(depth, int) and depth < self.sure.x.shape[1]:
            sent = self.send()
            certain = one_hot(sent["sure"][:, depth], probs)
            probs = torch.where((sent["looked_up"] > depth).unsqueeze(1), certain, probs)
        return self.round.draw(probs, depth)


def mixed(part: PartialRound, drawn: Proposal) -> Proposal:
    """Return one proposal that joins the drafts of look-up (`part.sure`) and of the model (`drawn`). Each row has
    drafts from only one of them.

    Raises ValueError if the model drafts a tree, since all rows of a round draft chains or all draft one tree.
    """
    if drawn.tree is not None:
        raise ValueError("Hybrid: its model drafts trees; give it a model that drafts chains, without shape=")
    assert part.sure is not None
    sent = part.send()
    x, certain = sent["sure"], sent["looked_up"].unsqueeze(1) > 0
    width = max(x.shape[1], drawn.x.shape[1])
    k = [a + b for a, b in zip(part.sure.k, drawn.k, strict=True)]
    ids = torch.where(certain, _wider(x, width), _wider(drawn.x.to(x.device), width))
    if drawn.q is None:
        return Proposal(ids, None, k)
    q = _wider(drawn.q.to(x.device), width)
    return Proposal(ids, torch.where(certain.unsqueeze(2), one_hot(ids, q), q), k)


def _wider(x: Tensor, width: int) -> Tensor:
    """Return x (A, n, ...) padded with zeros to (A, width, ...)."""
    return x if x.shape[1] == width else torch.cat((x, x.new_zeros(x.shape[0], width - x.shape[1], *x.shape[2:])), 1)
