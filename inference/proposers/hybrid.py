"""Look-up where it pays, a model elsewhere: each row's drafts of a round come from one of the two."""

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from inference.batched.batch import Numbers
from inference.drafts.weight_files import CONFIG, read_json
from inference.proposers.base import Beside, Proposal, Proposer, Round
from inference.proposers.gate import Gate
from inference.proposers.independent import Independent
from inference.proposers.of_parts import OfParts
from inference.proposers.retrieval import Retrieval, chains
from inference.sampling import one_hot


class Hybrid(OfParts):
    """Retrieval first, `model` where the gate says so (as Hu et al. 2024, 2411.10666, join SAM decoding with a model).

    The gate decides before anything is drawn, from earlier text alone, so each row's drafts are drawn from the
    distributions
    that are returned: one-hot ones for look-up, else the model's. Rows that look-up drafts for cost the model nothing;
    it reads what they gained when it next drafts for them. The model drafts chains.
    """

    network_class = AutoModelForCausalLM

    def __init__(self, model: Proposer, retrieval: Retrieval | None = None, gate: Gate | None = None) -> None:
        self.model, self.retrieval, self.gate = model, retrieval or Retrieval(), gate or Gate.uncalibrated()
        self.reads, self.greedy = model.reads, model.greedy
        self.parts = (self.retrieval, model)

    def __copy__(self) -> "Hybrid":
        """With parts of its own, so that what one copy drafts is nothing to another."""
        return Hybrid(copy(self.model), copy(self.retrieval), self.gate)

    @classmethod
    def fits(cls, network: PreTrainedModel, target: PreTrainedModel, where: str) -> None:
        Retrieval.fits(network, target, where)

    @classmethod
    def load(cls, folder: Path, beside: Beside) -> "Hybrid":
        """An independent draft whose config.json says under `lookup` how look-up stands beside it, gate included."""
        return cls.of_settings(Independent.load(folder, beside), read_json(folder / CONFIG).get("lookup") or {})

    @classmethod
    def of_settings(cls, model: Proposer, lookup: Mapping[str, Any]) -> "Hybrid":
        """A model, and what a config says of look-up."""
        gate = lookup.get("gate")
        return cls(model, Retrieval.of_settings(lookup), Gate.of_json(gate) if gate else None)

    @property
    def weights(self) -> str | None:
        return self.model.weights

    @property
    def context(self) -> int | None:
        return self.model.context

    def propose(self, round: Round) -> Proposal:
        found = self.retrieval.find(round.texts, round.k)
        drafts = [match.drafts[: self.gate.looked_up(match, k)] for match, k in zip(found, round.k, strict=True)]
        asked = [0 if draft else k for draft, k in zip(drafts, round.k, strict=True)]
        if not max(asked):
            return chains(drafts, round.texts)
        if not any(drafts):
            return self.model.propose(Part(round, asked))
        sure = chains(drafts, round.texts)
        part = Part(round, asked, sure)
        return mixed(part, self.model.propose(part))


class Part:
    """A round as a model sees it that drafts for some rows only: k_b = 0 of the others, which have the drafts `sure`.
    These travel to the device with what the model sends."""

    def __init__(self, round: Round, k: list[int], sure: Proposal | None = None) -> None:
        self.round, self.k, self.sure = round, k, sure
        self.sent: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.round, name)

    def send(self, k: list[int] | None = None, **numbers: Numbers) -> dict[str, Tensor]:
        own = self.k if k is None else k
        if self.sure is not None:
            own = [a + b for a, b in zip(own, self.sure.k, strict=True)]
            numbers |= {} if self.sent else {"sure": self.sure.x.tolist(), "looked_up": self.sure.k}
        self.sent = self.round.send(own, **numbers)
        return self.sent

    def draw(self, probs: Tensor, depth: int) -> Tensor:
        """Of rows that look-up drafts for, its draft for certain: what the model makes of them is not used."""
        if self.sure is not None and depth < self.sure.x.shape[1]:
            sent = self.send()
            certain = one_hot(sent["sure"][:, depth], probs)
            probs = torch.where((sent["looked_up"] > depth).unsqueeze(1), certain, probs)
        return self.round.draw(probs, depth)

    def on(self, given: Any) -> "Part":
        return Part(self.round.on(given), self.k)


def mixed(part: Part, drawn: Proposal) -> Proposal:
    """One proposal of a round's certain drafts and of those that the model drew: each row's are of one kind.

    Raises ValueError for a tree: rows of one round have one shape of drafts.
    """
    if drawn.tree is not None:
        raise ValueError("Hybrid: its model drafts trees; give it one that drafts chains")
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
    """x (A, n, ...) -> (A, width, ...), zeros behind: a row's drafts end before them."""
    return x if x.shape[1] == width else torch.cat((x, x.new_zeros(x.shape[0], width - x.shape[1], *x.shape[2:])), 1)
