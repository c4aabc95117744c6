"""Drafts with fewer bits. A `quantised` draft is the quantised target alone. In a `two_levels` draft, the quantised
target verifies the tokens of a small draft before the target does. Neither kind is trained.

This module also names the weights of other drafts that are rounded when served, for quantisation-aware training.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from cotrain.config.drafts import Draft
from cotrain.config.groups import Init
from cotrain.students.base import DEFAULT, Student
from cotrain.students.independent import causal_lm
from inference import proposers
from inference.drafts.causal_lm import CausalLM
from inference.drafts.draft_folder import read
from inference.models.markov import markov_of
from inference.models.small_heads import linears
from inference.proposers import kind_of
from inference.proposers.base import SettingsNetwork
from inference.proposers.quantised import Quantised, QuantisedConfig, QuantisedNetwork
from inference.proposers.two_levels import SETTINGS, TwoLevels

BY_BITS = {8: "int8", 4: "nf4"}  # draft.bits= -> the weight quantisation


class QuantisedStudent(Student):
    """The student for the draft that `inference.proposers.quantised` serves. It is not trained."""

    kind = "quantised"
    rounds_target = True
    layouts = {}

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Return a network that has settings but no weights, since the target's are used. Raises ValueError if
        draft.bits is null, or if this quantisation is not available here."""
        return QuantisedNetwork(QuantisedConfig(bits_of(draft)))

    def proposer(self, *, greedy: bool = False, int8: bool = False, shape: Sequence[int] | None = None) -> Quantised:
        """Return the proposer that drafts with the target in fewer bits. greedy: draft the most probable tokens.
        int8: has no effect, because draft.bits decides.
        shape: for a tree, the index of each node's parent; None for chains."""
        assert self.target is not None
        return Quantised(self.target, self.network.config.bits, greedy, shape=shape)


def bits_of(draft: Draft) -> str:
    """Return the weight quantisation that draft.bits selects: "int8" or "nf4". Raises ValueError if draft.bits is null,
    or if the quantisation is not available here."""
    if draft.bits is None:
        raise ValueError(
            f"draft.bits=null: {draft.kind} drafts with the target in fewer bits: set the number of bits, for example "
            "draft.bits=8"
        )
    bits = BY_BITS[draft.bits]
    if bits == "nf4" and find_spec("bitsandbytes") is None:
        raise ValueError("draft.bits=4 needs bitsandbytes: pip install bitsandbytes, or set draft.bits=8")
    return bits


def draft_projections(draft: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights (out, in) of the draft's linear layers by name, without the head's and the Markov head's."""
    heads = {id(part) for part in _heads(draft)}
    linear = [(name, module) for name, module in draft.named_modules() if isinstance(module, nn.Linear)]
    return {name: module.weight for name, module in linear if id(module) not in heads}


def _heads(draft: PreTrainedModel) -> list[nn.Linear]:
    """Return the linear layers in the head and the Markov head, which serving does not round like projections."""
    return [*linears(draft.get_output_embeddings()), *linears(markov_of(draft))]


def refuse_unknown(draft: PreTrainedModel, key: str = "draft.quantisation") -> None:
    """Raise ValueError for a draft with matrices outside of `nn.Linear`, for example GPT-2's or fused experts. They
    would not be rounded here, while a serving engine rounds or rejects them. key: the beginning of the message, a
    setting."""
    known = {id(weight) for weight in draft_projections(draft).values()}
    known |= {id(module.weight) for module in draft.modules() if isinstance(module, nn.Embedding)}
    known |= {id(part.weight) for part in _heads(draft)}
    others = [name for name, weight in draft.named_parameters() if weight.ndim > 1 and id(weight) not in known]
    if others:
        raise ValueError(
            f"{key}: {type(draft).__name__} has {len(others)} matrices that are not in an nn.Linear "
            f"({others[0]}) and cannot be rounded here: set {key}=none"
        )


class TwoLevelsStudent(Student):
    """The student for the draft that `inference.proposers.two_levels` serves. It is not trained. Its network is the
    small draft. The entry `two_levels` of the network's config has the target's quantisation, and the number of tokens
    that the small draft drafts in an inner round."""

    kind = "two_levels"
    rounds_target = True
    layouts = {}

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Return the small draft in draft.path=. Raises ValueError, which names the key to change, if its kind is not
        independent, if draft.bits is null or not available here, and for a model that cannot draft for this target."""
        bits = bits_of(draft)
        if draft.inner is None:
            raise ValueError(
                "draft.inner=null: set how many tokens the small draft drafts in an inner round, for example "
                "draft.inner=3"
            )
        if draft.path is None:
            raise ValueError("draft.path=null: two_levels drafts with a small independent draft: name its folder")
        _refuse_kind(draft.path)
        network = causal_lm(draft.path, target)
        setattr(network.config, SETTINGS, {"bits": bits, "inner": draft.inner})
        return network

    def proposer(  # type: ignore[override]  # drafts no trees
        self, *, greedy: bool = False, int8: bool = False
    ) -> TwoLevels:
        """Return the proposer, which drafts chains and no trees. greedy: draft the most probable tokens. int8: whether
        the small draft's weights are rounded to 8 bits."""
        assert self.target is not None
        settings = getattr(self.network.config, SETTINGS)
        model = Quantised(self.target, settings["bits"], greedy)
        return TwoLevels(model, proposers.Independent(self.network, greedy, int8=int8), settings["inner"])


def _refuse_kind(path: str) -> None:
    """Raise ValueError if a draft folder's kind is not independent. A folder without metadata counts as independent."""
    try:
        kind = read(path).kind if Path(path).is_dir() else DEFAULT
    except FileNotFoundError as error:
        raise ValueError(f"draft.path: {error}") from error
    if kind != DEFAULT:
        network = kind_of(kind).network_class
        no_heads = network is None or network is CausalLM or issubclass(network, SettingsNetwork)
        why = "" if no_heads else ", which drafts from the target's hidden states"
        raise ValueError(
            f"draft.path: {path} is of kind {kind!r}{why}; two_levels needs one of kind {DEFAULT} instead: name the "
            "folder of such a draft"
        )
