"""What a kind of draft is while it trains: what it reads of the target, its guesses, the proposer that serves it.

B texts, T tokens, D width of the target's states, V vocabulary, N guesses. A place t of a text speaks of the
distribution of its token t + 1, given the tokens 0 .. t; flat places are b * T + t.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cotrain.losses.guess import ANY, Guess
from cotrain.teacher.seen import Seen
from inference.models.passes import LAST
from inference.proposers import kind_of
from inference.proposers.base import Proposer

if TYPE_CHECKING:
    from cotrain.config.groups import Draft, Init

__all__ = ["ANY", "DEFAULT", "KINDS", "LAST", "Guess", "Seen", "Student", "refuse_mixed", "student_class"]

DEFAULT = "independent"  # the kind of a draft folder that does not say it
KINDS = {  # kind -> module:class, imported when asked for
    DEFAULT: "cotrain.students.independent:Independent",
    "conditioned": "cotrain.students.conditioned:Conditioned",
    "eagle": "cotrain.students.eagle:Eagle",
    "p_eagle": "cotrain.students.p_eagle:PEagle",
    "early_exit": "cotrain.students.early_exit:EarlyExit",
    "parallel": "cotrain.students.parallel:Parallel",
    "medusa": "cotrain.students.medusa:Medusa",
    "hydra": "cotrain.students.hydra:Hydra",
    "retrieval": "cotrain.students.retrieval:Retrieval",
    "hybrid": "cotrain.students.hybrid:Hybrid",
    "quantised": "cotrain.students.quantised:Quantised",
    "two_levels": "cotrain.students.two_levels:TwoLevels",
}

# settings that only some kinds have (`Student.takes`) -> the value that asks for nothing
OPTIONAL: dict[str, Any] = {
    "datastore": None, "shortest": 2, "rank": 0, "depths": None, "vocabulary": None, "bits": None, "inner": None,
    "temperatures": [],
}  # fmt: skip

UNTRAINED = {"retrieval", "quantised", "two_levels"}  # kinds that are measured and exported without training
PREPARED = {"hybrid": "cotrain.students.hybrid:prepare"}  # what a kind settles on ranking prompts before it is measured

SHAPED = {"early_exit": "cotrain.bench.exit_planner:planned"}  # what settles a shape that the settings leave open


class Student(Protocol):
    """A kind of draft. Its class is made from (network, target, vocabulary): the target whose head, layers or
    embeddings it may share, and the number of ids that have mass (None: all of the head's). What has a body here is
    what a kind gets by naming this class as its base.

    takes: those of `OPTIONAL` that it has; others are refused. reads: layers of the target's states that it wants
    beyond LAST, which losses read anyway. rounds_target: whether it drafts with the target in fewer bits, so that the
    target must be whole.
    """

    kind: str
    takes: tuple[str, ...] = ()
    reads: tuple[int, ...] = ()
    rounds_target: bool = False
    network: PreTrainedModel
    target: PreTrainedModel | None
    vocabulary: int | None

    def __init__(
        self, network: PreTrainedModel, target: PreTrainedModel | None = None, vocabulary: int | None = None
    ) -> None:
        self.network, self.target, self.vocabulary = network, target, vocabulary

    @classmethod
    def initial(cls, draft: "Draft", init: "Init", target: PreTrainedModel) -> PreTrainedModel:
        """The network before training. Raises ValueError naming the key that is wrong."""
        raise ValueError(f"draft.kind: {cls.kind} cannot be made from init={init.kind}")

    def of(self, network: PreTrainedModel) -> Self:
        """The same student with other weights: in parts, rounded, or cast for serving."""
        return type(self)(network, self.target, self.vocabulary)

    def refuse(self) -> None:
        """Raise ValueError for a network that this kind cannot train."""
        return None

    def keeps_apart(self) -> bool:
        """Whether texts that are packed into one row are read as if alone, see `target_model.keeps_apart`; so they are
        by a student that reads no text but through the target."""
        return True

    @property
    def known(self) -> Tensor:
        """Which ids (V,) it can draft, bool."""
        size = self.vocabulary or self.network.config.get_text_config().vocab_size
        return torch.ones(size, dtype=torch.bool)

    def know(self, counts: Tensor) -> None:
        """Choose those ids, of a kind that knows `draft.vocabulary` of them, by how often each is in texts (V,)."""
        return None

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        """What it guesses of a batch, by depth from 0 on, or one guess of depth ANY. batch: ids (B, T), temperature of
        texts (B,) or of their tokens (B, T), position_ids (B, T) of packed texts; of a step of training also uniforms
        (B, T), for what is drawn there, and predicted (B, T-1), whose next tokens are learnt from. No guess may depend
        on a token from its round's first new one on, but through the drafts before it, which are the text's own."""

    def proposer(self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False) -> Proposer:
        """What drafts with the network in the engine. greedy: the likeliest tokens; compile: its passes, None: on a GPU
        alone; int8: weights rounded to 8 bits. A kind that drafts trees also takes `shape`, the parents of their nodes
        (`loading.takes_shape`)."""

    def save(self, folder: Path) -> None:
        """Write the network, so that `load` finds it."""
        self.network.save_pretrained(folder)

    @classmethod
    def load(cls, folder: Path, target: PreTrainedModel | None = None, vocabulary: int | None = None) -> Self:
        """What `save` wrote, in float32."""
        network = kind_of(cls.kind).network_class.from_pretrained(folder, dtype=torch.float32)
        return cls(network, target, vocabulary)


def student_class(kind: str) -> type[Student]:
    """The class of a kind. Raises ValueError for one that is not registered."""
    if kind not in KINDS:
        raise ValueError(f"draft.kind: {kind!r} is none of {', '.join(KINDS)}")
    found: type[Student] = _named(KINDS[kind])
    return found


def prepare(plan: Any) -> None:
    """What the kind of a `measurement.Plan` has to settle, with prompts that rank, before its draft is measured."""
    if plan.kind in PREPARED:
        _named(PREPARED[plan.kind])(plan)


def shape(job: Any) -> dict[str, Any] | None:
    """Settle what the settings of a `training.job.Job` leave open of its draft's shape, before it is made; returns why,
    for the report, None where they say all."""
    kind = job.cfg.draft.kind
    found: dict[str, Any] | None = _named(SHAPED[kind])(job) if kind in SHAPED else None
    return found


def _named(place: str) -> Any:
    """The object at module:name."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def refuse_keys(draft: "Draft", *keys: str) -> None:
    """Raise ValueError for a setting that this kind of draft does not have."""
    for key in keys:
        value, nothing = getattr(draft, key), OPTIONAL.get(key)
        if value and value != nothing:
            wanted = "null" if nothing is None else nothing
            raise ValueError(f"draft.{key}={value}: {draft.kind} drafts do not have it; draft.{key}={wanted}")


def refuse_mixed(guesses: list[Guess]) -> None:
    """Raise ValueError for guesses that are neither one of depth ANY nor of depths 0, 1, ... in order."""
    depths = [guess.depth for guess in guesses]
    if depths not in ([ANY], list(range(len(depths)))) or not depths:
        raise ValueError(
            f"guesses of depths {depths}: a student makes one of depth ANY, or those of 0, 1, ... in order"
        )
