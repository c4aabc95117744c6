"""The interface between drafting and the engine: what a proposer receives and what it returns. A slot stores the state
of one row, such as its keys and values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from inference.drafts.draft_folder import Metadata, load_draft
from inference.models.passes import ChainDraws, States
from inference.verify.tree import Tree

if TYPE_CHECKING:
    from inference.models.lm import LM
    from inference.models.replay import Pure

Numbers = Sequence[int] | Sequence[list[int]]  # for each row one number, or a list of equal length


@dataclass(frozen=True)
class Host:
    """The engine that a proposer drafts for. rows: number of slots for active rows. spare: number of slots for prompts
    that wait. vocabulary: token ids are in [0, vocabulary). context: the largest number of tokens per text. target: the
    target's LM; a proposer may use its embeddings, head, layers and cache."""

    rows: int
    spare: int
    vocabulary: int
    context: int
    target: "LM"


@dataclass(frozen=True)
class LoadArguments:
    """The arguments of `Proposer.load` besides the folder. target: the target's model. hashes: the SHA-256 hashes of
    the target's config and tokenizer, by name (the result of `compatibility.hash_target`). metadata: the folder's
    metadata; None if this package did not export the folder."""

    target: PreTrainedModel
    hashes: Mapping[str, str | None]
    metadata: Metadata | None

    @property
    def greedy(self) -> bool:
        """Return whether the draft was trained to draft its likeliest tokens, or planned with a tree of likeliest
        children."""
        return self.metadata is not None and (
            self.metadata.objective == "greedy" or self.metadata.tree is not None and self.metadata.tree.likeliest
        )

    @property
    def int8(self) -> bool:
        """Return whether the draft was measured in 8 bits."""
        return self.metadata is not None and self.metadata.int8

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Return the planned tree of drafts, as the parent of each node (-1 for the text), or None for chains."""
        return None if self.metadata is None or self.metadata.tree is None else tuple(self.metadata.tree.parents)


class Proposal(NamedTuple):
    """The drafts of a round. x (A, N): drafted ids. q (A, N, V): the exact distributions that they were drawn from;
    q[:, i] for draft x[:, i]. k: for each row, its number of drafts. tree: the parent of each node (see `Tree`); None
    for a chain, in which node i has parent i - 1.

    NaN in a distribution means that the row could draft no token there. Entries after it, and entries past a row's k,
    are ignored. If q is None, every draft is deterministic, with a one-hot distribution. x and q may be on another
    device than the target; the engine moves them.
    """

    x: Tensor
    q: Tensor | None
    k: list[int]
    tree: Tree | None = None

    @classmethod
    def empty(cls, k: list[int], device: torch.device) -> "Proposal":
        """Return a proposal without drafts. k: 0 for each row. device: of the drafts."""
        return cls(torch.empty(len(k), 0, dtype=torch.int64, device=device), None, k)


class Siblings(NamedTuple):
    """The n nodes of one level of a tree that have children. most: the largest number of children. paths: for each
    node, the nodes on the path down to it from the text's last token (the anchor). first: for each node, the index of
    its first child in the tree. keys (n,): for each node, its column in a pass (0 for the anchor, i + 1 for node i), on
    the draft model's device."""

    most: int
    paths: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    keys: Tensor


class Outcome(NamedTuple):
    """The outcome of a round.

    valid: for each row, how many tokens at the start of its text the target's slot holds keys and values of. 0 means
    that the row's slots may contain NaN and must be cleared. accepted (A,): number of accepted drafts per row, int64,
    on the target's device. path (A, L), L levels: the accepted nodes of each row's tree, then -1; None for a chain.

    states: by layer, the target pass's states (A, K+1, D), D their width. Column 0 belongs to the text's last token
    (the anchor), column j to the j-th draft of the accepted path. In row b only columns 0 to accepted[b] have a
    meaning. The states are valid until the target's next pass; copy them if they are needed later.
    """

    valid: Sequence[int]
    accepted: Tensor
    states: States
    path: Tensor | None = None


