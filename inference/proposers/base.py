"""What a proposer kind reads and returns: the interface between drafting and the engine."""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Proposal(NamedTuple):
    """x (A, K) drafted ids; q (A, K, V) the very laws they were drawn from; k how many each row drafted.

    Entries past k_b are ignored, and so is what follows a law of NaN: the draft had no token there. q None: every draft
    was certain, its law is one-hot. Either may be on another device than the target: it is moved.
    """

    x: Tensor
    q: Tensor | None
    k: list[int]


class Round(Protocol):
    """One round as a proposer sees it: texts so far, how many to draft, and the only way to make laws and draws."""

    k: list[int]

    @property
    def texts(self) -> Sequence[list[int]]:
        """Prompt and emitted tokens of each row."""

    def law(self, logits: Tensor, drafted: list[Tensor]) -> Tensor:
        """Logits (A, V) after `drafted` ids (A,) each -> law (A, V) under each row's sampling settings."""

    def send(self, k: list[int] | None = None, **numbers: Sequence[int] | Sequence[list[int]]) -> dict[str, Tensor]:
        """Whole numbers that the proposer needs on the device, one or as many a row: they travel with what the engine
        sends, in the round's one copy, when this is the round's first call. k: drafts of each row, where they are
        not `k`. Returns them by name, and `read` (A,), the place of each text's last token."""

    @property
    def temperatures(self) -> list[float] | None:
        """Of each row, 0 for one-hot laws, where a law is softmax(logits / temperature) and a draw its inverse CDF;
        None where `law` and `draw` do more than that."""

    def simple(self, depths: int) -> tuple[Tensor, Tensor]:
        """Uniforms (A, depths) and temperatures (A,) on the device."""

    def draw(self, law: Tensor, depth: int) -> Tensor:
        """Ids (A,) drawn from law (A, V) with the noise of this depth (0-based)."""

    def inputs(self) -> dict[str, Tensor] | None:
        """By name, the tensors that laws and draws read; None where they read more than tensors."""

    def on(self, given: Mapping[str, Tensor]) -> "Round":
        """Its laws and draws, read from other tensors of the names and shapes of `inputs`."""

    @property
    def key(self) -> Hashable:
        """All that laws and draws depend on but tensors."""

    @property
    def steady(self) -> frozenset[str]:
        """Of `inputs`, those whose values change only together with their tensor."""


class Proposer(Protocol):
    """Slots [0, A) hold the active rows, in the order of every list here."""

    def open(self, rows: int, vocabulary: int, context: int, spare: int = 0) -> None:
        """Make room for `rows` rows and, in slots after theirs, `spare` prompts; forget everything."""

    def admit(self, low: int, prompts: Sequence[list[int]]) -> None:
        """New rows in slots low, low + 1, ...; all tokens of a prompt but its last may be stored now."""

    def stage(self, low: int, prompts: Sequence[list[int]]) -> None:
        """Prompts that may be stored now in spare slots low, low + 1, ..., to become rows later."""

    def enter(self, source: int, target: int, prompt: list[int]) -> None:
        """The prompt staged in slot `source` becomes the row of slot `target`, the first that is free."""

    def propose(self, turn: Round) -> Proposal:
        """Draft up to turn.k[b] tokens a row."""

    def commit(self, valid: Sequence[int]) -> None:
        """valid[b] tokens of row b's text are now certain to agree with what was stored; drop the rest. 0: forget all
        of the row, NaN may stand in what was stored."""

    def move(self, source: int, target: int) -> None:
        """Request `source` takes slot `target`; its old slot is free."""
