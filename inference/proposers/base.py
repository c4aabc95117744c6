"""What a proposer kind reads and returns: the interface between drafting and the engine."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.drafts.draft_folder import Metadata, load_draft
from inference.models.passes import States, Tree

if TYPE_CHECKING:
    from inference.models.lm import LM


@dataclass(frozen=True)
class Host:
    """What a proposer works beside: an engine with `rows` slots for rows and `spare` ones for prompts that wait, ids in
    [0, vocabulary), texts of at most `context` tokens. target: it may share its embeddings, head, layers and cache."""

    rows: int
    spare: int
    vocabulary: int
    context: int
    target: "LM"


@dataclass(frozen=True)
class Beside:
    """What a folder is loaded beside: the target with its `compatibility.hash_target`, and what the folder says of
    itself, where it was made here. compile: of passes, see `Engine`. tokenizer: the target's, where it is known."""

    target: PreTrainedModel
    hashes: Mapping[str, str | None]
    metadata: Metadata | None
    compile: bool | None
    tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def greedy(self) -> bool:
        """Whether the draft was made for drafting its likeliest tokens, or planned with them as children."""
        return self.metadata is not None and (
            self.metadata.objective == "greedy" or self.metadata.tree is not None and self.metadata.tree.likeliest
        )

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of the trees that it is to draft, as `Independent(shape=)` takes it; None: chains."""
        return None if self.metadata is None or self.metadata.tree is None else tuple(self.metadata.tree.parents)


class Proposal(NamedTuple):
    """x (A, N) drafted ids; q (A, N, V) the very distributions they were drawn from; k how many each row drafted.

    Entries past k_b are ignored, and so is what follows a distribution of NaN: the draft had no token there. q None:
    every draft was certain, its distribution is one-hot. Either may be on another device than the target: it is moved.
    tree: on which node each hangs (see `passes.Tree`), None for a chain, whose node i hangs on i - 1.
    """

    x: Tensor
    q: Tensor | None
    k: list[int]
    tree: Tree | None = None


class Siblings(NamedTuple):
    """Nodes of one level of a tree that have children. most: children of any of them; paths: of each the nodes from the
    anchor down; first: the number of its first child; keys (n,): its column, that is 0 of the anchor, i + 1 of node i,
    on the device of the draft."""

    most: int
    paths: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    keys: Tensor


class Outcome(NamedTuple):
    """What became of a round.

    valid: how many tokens of each row's text certainly agree with what was stored; 0: forget all of the row's slot, NaN
    may stand in it. accepted (A,) int64: drafts that each row accepted, on the target's device. states: layer ->
    (A, K+1, D) of the target's pass, column 0 at the anchor and column j at the j-th draft, along the accepted path of
    a tree; of row b columns 0 .. accepted_b hold. Valid until the target's next pass: copy what must last. path (A, D):
    of a tree, the nodes that each row accepted, -1 past the last; None after a chain.
    """

    valid: Sequence[int]
    accepted: Tensor
    states: States
    path: Tensor | None = None


class Round(Protocol):
    """One round as a proposer sees it: texts so far, how many to draft, and the only way to make distributions and
    draws."""

    k: list[int]

    @property
    def texts(self) -> Sequence[list[int]]:
        """Prompt and emitted tokens of each row."""

    def probs(self, logits: Tensor, drafted: list[Tensor]) -> Tensor:
        """Logits (A, V) after `drafted` ids (A,) each -> distribution (A, V) under each row's sampling settings."""

    def send(self, k: list[int] | None = None, **numbers: Sequence[int] | Sequence[list[int]]) -> dict[str, Tensor]:
        """Whole numbers that the proposer needs on the device, one or as many a row: they travel with what the engine
        sends, in the round's one copy, when this is the round's first call. k: drafts of each row, where they are
        not `k`. Returns them by name, and of each text's last token `anchor` (A, 1), and `read` (A,), its place."""

    @property
    def temperatures(self) -> list[float] | None:
        """Of each row, 0 for one-hot distributions, where a distribution is softmax(logits / temperature) and a draw
        its inverse CDF; None where `distribution` and `draw` do more than that."""

    @property
    def temperature(self) -> Tensor:
        """Of each row (A,), on the device, whatever else its settings are; another tensor when rows come or go."""

    def simple(self, depths: int) -> tuple[Tensor, Tensor]:
        """Uniforms (A, depths) and temperatures (A,) on the device."""

    def draw(self, probs: Tensor, depth: int) -> Tensor:
        """Ids (A,) drawn from distribution (A, V) with the noise of this depth (0-based)."""

    def children(
        self, logits: Tensor, x: Tensor, siblings: "Siblings", likeliest: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The next level of a tree of drafts: logits (A, n, V) after n nodes, x (A, M) drafted so far -> children
        (A, n, m), those to try first before the others, and the distributions (A, n, m, V) that they were drawn from.

        Drawn without replacement; the likeliest ones, with one-hot distributions, in rows of temperature 0 and where
        asked."""

    @property
    def shared(self) -> bool:
        """Whether draws take the noise that the target's own tokens are chosen with."""

    def draw_shared(self, probs: Tensor, depth: Tensor) -> Tensor:
        """Ids (A,) drawn from distribution (A, V) with that noise, at a depth (A,) of each row."""

    @property
    def reads_history(self) -> list[bool]:
        """Of each row, whether its distribution depends on its text beyond the model: `plain` is then not its
        distribution."""

    def plain(self, logits: Tensor) -> Tensor:
        """Logits (A, ..., V) -> distributions (A, ..., V) of rows whose settings read no history, whatever was
        drafted."""

    def inner(self, depths: int) -> Tensor:
        """Uniforms (3, A, depths) for rounds that a proposer verifies itself: of its draws, of its coins and of its
        last draws. No other draw or coin of the row meets them; `send` comes first."""

    def left_out(self, scores: Tensor, kept: int, levels: int) -> None:
        """Told where a dynamic tree keeps the `kept` largest of scores (A, ..., M), and no others: sums of the log
        distributions, or logits, of so many levels. Whoever checks a round learns here which choices were close."""

    def inputs(self, trees: bool = False) -> dict[str, Tensor] | None:
        """By name, the tensors that distributions and draws read, with `trees` those of children too; None where they
        read more than tensors."""

    def on(self, given: Mapping[str, Tensor]) -> "Round":
        """Its distributions and draws, read from other tensors of the names and shapes of `inputs`."""

    @property
    def key(self) -> Hashable:
        """All that distributions and draws depend on but tensors."""

    @property
    def steady(self) -> frozenset[str]:
        """Of `inputs`, those whose values change only together with their tensor."""


class Proposer:
    """What drafts. Slots [0, A) hold the active rows, in the order of every list here.

    A kind subclasses this: it must have `propose`, and whatever else it needs to hear of. In the order of a call:
    `open`; `admit`, or `stage` and later `enter`, as prompts come; then round by round `propose` and `commit`, and
    `move` as rows leave.
    reads: layers of the target's states that it wants (see `passes.Pass`), () for none: only these are made.
    greedy: whether it drafts the likeliest token, with a one-hot distribution. weights: the dtype of its own, None for
    none.
    depths: drafts of a round at most, None for no bound of its own.
    network_class: what a draft folder of this kind holds, a class with `from_pretrained`; None: no weights.
    own_tokenizer: whether the folder's tokenizer may be another than the target's.
    """

    reads: tuple[int, ...] = ()
    greedy: bool = False
    depths: int | None = None
    network_class: Any = None
    own_tokenizer = False

    @classmethod
    def load(cls, folder: Path, beside: Beside) -> "Proposer":
        """From a draft folder of this kind (`proposers.KINDS`); `inference.load` asks for it."""
        raise NotImplementedError(f"{cls.__name__}.load")

    @classmethod
    def fits(cls, network: PreTrainedModel, target: PreTrainedModel, where: str) -> None:
        """Raise ValueError, beginning with `where`, for a target that a folder's network cannot draft for. Either may
        be without storage."""

    @classmethod
    def network_beside(cls, folder: Path, beside: Beside) -> Any:
        """The network of a folder of this kind, on the target's device. Raises as `load_draft`, and as `fits`."""
        network = load_draft(folder, network=cls.network_class, target=beside.hashes)[0]
        cls.fits(network, beside.target, str(folder))
        return torch.nn.Module.to(network, beside.target.device)

    @property
    def weights(self) -> str | None:
        return None

    @property
    def context(self) -> int | None:
        """Once it is open, the most tokens of a text that it drafts for; None: no bound of its own."""
        return None

    def language_model(self, rows: int, vocabulary: int) -> "LM | None":
        """A causal LM, with slots for `rows` texts, whose distribution after a text is this proposer's at every depth:
        one teacher-forced pass then finds all of its distributions. None: forced rounds do (`exactness.forced`)."""
        return None

    def open(self, host: Host) -> None:
        """Make room for the host's rows and, in slots after theirs, its spare prompts; forget everything."""

    def admit(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        """New rows in slots low, low + 1, ...; all tokens of a prompt but its last may be stored now.

        states: layer -> (A, n, D) of the target, column j at token j of a prompt; columns past its last token but one
        are to be ignored. Valid until the target's next pass: copy what must last.
        """

    def stage(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        """As `admit`, in spare slots, of prompts that become rows later."""

    def enter(self, source: int, target: int, prompt: list[int]) -> None:
        """The prompt staged in slot `source` becomes the row of slot `target`, the first that is free."""

    def propose(self, round: Round) -> Proposal:
        """Draft up to turn.k[b] tokens a row."""
        raise NotImplementedError(f"{type(self).__name__}.propose")

    def commit(self, outcome: Outcome) -> None:
        """What became of the round's drafts; what was stored of the others is dropped."""

    def move(self, source: int, target: int) -> None:
        """Row `source`, the last one, takes slot `target`; its old slot is free."""
