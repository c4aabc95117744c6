"""A small independent draft that guesses for the target in fewer bits, which drafts for the target: both are there
already, nothing is trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from cotrain.config.groups import Draft, Init
from cotrain.students.base import DEFAULT, Guess, Seen, Student
from cotrain.students.pretrained import causal_lm
from cotrain.students.quantised import bits_of
from inference import proposers
from inference.drafts.draft_folder import read
from inference.proposers import kind_of
from inference.proposers.quantised import Quantised
from inference.proposers.settings_network import SettingsNetwork
from inference.proposers.two_levels import SETTINGS
from inference.proposers.two_levels import TwoLevels as Serving


class TwoLevels(Student):
    """The student of `inference.proposers.two_levels` (`base.UNTRAINED`): its network is the small draft, whose config
    says under `two_levels` the bits and the guesses of an inner round."""

    kind = "two_levels"
    takes = ("bits", "inner")
    rounds_target = True

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """The small draft of draft.path. Raises ValueError for a folder of another kind, and as `bits_of` and
        `pretrained.causal_lm`."""
        bits = bits_of(draft)
        if draft.inner is None:
            raise ValueError("draft.inner: guesses before the target in fewer bits reads: give it, as draft.inner=3")
        if draft.path is None:
            raise ValueError("draft.path: two_levels guesses with a small independent draft: name its folder")
        _refuse_kind(draft.path)
        network = causal_lm(draft.path, target)
        setattr(network.config, SETTINGS, {"bits": bits, "inner": draft.inner})
        return network

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        """Raises ValueError: there are none to learn from."""
        raise ValueError(f"draft={self.kind} is not trained: train the small draft by itself, draft=independent")

    def proposer(self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False) -> Serving:
        """Chains alone. int8: of the small draft's weights."""
        assert self.target is not None
        settings = getattr(self.network.config, SETTINGS)
        model = Quantised(self.target, settings["bits"], greedy, compile=compile)
        small = proposers.Independent(self.network, greedy, compile=compile, int8=int8)
        return Serving(model, small, settings["inner"])


def _refuse_kind(path: str) -> None:
    """Raise ValueError for a draft folder of another kind; one that was made elsewhere is read as a causal LM."""
    try:
        kind = read(path).kind if Path(path).is_dir() else DEFAULT
    except FileNotFoundError as error:
        raise ValueError(f"draft.path: {error}") from error
    if kind != DEFAULT:
        made = kind_of(kind).network_class
        own = made is None or made is AutoModelForCausalLM or issubclass(made, SettingsNetwork)
        why = "" if own else ", which drafts from the target's hidden states"
        raise ValueError(f"draft.path: {path} is of kind {kind!r}{why}; two_levels guesses with {DEFAULT} drafts alone")
