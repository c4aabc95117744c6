"""A small independent draft that drafts for the target in fewer bits, which drafts for the target. Nothing is
trained: both exist already."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from cotrain.config.groups import Draft, Init
from cotrain.students.base import DEFAULT, Guess, Seen, Student
from cotrain.students.independent import causal_lm
from cotrain.students.quantised import bits_of
from inference import proposers
from inference.drafts.draft_folder import read
from inference.proposers import kind_of
from inference.proposers.base import SettingsNetwork
from inference.proposers.quantised import Quantised
from inference.proposers.two_levels import SETTINGS, TwoLevels


class TwoLevelsStudent(Student):
    """The student of `inference.proposers.two_levels`, which learns nothing: its network is the small draft, whose
    config holds under `two_levels` the bits and the drafts of an inner round."""

    kind = "two_levels"
    takes = ("bits", "inner")
    trained = False
    rounds_target = True
    layouts: Mapping[str, str] = {}

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """The small draft of draft.path. Raises ValueError for a folder of another kind, and as `bits_of` and
        `causal_lm`."""
        bits = bits_of(draft)
        if draft.inner is None:
            raise ValueError("draft.inner: drafts before the target in fewer bits verifies: set them, as draft.inner=3")
        if draft.path is None:
            raise ValueError("draft.path: two_levels drafts with a small independent draft: name its folder")
        _refuse_kind(draft.path)
        network = causal_lm(draft.path, target)
        setattr(network.config, SETTINGS, {"bits": bits, "inner": draft.inner})
        return network

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        """Raises ValueError."""
        raise ValueError(f"draft={self.kind} is not trained: train the small draft by itself, draft=independent")

    def proposer(self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False) -> TwoLevels:
        """Drafts chains, no trees. int8: of the small draft's weights."""
        assert self.target is not None
        settings = getattr(self.network.config, SETTINGS)
        model = Quantised(self.target, settings["bits"], greedy, compile=compile)
        small = proposers.Independent(self.network, greedy, compile=compile, int8=int8)
        return TwoLevels(model, small, settings["inner"])


def _refuse_kind(path: str) -> None:
    """Raise ValueError for a draft folder of another kind; a folder without metadata counts as a causal LM."""
    try:
        kind = read(path).kind if Path(path).is_dir() else DEFAULT
    except FileNotFoundError as error:
        raise ValueError(f"draft.path: {error}") from error
    if kind != DEFAULT:
        network = kind_of(kind).network_class
        no_heads = network is None or network is AutoModelForCausalLM or issubclass(network, SettingsNetwork)
        why = "" if no_heads else ", which drafts from the target's hidden states"
        raise ValueError(f"draft.path: {path} is of kind {kind!r}{why}; two_levels drafts with {DEFAULT} drafts alone")
