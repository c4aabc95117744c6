"""The target in fewer bits as its own draft: no weights of its own, settings alone."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedModel

from cotrain.config.groups import Draft, Init
from cotrain.students.base import Guess, Seen, Student, refuse_keys
from inference.proposers.quantised import Quantised as Serving
from inference.proposers.quantised import QuantisedConfig, QuantisedNetwork

BITS = {8: "int8", 4: "nf4"}


class Quantised(Student):
    """The student of `inference.proposers.quantised`: it makes no guesses and learns nothing (`base.UNTRAINED`)."""

    kind = "quantised"
    takes = ("bits",)
    rounds_target = True

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Its settings. Raises as `bits_of`, and ValueError for settings of weights, which it has not."""
        refuse_keys(draft, "path")
        return QuantisedNetwork(QuantisedConfig(bits_of(draft)))

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        """Raises ValueError: there are none to learn from."""
        raise ValueError(f"draft={self.kind} is not trained")

    def proposer(
        self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False,
        shape: Sequence[int] | None = None,
    ) -> Serving:  # fmt: skip
        """int8 changes nothing: its bits are what draft.bits= says."""
        assert self.target is not None
        return Serving(self.target, self.network.config.bits, greedy, compile=compile, shape=shape)


def bits_of(draft: Draft) -> str:
    """The weight quantisation of draft.bits. Raises ValueError where it is not given, or cannot be made here."""
    if draft.bits is None:
        raise ValueError(f"draft.bits: {draft.kind} drafts with the target in fewer bits: give it, as draft.bits=8")
    bits = BITS[draft.bits]
    if bits == "nf4" and find_spec("bitsandbytes") is None:
        raise ValueError("draft.bits=4 needs bitsandbytes: pip install bitsandbytes, or draft.bits=8")
    return bits
