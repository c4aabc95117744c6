"""Early exit: the target's first layers draft, on the target's own keys and values.

What the target stored of a text is what its first layers would store, so a draft begins from it: nothing is read twice,
and nothing is held beside. Drafts are written into the target's slots, where the pass that verifies them writes its own
keys and values before it reads any: its text is what it is without a draft, to the bit.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from inference.models.forward import Lean
from inference.models.lm import LM
from inference.models.passes import States
from inference.proposers.base import Beside, Host, Outcome, Proposal, Round
from inference.proposers.early_exit_network import ExitNetwork, serving
from inference.proposers.growing import Shape
from inference.proposers.independent import Independent

if TYPE_CHECKING:
    from inference.models.cache import SlotCache


class EarlyExit(Independent):
    """Drafts with the first layers of the target that it stands beside (LayerSkip: Elhoushi et al. 2024, 2404.16710;
    Draft & Verify: Zhang et al. 2023, 2309.08168), as `network` changes them.

    With changes the distribution of a draft depends on its depth: the keys and values of the drafts before it are the
    changed layers', those of the text the target's. greedy, compile, shape: as of `Independent`. Raises ValueError
    beside another target.
    """

    network_class: Any = ExitNetwork
    tail = 1  # the text but its last token is stored, and must stay as the target stored it

    def __init__(
        self, network: ExitNetwork, target: PreTrainedModel, greedy: bool = False, *, compile: bool | None = None,
        shape: Shape = None,
    ) -> None:  # fmt: skip
        super().__init__(serving(network, target), greedy, compile=compile, shape=shape)
        self.network, self.target, self.rank = network, target, network.config.rank
        self.cache: SlotCache | None = None

    @classmethod
    def load(cls, folder: Path, beside: Beside) -> "EarlyExit":
        """Raises as `load_draft`, and ValueError for one that was made for a target of other sizes."""
        network = cls.network_beside(folder, beside)
        return cls(network, beside.target, beside.greedy, compile=beside.compile, shape=beside.shape)

    @classmethod
    def fits(cls, network: Any, target: PreTrainedModel, where: str) -> None:
        network.fits(target, where)

    def language_model(self, rows: int, vocabulary: int) -> LM | None:
        return None if self.rank else super().language_model(rows, vocabulary)

    def open(self, host: Host) -> None:
        if host.target.model is not self.target:
            raise ValueError("EarlyExit drafts with the layers of its own target: make it with the engine's model")
        shape, shared = (host.rows, host.vocabulary, host.context, host.spare), host.target.cache
        model, self.model = self.model, serving(self.network, self.target)
        if shape != self.opened or self.cache is not shared or self.model is not model:
            stock = not isinstance(host.target.run, Lean)  # both hold keys and values in one way
            self.opened, self.cache = shape, shared
            self.lm = LM(self.model, *shape[:3], stock=stock, compile=self.compile, spare=host.spare, cache=shared)
        self.stored, self.longest = [], 0

    def stage(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        """The target stores prompts."""

    def admit(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        """The target stores prompts."""

    def enter(self, source: int, target: int, prompt: list[int]) -> None:
        """The target's slots are moved."""

    def propose(self, round: Round) -> Proposal:
        self.stored = [len(text) - 1 for text in round.texts]
        return super().propose(round)

    def commit(self, outcome: Outcome) -> None:
        """Whatever was drafted is overwritten."""

    def move(self, source: int, target: int) -> None:
        """The target's slots are moved."""
