"""The interface between drafting and the engine: what a proposer receives and what it returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from inference.drafts.draft_folder import Metadata, load_draft
from inference.models.passes import States
from inference.verify.tree import Tree

if TYPE_CHECKING:
    from inference.models.lm import LM
    from inference.models.replay import Pure

Numbers = Sequence[int] | Sequence[list[int]]  # for each row one number, or a list of equal length


@dataclass(frozen=True)
class Host:
    """The engine that a proposer drafts for. rows: number of slots for rows. spare: number of slots for prompts that
    wait. vocabulary: ids are in [0, vocabulary). context: the largest number of tokens per text. target: the LM of the
    target; a proposer may use its embeddings, head, layers and cache."""

    rows: int
    spare: int
    vocabulary: int
    context: int
    target: "LM"


@dataclass(frozen=True)
class LoadArguments:
    """The arguments of `Proposer.load` besides the folder. target: the target's model. hashes: its
    `compatibility.hash_target`. metadata: the folder's metadata, None for a folder that was not exported by this
    package. compile: whether passes are compiled, see `Engine`."""

    target: PreTrainedModel
    hashes: Mapping[str, str | None]
    metadata: Metadata | None
    compile: bool | None

    @property
    def greedy(self) -> bool:
        """Return whether the draft was trained to draft its likeliest tokens, or planned with a tree of likeliest
        children."""
        return self.metadata is not None and (
            self.metadata.objective == "greedy" or self.metadata.tree is not None and self.metadata.tree.likeliest
        )

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Return the planned tree of drafts, in the form of `Independent(shape=)`, or None for chains."""
        return None if self.metadata is None or self.metadata.tree is None else tuple(self.metadata.tree.parents)


class Proposal(NamedTuple):
    """The drafts of a round. x (A, N): drafted ids. q (A, N, V): the exact distributions that they were drawn from. k:
    the number of drafts per row. tree: the parent of each node (see `Tree`), None for a chain, whose node i has parent
    i - 1.

    A distribution of NaN means that the draft had no token there. Entries after it, and entries past k_b, are ignored.
    If q is None, every draft is deterministic, with a one-hot distribution. x and q may be on another device than the
    target; the engine moves them.
    """

    x: Tensor
    q: Tensor | None
    k: list[int]
    tree: Tree | None = None


class Siblings(NamedTuple):
    """The n nodes of one level of a tree that have children. most: the largest number of children. paths: for each
    node, the nodes on the path from the anchor down to it. first: for each node, the number of its first child. keys
    (n,): for each node, its column in a pass, on the device of the draft; 0 for the anchor and i + 1 for node i."""

    most: int
    paths: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    keys: Tensor


class Outcome(NamedTuple):
    """The outcome of a round.

    valid: for each row, how many tokens of its text agree with the stored keys and values; 0 means that the slot may
    contain NaN and must be discarded. accepted (A,): number of accepted drafts per row, int64, on the target's device.
    path (A, D): the accepted nodes of each row's tree, -1 past the last; None for a chain.

    states: layer -> (A, K+1, D), states of the target's pass, where D is their width. Column 0 is the anchor, column j
    the j-th draft along the accepted path. Only columns 0 .. accepted_b of row b have a meaning. The states are valid
    until the target's next pass; copy them if they are needed later.
    """

    valid: Sequence[int]
    accepted: Tensor
    states: States
    path: Tensor | None = None


