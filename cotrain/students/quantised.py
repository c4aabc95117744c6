"""The target in fewer bits as its own draft: settings, and no weights to train."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedModel

from cotrain.config.groups import Draft, Init
from cotrain.students.base import Guess, Seen, Student, refuse_keys
from inference.proposers.quantised import Quantised, QuantisedConfig, QuantisedNetwork

BITS = {8: "int8", 4: "nf4"}


class QuantisedStudent(Student):
    """The student of `inference.proposers.quantised`: it makes no guesses and learns nothing."""

    kind = "quantised"
    takes = ("bits",)
    trained = False
    rounds_target = True
    layouts: Mapping[str, str] = {}

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Its settings. Raises ValueError for draft.path, and as `bits_of`."""
        refuse_keys(draft, "path")
        return QuantisedNetwork(QuantisedConfig(bits_of(draft)))

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        """Raises ValueError."""
        raise ValueError(f"draft={self.kind} is not trained")

    def proposer(
        self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False,
        shape: Sequence[int] | None = None,
    ) -> Quantised:  # fmt: skip
        """int8 has no effect: draft.bits= decides."""
        assert self.target is not None
        return Quantised(self.target, self.network.config.bits, greedy, compile=compile, shape=shape)


def bits_of(draft: Draft) -> str:
    """The weight quantisation of draft.bits. Raises ValueError if it is not set, or not available here."""
    if draft.bits is None:
        raise ValueError(
            f"draft.bits: {draft.kind} drafts with the target in fewer bits: set how many, as draft.bits=8"
        )
    bits = BITS[draft.bits]
    if bits == "nf4" and find_spec("bitsandbytes") is None:
        raise ValueError("draft.bits=4 needs bitsandbytes: pip install bitsandbytes, or draft.bits=8")
    return bits