class Round(Protocol):
    """One round as a proposer sees it: the texts so far, how many tokens to draft, and the functions for distributions
    and draws. A proposer must use no other ones.

    k: for each row, the largest number of drafts. A active rows, V vocabulary.
    """

    k: list[int]

    @property
    def texts(self) -> Sequence[list[int]]:
        """Return the ids of each row's text: prompt and emitted tokens."""

    def probs(self, logits: Tensor, drafted: list[Tensor] | None) -> Tensor:
        """Return the distributions (A, V) of the next token under each row's sampling settings.

        logits (A, V): after each row's text and drafts. drafted: for each draft so far, its ids (A,), in order. If it
        is None, logits may have any shape (A, ..., V), and only the settings that do not read the text are applied.
        """

    def send(self, k: list[int] | None = None, **numbers: Numbers) -> dict[str, Tensor]:
        """Copy whole numbers to the device: for each name, one number per row, or a list of equal length per row. The
        round's first call also copies the engine's own numbers, so that a round makes one copy. k: drafts per row, if
        they differ from the round's `k`.

        Returns the tensors by name: (A,) or (A, n) for `numbers`, the last token of each text as `anchor` (A, 1), and
        its position (0-based) as `read` (A,).
        """

    @property
    def temperature(self) -> Tensor:
        """Return the temperature of each row (A,), on the device, whatever the other settings are. The tensor is a new
        object if rows have come or gone."""

    def draw(self, probs: Tensor, depth: int | Tensor) -> Tensor:
        """Return ids (A,) drawn from distributions (A, V). depth: the depth (0-based) of these drafts, or one depth per
        row (A,); it decides which random numbers are used. probs (A, V): the distributions."""

    def children(
        self, logits: Tensor, x: Tensor, siblings: "Siblings", likeliest: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the next level of a tree: the ids of children (A, n, m) in the order of verification, and the
        distributions (A, n, m, V) that they were drawn from.

        logits (A, n, V): after n nodes. x (A, M): ids drafted so far. siblings: names the n nodes; m is its `most`.
        Children are drawn without replacement. Rows of temperature 0, or all rows if `likeliest`, get the likeliest
        tokens with one-hot distributions.
        """

    def goes_on(self, depth: int) -> bool:
        """Return whether to draft another token after the draft at `depth` (0-based), whose distributions `probs` has
        computed. Draft models that make one pass per token ask this before each pass. It is always True unless a policy
        decides after each draft."""

    @property
    def decides(self) -> bool:
        """Return whether a policy decides after each draft (`goes_on`)."""

    @property
    def reads_history(self) -> list[bool]:
        """Return, for each row, whether its settings read the text."""

    @property
    def reads_ids(self) -> bool:
        """Return whether distributions or draws depend on the tokens' ids, and not on the logits alone. If not, `probs`
        and `draw` accept logits of any part of the vocabulary, in the order of the ids."""

    def inner(self, depths: int) -> Tensor | None:
        """Return uniforms (3, A, depths) for inner rounds, which a proposer verifies itself: for their drafts, their
        acceptance tests and their last tokens. No other draw or test of the row uses them. Call `send` first.

        Return None if drafts share the noise of the target's tokens; inner rounds must then use that noise too.
        """

    def chain_draws(self, depths: int, greedy: bool) -> ChainDraws | None:
        """Return what draws the drafts of chains, or None if their distributions or draws depend on other settings than
        temperature and top-p. depths: number of drafts. greedy: whether the proposer drafts the likeliest tokens,
        whatever the settings are."""

    def pure(self, depths: int = 0, trees: bool = False) -> "Pure | None":
        """Return the round as a function of the tensors that it reads, or None if it reads anything else (as the user's
        processors do). depths: number of drafts that need uniforms. trees: whether the proposer draws children."""


class RoundView:
    """A round for one part of a proposer, to be subclassed. It implements `Round`: what a subclass does not define is
    that of `round`. k: for each row, the largest number of drafts."""

    def __init__(self, round: Round, k: list[int]) -> None:
        self.round, self.k = round, k

    def __getattr__(self, name: str) -> Any:
        return getattr(self.round, name)


class Proposer:
    """A maker of drafts. Each kind of draft is a subclass. It must define `propose`, and may define the other methods.
    Slots [0, A) hold the active rows; all lists of rows are in this order.

    An engine runs `open` when a call begins. When prompts come, it runs `admit`, or `stage` and later `enter`. It runs
    `propose` and `commit` in each round, and `move` when rows leave.

    reads: the layers whose states the target pass must return (see `passes.Pass`), () for none. greedy: whether the
    proposer drafts the likeliest token, with a one-hot distribution. weights: the dtype of the draft's weights, None if
    it has no weights. depths: the largest number of drafts per round, None for no limit. catches_up: whether `propose`
    reads all ids that a slot lacks. Such a proposer gets only the first token of each prompt while a policy drafts
    nothing, so that its model need not read the prompt. network_class: the class, with `from_pretrained`, of the
    network in a draft folder of this kind; None for no weights. drafts_trees: whether the constructor accepts `shape=`,
    the tree to draft. shortens: whether it drafts fewer tokens than the round allows where fewer are expected to pay.
    """

    reads: tuple[int, ...] = ()
    greedy: bool = False
    depths: int | None = None
    catches_up = False
    network_class: Any = None
    drafts_trees = False
    shortens = False

    @property
    def asks(self) -> bool:
        """Return whether the proposer calls `Round.probs` and `Round.goes_on` for each draft in turn, so that an
        adaptive policy can end the round after any draft. The value is known after `open`."""
        return False

    @classmethod
    def load(cls, folder: Path, arguments: LoadArguments) -> "Proposer":
        """Return a proposer for a draft folder of this kind; `inference.load` calls this. arguments: the target and how
        it is served. Raises OSError for a folder that cannot be read, and ValueError for one that is wrong or does not
        fit the target."""
        raise NotImplementedError(f"{cls.__name__}.load")

    @classmethod
    def fits(cls, network: PreTrainedModel, target: PreTrainedModel, where: str) -> None:
        """Raise ValueError if a folder's network cannot draft for the target: sizes, layers or ids differ. where: the
        start of the message. Both models may be on the meta device."""

    @classmethod
    def load_network(cls, folder: Path, arguments: LoadArguments) -> Any:
        """Return the network in a folder of this kind, on the target's device. Raises FileNotFoundError if the folder
        does not exist, and ValueError if its files or weights are damaged, if they belong to another kind, or if the
        network or tokenizer does not fit the target."""
        network = load_draft(folder, network=cls.network_class, target=arguments.hashes, model=arguments.target)[0]
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
        """Return a causal LM whose distribution after a text is the proposer's distribution at every depth. One
        teacher-forced pass of this LM then gives all distributions of the proposer. Return None if there is no such LM;
        `exactness.forced` then gets the distributions from forced rounds. rows: number of texts. vocabulary: ids are in
        [0, vocabulary)."""
        return None

    @property
    def for_forced_rounds(self) -> "Proposer":
        """Return a proposer whose drafts have the distributions of this one's, and which makes each by `Round.draw` or
        `Round.children`, as forced rounds need (`exactness.forced`)."""
        return self

    def open(self, host: Host) -> None:
        """Begin a call: drop the state of earlier calls, and allocate slots for the host's rows and, after them, for
        its waiting prompts. host: the engine's sizes and its target."""

    def admit(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        """Accept new rows in slots low, low + 1, ... Every token of a prompt except the last may be stored now. For an
        encoder-decoder, the prompts are its decoder's texts, each with its source (`inference.source`).

        states: by layer, the target's states (A, n, D) at the prompts' tokens, column j for token j, D their width.
        Ignore columns from the prompt's last token on. The states are valid until the target's next pass; copy them if
        they are needed later.
        """

    def stage(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        """Accept prompts that become rows later, in spare slots low, low + 1, ... states: by layer, the target's states
        (A, n, D) at the prompts' tokens, as in `admit`."""

    def enter(self, source: int, target: int, prompt: list[int]) -> None:
        """Turn a staged prompt into an active row: move its state from the spare slot `source` to `target`, the first
        free slot. prompt: its token ids."""

    def propose(self, round: Round) -> Proposal:
        """Return the drafts of a round, at most round.k[b] for row b, with the distributions that they were drawn from.
        Row b of the round is in slot b."""
        raise NotImplementedError(f"{type(self).__name__}.propose")

    def commit(self, outcome: Outcome) -> None:
        """Receive the outcome of the round. Drop the keys and values of rejected drafts."""

    def move(self, source: int, target: int) -> None:
        """Move the last row from slot `source` to slot `target`. Slot `source` is then free."""


class CompositeProposer(Proposer):
    """A proposer of several parts. `open`, `admit`, `stage`, `enter`, `commit` and `move` call the same method of every
    part, whichever part drafted."""

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