class Round(Protocol):
    """One round as a proposer sees it: the texts so far, how many tokens to draft, and the only functions for
    distributions and draws.

    k: for each row, the largest number of drafts. A rows, V vocabulary.
    """

    k: list[int]

    @property
    def texts(self) -> Sequence[list[int]]:
        """Return the ids of each row's text: prompt and emitted tokens."""

    def probs(self, logits: Tensor, drafted: list[Tensor] | None) -> Tensor:
        """Return the distributions (A, V) of the next token under each row's sampling settings.

        logits (A, V): those after the texts and `drafted`. drafted: the ids (A,) of each draft so far. If it is None,
        logits (A, ..., V) give distributions of this shape, and only the settings that do not read the text are
        applied.
        """

    def send(self, k: list[int] | None = None, **numbers: Numbers) -> dict[str, Tensor]:
        """Copy whole numbers to the device: for each name, one number per row or equally many. The round's first call
        also copies the engine's own numbers, so that a round makes one copy. k: drafts per row, if they differ from the
        round's `k`.

        Returns the tensors by name, with the last token of each text as `anchor` (A, 1) and its position as `read`
        (A,).
        """

    @property
    def temperature(self) -> Tensor:
        """Return the temperature of each row (A,), on the device, whatever the other settings are. The tensor is a new
        object if rows have come or gone."""

    def draw(self, probs: Tensor, depth: int | Tensor) -> Tensor:
        """Return ids (A,) drawn from distributions (A, V). depth: the depth (0-based) of these drafts, or one depth per
        row (A,); it decides which random numbers are used."""

    def children(
        self, logits: Tensor, x: Tensor, siblings: "Siblings", likeliest: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the next level of a tree: children (A, n, m) in the order of verification, and the distributions (A,
        n, m, V) that they were drawn from.

        logits (A, n, V): those after n nodes. x (A, M): ids drafted so far. siblings: which nodes they are. The
        children are drawn without replacement. Rows of temperature 0, or all rows if `likeliest`, get the likeliest
        tokens with one-hot distributions.
        """

    def goes_on(self, depth: int) -> bool:
        """Return whether to draft another token after the draft of this depth (0-based), whose `probs` were computed.
        Draft models that make one pass per token ask this before each pass."""

    @property
    def reads_history(self) -> list[bool]:
        """Return, for each row, whether its settings read the text."""

    def inner(self, depths: int) -> Tensor | None:
        """Return uniforms (3, A, depths) for rounds that a proposer verifies itself: for its drafts, its acceptance
        tests and its last tokens. No other draw or test of the row uses them. Call `send` first.

        Return None if drafts are drawn with the noise of the target's tokens, as these rounds must then do too.
        """

    def pure(self, depths: int = 0, greedy: bool = False, simple: bool = False, trees: bool = False) -> "Pure | None":
        """Return the round as a function of the tensors that it reads, or None if it reads anything else.

        depths: the number of drafts that uniforms are needed for. greedy: whether the proposer drafts the likeliest
        tokens, whatever the settings are. simple: whether to return a round that depends on uniforms and temperatures
        alone (`step.Tempered`), or None if the distributions or draws depend on other settings. trees: whether the
        proposer draws children.
        """


class RoundView:
    """A round for one part of a proposer, to be subclassed. It implements `Round`: methods that a subclass does not
    override call those of `round`. k: drafts per row."""

    def __init__(self, round: Round, k: list[int]) -> None:
        self.round, self.k = round, k

    @property
    def texts(self) -> Sequence[list[int]]:
        return self.round.texts

    def probs(self, logits: Tensor, drafted: list[Tensor] | None) -> Tensor:
        return self.round.probs(logits, drafted)

    def send(self, k: list[int] | None = None, **numbers: Numbers) -> dict[str, Tensor]:
        return self.round.send(k, **numbers)

    @property
    def temperature(self) -> Tensor:
        return self.round.temperature

    def draw(self, probs: Tensor, depth: int | Tensor) -> Tensor:
        return self.round.draw(probs, depth)

    def children(self, logits: Tensor, x: Tensor, siblings: Siblings, likeliest: bool = False) -> tuple[Tensor, Tensor]:
        return self.round.children(logits, x, siblings, likeliest)

    def goes_on(self, depth: int) -> bool:
        return self.round.goes_on(depth)

    @property
    def reads_history(self) -> list[bool]:
        return self.round.reads_history

    def inner(self, depths: int) -> Tensor | None:
        return self.round.inner(depths)

    def pure(self, depths: int = 0, greedy: bool = False, simple: bool = False, trees: bool = False) -> "Pure | None":
        return self.round.pure(depths, greedy, simple, trees)


class Proposer:
    """A maker of drafts. Each kind of draft is a subclass, which must define `propose` and those of the other methods
    that it needs. Slots [0, A) hold the active rows; all lists of rows are in this order.

    An engine's call runs `open`. When prompts come, it runs `admit`, or `stage` and later `enter`. In each round it
    runs `propose` and `commit`, and when rows leave, `move`.

    reads: the layers whose states the target's passes must return (see `passes.Pass`), () for none. greedy: whether the
    proposer drafts the likeliest token, with a one-hot distribution. weights: the dtype of the draft's weights, None if
    it has no weights. depths: the largest number of drafts per round, None for no limit. catches_up: whether `propose`
    reads all ids that a slot lacks. While a policy drafts nothing, such a proposer gets the first token of each prompt
    alone, so its model does not read the prompt. network_class: the class, with `from_pretrained`, of the network in a
    draft folder of this kind; None for no weights. drafts_trees: whether the constructor accepts `shape=`, the tree to
    draft.
    """

    reads: tuple[int, ...] = ()
    greedy: bool = False
    depths: int | None = None
    catches_up = False
    network_class: Any = None
    drafts_trees = False

    @property
    def asks(self) -> bool:
        """Return whether the proposer calls `Round.probs` and `Round.goes_on` for each draft in turn, so that an
        adaptive policy can end the round after any draft. The value is known after `open`."""
        return False

    @classmethod
    def load(cls, folder: Path, arguments: LoadArguments) -> "Proposer":
        """Return a proposer for a draft folder of this kind (`proposers.KINDS`). `inference.load` calls this. Raises
        ValueError or OSError for a folder that cannot be read or does not fit the target."""
        raise NotImplementedError(f"{cls.__name__}.load")

    @classmethod
    def fits(cls, network: PreTrainedModel, target: PreTrainedModel, where: str) -> None:
        """Raise ValueError, beginning with `where`, if the network of a folder cannot draft for the target. Both models
        may be on the meta device."""

    @classmethod
    def load_network(cls, folder: Path, arguments: LoadArguments) -> Any:
        """Return the network of a folder of this kind, on the target's device. Raises the errors of `load_draft` and of
        `fits`."""
        network = load_draft(folder, network=cls.network_class, target=arguments.hashes)[0]
        cls.fits(network, arguments.target, str(folder))
        return torch.nn.Module.to(network, arguments.target.device)

    @property
    def weights(self) -> str | None:
        return None

    @property
    def context(self) -> int | None:
        """Return the longest text, in tokens, for which this proposer drafts, or None for no limit. The value is known
        after `open`."""
        return None

    def language_model(self, rows: int, vocabulary: int) -> "LM | None":
        """Return a causal LM, with slots for `rows` texts and ids in [0, vocabulary), whose distribution after a text
        is the proposer's at every depth. One teacher-forced pass of it then gives all distributions of the proposer.
        Return None if there is no such LM; then forced rounds give the distributions (`exactness.forced`)."""
        return None

    def open(self, host: Host) -> None:
        """Allocate slots for the host's rows and, after them, for its waiting prompts, and drop the state of earlier
        calls."""

    def admit(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        """Accept new rows in slots low, low + 1, ... All tokens of a prompt but its last may be stored now. Prompts of
        an encoder-decoder are texts of its decoder, which carry their source (`inference.source`).

        states: layer -> (A, n, D), the target's states of the prompts, column j for token j. Ignore columns from the
        prompt's last token on. The states are valid until the target's next pass; copy them if they are needed later.
        """

    def stage(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        """Accept prompts that become rows later. The arguments are those of `admit`, but the slots are spare ones."""

    def enter(self, source: int, target: int, prompt: list[int]) -> None:
        """Make the prompt that is staged in slot `source` the row of slot `target`, which is the first free slot."""

    def propose(self, round: Round) -> Proposal:
        """Return up to round.k[b] drafts for each row b."""
        raise NotImplementedError(f"{type(self).__name__}.propose")

    def commit(self, outcome: Outcome) -> None:
        """Receive the outcome of the round, and drop the keys and values of rejected drafts."""

    def move(self, source: int, target: int) -> None:
        """Move the last row from slot `source` to slot `target`. Slot `source` is then free."""


class CompositeProposer(Proposer):
    """A proposer of several parts. Every call except `propose` is passed on to every part, whichever part drafted."""

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


class SettingsNetwork(PreTrainedModel):
    """The network of a kind of draft that has no weights. It has only a config, whose class each kind sets."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.nothing = torch.nn.Parameter(torch.zeros(()), requires_grad=False)  # gives it a device and a dtype
        self.generation_config = GenerationConfig()
        self.post_init()

    def get_input_embeddings(self) -> Any:
        """Return None, since there are no weights."""
        return None

    def get_output_embeddings(self) -> Any:
        """Return None, since there are no weights."""
        return None
