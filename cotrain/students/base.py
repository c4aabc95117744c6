"""What a kind of draft is while it trains: what it reads of the target, its guesses, the proposer that serves it.

B texts, T tokens, D width of the target's states, V vocabulary, N guesses. Position t of a text predicts its token
t + 1, given tokens 0 .. t; flat positions are b * T + t.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cotrain.losses.guess import ANY, Guess
from cotrain.teacher.target_model import Seen
from inference import Engine, Sampling
from inference.models.passes import LAST
from inference.proposers import kind_of
from inference.proposers.base import Proposer

if TYPE_CHECKING:
    from cotrain.config.groups import Draft, Init

__all__ = ["ANY", "DEFAULT", "KINDS", "LAST", "Guess", "Seen", "Student", "Trials", "refuse_mixed", "student_class"]

DEFAULT = "independent"  # the kind of a draft folder without metadata
KINDS = {  # kind -> module:class, imported on first use
    DEFAULT: "cotrain.students.independent:IndependentStudent",
    "conditioned": "cotrain.students.conditioned:ConditionedStudent",
    "eagle": "cotrain.students.eagle:EagleStudent",
    "p_eagle": "cotrain.students.parallel:PEagleStudent",
    "early_exit": "cotrain.students.early_exit:EarlyExitStudent",
    "parallel": "cotrain.students.parallel:ParallelStudent",
    "medusa": "cotrain.students.heads:MedusaStudent",
    "hydra": "cotrain.students.heads:HydraStudent",
    "retrieval": "cotrain.students.retrieval:RetrievalStudent",
    "hybrid": "cotrain.students.retrieval:HybridStudent",
    "quantised": "cotrain.students.quantised:QuantisedStudent",
    "two_levels": "cotrain.students.quantised:TwoLevelsStudent",
}

# settings that only some kinds have (`Student.takes`) -> their value if unset
OPTIONAL: dict[str, Any] = {
    "datastore": None, "shortest": 2, "rank": 0, "depths": None, "vocabulary": None, "bits": None, "inner": None,
    "temperatures": [],
}  # fmt: skip


@dataclass(frozen=True)
class Trials:
    """What a benchmark grants a kind that calibrates itself before it is measured: engines compiled as they will be
    served, with a proposer at the longest draft length and without one, and prompts that are never timed."""

    drafting: Callable[[Proposer], Engine]
    plain: Callable[[], Engine]
    prompts: Sequence[list[int]]
    sampling: Sampling
    new_tokens: int
    seed: int


class Student(Protocol):
    """A kind of draft. Its class is called with (network, target, vocabulary): the target whose head, layers or
    embeddings it may share, and the number of ids that have mass (None: all of the head's). A kind inherits the methods
    that have a body here.

    takes: the settings of `OPTIONAL` that it has; others raise. reads: layers of the target's states that it reads
    besides LAST, which losses read anyway. trained: False for kinds that are measured and exported without training.
    open_layers: whether draft.layers may be null, to be chosen by measurements before training. calibrated: whether
    `calibrate` sets it before it is measured. rounds_target: whether it drafts with the target in fewer bits, so that
    the target must be whole. begins_with: other kinds whose folders it can begin with (init=pretrained), since their
    weights mean the same; fresh: tensors that those lack, which begin as without a folder. sized: whether draft.width
    and the other sizes are read with init=scratch alone. features: whether its folder is exported in the layouts of
    feature drafts, `export.engines.FEATURES`; parallel: whether a round drafts all its tokens in one pass; layouts: the
    serving engines that load this kind -> the module of cotrain/export that writes what they load, None: every engine,
    in the plain Hugging Face layout.
    """

    kind: str
    takes: tuple[str, ...] = ()
    reads: tuple[int, ...] = ()
    trained: bool = True
    open_layers: bool = False
    calibrated: bool = False
    rounds_target: bool = False
    begins_with: tuple[str, ...] = ()
    fresh: frozenset[str] = frozenset()
    sized: bool = False
    features: bool = False
    parallel: bool = False
    layouts: Mapping[str, str] | None = None
    network: PreTrainedModel
    target: PreTrainedModel | None
    vocabulary: int | None

    def __init__(
        self, network: PreTrainedModel, target: PreTrainedModel | None = None, vocabulary: int | None = None
    ) -> None:
        self.network, self.target, self.vocabulary = network, target, vocabulary

    @classmethod
    def initial(cls, draft: "Draft", init: "Init", target: PreTrainedModel) -> PreTrainedModel:
        """The network before training. Raises ValueError naming the wrong key."""
        raise ValueError(f"draft.kind: {cls.kind} cannot be made from init={init.kind}")

    def of(self, network: PreTrainedModel) -> Self:
        """The same student with other weights: sharded, rounded, or cast for serving."""
        return type(self)(network, self.target, self.vocabulary)

    def refuse(self) -> None:
        """Raise ValueError for a network that this kind cannot train."""
        return None

    def keeps_apart(self) -> bool:
        """Whether texts packed into one row are read as if alone, see `target_model.keeps_apart`. True for a student
        that reads texts only through the target."""
        return True

    @property
    def known(self) -> Tensor:
        """Which ids (V,) it can draft, bool."""
        size = self.vocabulary or self.network.config.get_text_config().vocab_size
        return torch.ones(size, dtype=torch.bool)

    def know(self, counts: Tensor) -> None:
        """Choose the `draft.vocabulary` ids of a pruned vocabulary by the counts of ids in texts (V,)."""
        return None

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        """Its predictions of a batch: one guess a depth, from 0 on, or one of depth ANY.

        batch: ids (B, T), temperature of texts (B,) or of their tokens (B, T), position_ids (B, T) of packed texts; in
        a training step also uniforms (B, T), for random choices, and predicted (B, T-1), which next tokens are learnt
        from. Of the tokens from its round's first new one on, a guess may depend only on the drafts before it, which
        are the text's own tokens.
        """

    def proposer(self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False) -> Proposer:
        """The proposer that serves the network. greedy: draft the most probable tokens; compile: its passes, None: on a
        GPU only; int8: round weights to 8 bits. A kind that drafts trees also takes `shape`, the parents of their nodes
        (`Proposer.drafts_trees`)."""

    def calibrate(self, proposer: Proposer, trials: Trials) -> dict[str, Any]:
        """Settings of the network's config that are calibrated on ranking prompts, with this kind's proposer."""
        return {}

    def save(self, folder: Path) -> None:
        """Write the network for `load`."""
        self.network.save_pretrained(folder)

    @classmethod
    def load(cls, folder: Path, target: PreTrainedModel | None = None, vocabulary: int | None = None) -> Self:
        """The student that `save` wrote, in float32."""
        network = kind_of(cls.kind).network_class.from_pretrained(folder, dtype=torch.float32)
        return cls(network, target, vocabulary)


def student_class(kind: str) -> type[Student]:
    """The class of a kind. Raises ValueError for a kind that is not registered."""
    if kind not in KINDS:
        raise ValueError(f"draft.kind: {kind!r} is none of {', '.join(KINDS)}")
    module, _, name = KINDS[kind].partition(":")
    student: type[Student] = getattr(import_module(module), name)
    return student


def refuse_keys(draft: "Draft", *keys: str) -> None:
    """Raise ValueError for a setting that this kind of draft does not have."""
    for key in keys:
        value, unset = getattr(draft, key), OPTIONAL.get(key)
        if value and value != unset:
            default = "null" if unset is None else unset
            raise ValueError(f"draft.{key}={value}: {draft.kind} drafts do not have it; draft.{key}={default}")


def refuse_mixed(guesses: list[Guess]) -> None:
    """Raise ValueError unless there is one guess of depth ANY, or one of each depth 0, 1, ... in order."""
    depths = [guess.depth for guess in guesses]
    if depths not in ([ANY], list(range(len(depths)))) or not depths:
        raise ValueError(
            f"guesses of depths {depths}: a student makes one of depth ANY, or those of 0, 1, ... in order"
        )
