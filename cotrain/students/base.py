"""The interface of a draft while it trains: which states it reads, what it predicts, and which proposer serves it.

B texts, T tokens of a text, S tokens of an encoder input, D width of the target's states, V vocabulary, N predicted
positions, n states. Position t of a text predicts token t + 1 from tokens 0 .. t; its flat position is b * T + t.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cotrain.losses.guess import ANY, Guess, Pruned
from cotrain.teacher.target_model import Seen
from inference import Engine, Sampling
from inference.models.lm import takes_int8
from inference.models.passes import LAST
from inference.models.pretrained import cast
from inference.proposers import kind_of
from inference.proposers.base import Proposer

if TYPE_CHECKING:
    from cotrain.config.drafts import Draft
    from cotrain.config.groups import Init

__all__ = ["ANY", "DEFAULT", "KINDS", "LAST", "Guess", "Seen", "Student", "Trials", "refuse_mixed", "student_class"]

DEFAULT = "independent"  # the kind of a draft folder without metadata
KINDS = {  # kind -> module:class, imported on first use
    DEFAULT: "cotrain.students.independent:IndependentStudent",
    "conditioned": "cotrain.students.conditioned:ConditionedStudent",
    "eagle": "cotrain.students.eagle:EagleStudent",
    "p_eagle": "cotrain.students.parallel:PEagleStudent",
    "early_exit": "cotrain.students.early_exit:EarlyExitStudent",
    "block": "cotrain.students.block:BlockStudent",
    "parallel": "cotrain.students.parallel:ParallelStudent",
    "medusa": "cotrain.students.heads:MedusaStudent",
    "hydra": "cotrain.students.heads:HydraStudent",
    "retrieval": "cotrain.students.retrieval:RetrievalStudent",
    "hybrid": "cotrain.students.retrieval:HybridStudent",
    "hybrid_exit": "cotrain.students.retrieval:HybridExitStudent",
    "hybrid_quantised": "cotrain.students.retrieval:HybridQuantisedStudent",
    "quantised": "cotrain.students.quantised:QuantisedStudent",
    "two_levels": "cotrain.students.quantised:TwoLevelsStudent",
}

SHAPE = ("width", "layers", "intermediate", "head_dim", "kv_heads")  # of draft.*


@dataclass(frozen=True)
class Trials:
    """The engines and prompts for `Student.calibrate`, before the draft is measured.

    drafting: proposer -> an engine that drafts with it, at the longest draft length. plain: returns an engine without a
    proposer. prompts: token ids of prompts that no measurement uses. new_tokens: how many tokens are generated after
    each prompt."""

    drafting: Callable[[Proposer], Engine]
    plain: Callable[[], Engine]
    prompts: Sequence[list[int]]
    sampling: Sampling
    new_tokens: int
    seed: int


class Student(Protocol):
    """A kind of draft while it trains. Subclasses inherit the methods that have a body here.

    network: the draft's model. target: its head, layers or embeddings may be shared with the draft.
    vocabulary: the number of ids that can have mass (None: all ids of the head).
    reads: the layers whose states the draft reads from the target. LAST is always available, because losses read it.
    open_layers: whether draft.layers may be null. Measurements before training then choose the layers.
    calibrated: whether `calibrate` must run before the draft is measured.
    rounds_target: whether it drafts with a quantised copy of the target. The target itself must then not be quantised.
    begins_with: other kinds whose folders init=pretrained accepts, because their weights have the same meaning.
    fresh: names of tensors that may be missing in those folders; they are initialised as for a new draft.
    features: the layouts (`export.engines.FEATURES`) in which a feature draft is exported; () for other kinds.
    parallel: whether one pass drafts all tokens of a round.
    sourced: whether it can draft for an encoder-decoder.
    memorises: the acceptance of the first drafted token that it learns at least on a few texts that it sees again and
    again, whatever the target (overfit=true).
    layouts: serving engine -> the module in cotrain/export that writes this kind for it. None: every engine loads this
    kind, in the plain Hugging Face layout.
    """

    kind: str
    reads: tuple[int, ...] = ()
    open_layers: bool = False
    calibrated: bool = False
    rounds_target: bool = False
    begins_with: tuple[str, ...] = ()
    fresh: frozenset[str] = frozenset()
    features: tuple[str, ...] = ()
    parallel: bool = False
    sourced: bool = False
    memorises: float = 0.95
    layouts: Mapping[str, str] | None = None
    network: PreTrainedModel
    target: PreTrainedModel | None
    vocabulary: int | None
    largest: int | None = None  # id of a pruned vocabulary, read once: a GPU is waited for

    def __init__(
        self, network: PreTrainedModel, target: PreTrainedModel | None = None, vocabulary: int | None = None
    ) -> None:
        self.network, self.target, self.vocabulary = network, target, vocabulary
        self.prepare()

    def prepare(self) -> None:
        """Set what else the kind needs, at the end of `__init__`. Raises ValueError for a network that cannot be its
        draft."""
        return None

    @classmethod
    def initial(cls, draft: "Draft", init: "Init", target: PreTrainedModel) -> PreTrainedModel:
        """Return the network before training, with the shape that the settings `draft` describe and the weights that
        `init` describes. target: the model to draft for. Raises ValueError, which names the key to change."""
        raise ValueError(f"init={init.kind}: {cls.kind} drafts cannot begin in this way: set another init=")

    def of(self, network: PreTrainedModel) -> Self:
        """Return the same student with another network, for example with weights that are sharded, rounded, or cast for
        serving."""
        return type(self)(network, self.target, self.vocabulary)

    def refuse(self) -> None:
        """Raise ValueError if the network cannot be trained as a draft of this kind."""
        return None

    def keeps_apart(self) -> bool:
        """Return whether attention stays within a text if several texts are packed into one row. A student that reads
        texts only through the target, and each position alone, returns True."""
        return True

    @property
    def known(self) -> Tensor:
        """Return (V,) bool: which ids the student can draft."""
        return torch.ones(self.vocabulary or self.network.config.get_text_config().vocab_size, dtype=torch.bool)

    @property
    def undecided(self) -> bool:
        """Return whether `know` must still choose the draft's vocabulary. This is so if draft.vocabulary= is set and no
        folder has already decided which ids it has."""
        return False

    def pruned_to(self, ids: Tensor, head: Callable[[Tensor], Tensor], size: int) -> Pruned | None:
        """Return the part of a pruned head that has finite logits. Return None if some of the head's ids must not be
        drafted, for example the padding of a target's head; losses then compute all columns.

        ids (Vd,): the token ids of the head. head: states (n, D) -> logits (n, Vd). size: the number of ids that can be
        drafted; an id from `size` on must not be.
        """
        if self.largest is None:
            self.largest = int(ids.max())
        return Pruned(ids, head, size) if self.largest < size else None

    def know(self, counts: Tensor) -> None:
        """Choose the draft.vocabulary= most frequent ids as the draft's vocabulary, in place. counts (V,): how often
        each id occurs in the texts."""
        return None

    def fit(self, texts: Iterable[Tensor]) -> None:
        """Set the weights of a draft with draft.bits= by training texts, before the first step, in place. texts: their
        token ids, (n,) each."""
        return None

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        """Return the predictions for a batch: one guess for each depth 0, 1, ..., or a single guess of depth ANY.

        batch, all on the CPU: ids (B, T); temperature, (B,) for texts or (B, T) for tokens; position_ids (B, T) if
        texts are packed; source (B, S) if the target has an encoder. A training step adds uniforms (B, T), for random
        choices, and predicted (B, T-1) bool: entry t is whether the loss counts token t + 1.
        seen: the target's states for the batch.

        A guess may depend on the text before its round. From the round's first new token on, it may depend only on the
        tokens drafted before it; in training these are the text's own tokens.

        Raises ValueError for kinds that are not trained.
        """
        raise ValueError(f"draft={self.kind} is not trained: name another draft= to train one")

    def proposer(self, *, greedy: bool = False, int8: bool = False, shape: Sequence[int] | None = None) -> Proposer:
        """Return the proposer that serves the network.

        greedy: draft the most probable tokens instead of sampled ones. int8: round weights to 8 bits (only if
        `takes_int8`). shape: for a tree, the index of each node's parent (only if `Proposer.drafts_trees`); None for
        chains.
        """
        return kind_of(self.kind)(self.network, greedy, int8=int8, shape=shape)

    @classmethod
    def takes_int8(cls, network: PreTrainedModel) -> bool:
        """Return whether `proposer(int8=True)` works for the network on this machine."""
        return takes_int8(network)

    @classmethod
    def cast(cls, network: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
        """Cast the network's weights to the dtype in which it is served, in place, and return the network."""
        return cast(network, dtype)

    def calibrate(self, proposer: Proposer, trials: Trials) -> dict[str, Any]:
        """Measure settings on the prompts of `trials`, and return them as entries of the network's config, by name; {}
        for kinds without such settings. proposer: drafts with the network."""
        return {}

    def save(self, folder: Path) -> None:
        """Write the network to a folder, from which `load` reads it. The folder is made if it is missing."""
        self.network.save_pretrained(folder)

    @classmethod
    def load(cls, folder: Path, target: PreTrainedModel | None = None, vocabulary: int | None = None) -> Self:
        """Return the student that `save` wrote, with weights in float32. target: whose head, layers or embeddings the
        draft may share; None if it shares none. vocabulary: the number of ids that can have mass; None: all ids of the
        head."""
        return cls(kind_of(cls.kind).network_class.from_pretrained(folder, dtype=torch.float32), target, vocabulary)


def student_class(kind: str) -> type[Student]:
    """Return the student class for a kind of draft. Raises ValueError for a kind that is not in KINDS."""
    if kind not in KINDS:
        raise ValueError(f"draft.kind: {kind!r} is not one of {', '.join(KINDS)}")
    module, _, name = KINDS[kind].partition(":")
    return getattr(import_module(module), name)


def refuse_keys(draft: "Draft", *keys: str) -> None:
    """Raise ValueError if any of the settings `keys` of `draft` is set. The draft does not have them with this target,
    this head or this init=."""
    for key in keys:
        if value := getattr(draft, key):
            raise ValueError(
                f"draft.{key}={value}: {draft.kind} drafts have none with this target, head or init=: set "
                f"draft.{key}=null"
            )


def refuse_mixed(guesses: list[Guess]) -> None:
    """Raise ValueError unless `guesses` is one guess of depth ANY, or one guess for each depth 0, 1, ... in order."""
    depths = [guess.depth for guess in guesses]
    if depths not in ([ANY], list(range(len(depths)))) or not depths:
        raise ValueError(
            f"guesses of depths {depths}: a student makes one of depth ANY, or those of 0, 1, ... in order"
        )
