"""The settings of each kind of draft. draft=NAME selects the class, for example `draft=eagle`, and a kind has only the
settings of its class. How each kind is trained is in its student, see `cotrain.students.base`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from cotrain.config.base import NEW, SCRATCH, Count, Path, Settings, Size, Temperature, With, allowed, at_least, one_of

ScratchSize = Annotated[Size | None, SCRATCH]
NewSize = Annotated[Size | None, NEW]
Bits4 = Annotated[int, allowed("4", lambda value: value == 4)]
Bits = Annotated[int, allowed("8 (int8) or 4 (nf4)", lambda value: value in (4, 8))]


class Draft(Settings):
    """The settings that all kinds of draft have. A setting that only other kinds have reads as None, for code that
    handles all kinds.

    trained: False for kinds that are measured and exported without training. one_start: whether init=scratch and
    init=target_layers give the same draft. layers_with: the values of init= with which init.layers is read.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    trained: ClassVar[bool] = True
    one_start: ClassVar[bool] = True
    layers_with: ClassVar[tuple[str, ...]] = ()

    kind: str
    quantisation: Annotated[str, one_of("none", "int8", "nf4")] = "none"
    """The weights of the projections when the draft is served: none, int8 or nf4; with int8 and nf4, training is
    quantisation-aware."""

    def __getattr__(self, name: str) -> Any:
        if name in OF_KINDS:
            return None
        raise AttributeError(f"{type(self).__name__} has no setting {name!r}")

    @property
    def by_depth(self) -> bool:
        """Return whether the draft's distribution depends on the depth of a drafted token in its round."""
        return "depths" in type(self).model_fields

    def unread(self, run: Any) -> Mapping[str, str]:
        """Return the settings of this kind that the run's init= leaves without effect, as name -> the reason. run: all
        settings of the command."""
        read = {
            name: one.inits
            for name, field in type(self).model_fields.items()
            for one in field.metadata
            if isinstance(one, With)
        }
        return {
            name: f"{self.kind} drafts read it only with {' or '.join(f'init={init}' for init in inits)}"
            for name, inits in read.items()
            if run.init.kind not in inits
        }


class _Started(Draft):
    path: Path = None
    """The draft folder to start from, with init=pretrained; with init=transplant a small LM."""


class _Headed(_Started):
    vocabulary: Annotated[int, at_least(2)] | None = None
    """The number of tokens that the head can draft; null: as in the target. For draft=eagle or p_eagle and a target of
    0.5 billion parameters or more with more than 64,000 tokens the default is 32,000."""
    head_rank: Size | None = None
    """The rank of a head of two matrices; null: one matrix."""


class _Layered(_Headed):
    one_start = False
    layers_with = ("target_layers",)

    intermediate: ScratchSize = 384
    """Width inside the feed-forward layers."""
    head_dim: ScratchSize = 64
    """Width of an attention head."""
    kv_heads: ScratchSize = 1
    """Heads of keys and values."""


class _Shaped(_Layered):
    width: ScratchSize = 128
    """Width of the hidden states."""
    layers: ScratchSize = 1
    """Number of layers."""


class IndependentDraft(_Shaped):
    """A small language model, which has its own layers, embeddings and head."""

    kind: Literal["independent"] = "independent"
    encoder_layers: Size | None = None
    """With init=target_layers of an encoder-decoder, the layers of its own encoder; null: the target's, shared."""


class ConditionedDraft(_Shaped):
    """One small draft for all temperatures. It is trained at each of `temperatures`, and interpolates between them."""

    kind: Literal["conditioned"] = "conditioned"
    temperatures: list[Temperature] = [0.0, 0.3, 0.7, 1.0]
    """Those that the draft learns."""


class ParallelDraft(_Shaped):
    """A small language model. One pass over mask tokens drafts all tokens of a round (PARD)."""

    kind: Literal["parallel"] = "parallel"
    depths: Size | None = 8
    """Mask tokens of a pass; each drafts one token."""
    markov: Count | None = None
    """The rank of the Markov head, a term for the token before each draft; null: no such head."""


class EagleDraft(_Layered):
    """One decoder layer over the target's states (EAGLE-3), as wide as the target. With init=target_layers it has the
    shape of the target's layers."""

    kind: Literal["eagle"] = "eagle"
    depths: Size | None = 6
    """The number of depths that are trained (TTT steps)."""


class PEagleDraft(EagleDraft):
    """The same decoder layer as for draft=eagle, but one pass over mask tokens drafts all tokens of a round
    (P-EAGLE)."""

    kind: Literal["p_eagle"] = "p_eagle"  # type: ignore[assignment]
    markov: Count | None = None
    """The rank of the Markov head, a term for the token before each draft; null: no such head."""


class BlockDraft(_Headed):
    """Layers over the target's states. One pass over a block of mask tokens drafts all tokens of a round. The draft is
    as wide as the target, and begins with the target's norm and head."""

    one_start = False

    kind: Literal["block"] = "block"
    layers: Size | None = 1
    """Number of layers."""
    intermediate: NewSize = None
    """null: the target's."""
    head_dim: NewSize = 64
    """Width of an attention head."""
    kv_heads: NewSize = None
    """null: as many as query heads."""
    depths: Size | None = 8
    """Mask tokens of a block; each drafts one token."""
    head: Annotated[str, one_of("own", "target")] | None = None
    """own: a head and an embedding of the mask token, which learn. target: the target's head, frozen, and its embedding
    of a token that texts do not have, as in published DFlash drafts. null: own, or as in draft.path=."""
    mask: Annotated[str, one_of("bidirectional", "causal")] | None = None
    """Whether a mask token attends to its whole block (bidirectional, null) or to the tokens before it (causal)."""
    markov: Count | None = None
    """The rank of the Markov head, a term for the token before each draft; null: no such head."""


class EarlyExitDraft(_Started):
    """The target's first layers, used as the draft. While they draft, a low-rank change is added to their projections,
    or they have weights of their own in 4 bits, which learn."""

    kind: Literal["early_exit"] = "early_exit"
    layers: NewSize = None
    """null: chosen before training, from measured costs and from what linear exits accept; with draft.bits=4 all."""
    rank: Annotated[Count, NEW] = 16
    """The rank of the change; 0: no change."""
    bits: Annotated[Bits4 | None, NEW] = None
    """4: weights in 4 bits, which begin as the target's, rounded (GPTQ), and no low-rank change; null: the target's
    weights. A CPU reads .28 of the bytes of weights in 16 bits, so even all of the target's layers may pay; the last
    ones then stay the target's, in 8 bits."""
    depths: Size | None = 4
    """The number of depths that are trained."""

    @property
    def by_depth(self) -> bool:
        return self.rank > 0 or self.bits is not None

    def unread(self, run: Any) -> Mapping[str, str]:
        """Return the settings that have no effect in this run, as name -> the reason: those that the run's init= does
        not read, and with rank 0 also `depths`, since the distribution is then the same at all depths. run: all
        settings of the command."""
        alike = (
            "with draft.rank=0 an exit drafts in the same way at every depth: leave out draft.depths=, or set "
            "draft.rank=16"
        )
        both = {"rank": "with draft.bits=4 there is no low-rank change: leave out draft.rank="} if self.bits else {}
        return {**super().unread(run), **both, **({} if self.by_depth else {"depths": alike})}


class MedusaDraft(_Started):
    """Heads on the target's last hidden state. They are as wide as the target and share its output head."""

    kind: Literal["medusa"] = "medusa"
    layers: NewSize = 1
    """Residual blocks per head."""
    depths: NewSize = 5
    """The number of heads; each makes one draft of a round."""
    markov: Count | None = None
    """The rank of the Markov head, a term for the token before each draft; null: no such head."""


class HydraDraft(_Started):
    """Heads on the target's last hidden state. Each head also reads the text's last token and the tokens that earlier
    heads drafted in the same round."""

    kind: Literal["hydra"] = "hydra"
    layers: NewSize = 1
    """Residual blocks per head."""
    depths: NewSize = 5
    """The number of heads; each makes one draft of a round."""


class _LookedUp(Draft):
    datastore: Path = None
    """A folder of `cotrain datastore`, which is searched too."""
    shortest: Size = 2
    """The least length of a match, in tokens."""


class RetrievalDraft(_LookedUp):
    """Drafts by look-up alone, without a draft model and without training."""

    trained = False
    kind: Literal["retrieval"] = "retrieval"


class HybridDraft(_LookedUp, _Shaped):
    """Drafts by look-up if this is expected to be faster, and otherwise with an independent draft model."""

    kind: Literal["hybrid"] = "hybrid"


class HybridExitDraft(_LookedUp, EarlyExitDraft):
    """Drafts by look-up if this is expected to be faster, and otherwise with an early exit."""

    kind: Literal["hybrid_exit"] = "hybrid_exit"  # type: ignore[assignment]


class QuantisedDraft(Draft):
    """The target with weights of 8 bits (int8) or 4 bits (nf4) is its own draft model. Nothing is trained."""

    trained = False
    kind: Literal["quantised"] = "quantised"
    bits: Bits | None = 8
    """Bits of a weight."""


class HybridQuantisedDraft(_LookedUp, QuantisedDraft):
    """Drafts by look-up if this is expected to be faster, and otherwise with the target in fewer bits. Nothing is
    trained."""

    kind: Literal["hybrid_quantised"] = "hybrid_quantised"  # type: ignore[assignment]


class TwoLevelsDraft(_Started):
    """The target in fewer bits drafts for the target. The small independent draft in draft.path= drafts for the target
    in fewer bits. Nothing is trained."""

    trained = False
    kind: Literal["two_levels"] = "two_levels"
    bits: Bits | None = 8
    """Bits of a weight of the target that drafts."""
    inner: Size | None = 3
    """How many tokens the small draft proposes before the quantised target verifies them."""


AnyDraft = Annotated[
    IndependentDraft
    | ConditionedDraft
    | EagleDraft
    | PEagleDraft
    | EarlyExitDraft
    | BlockDraft
    | ParallelDraft
    | MedusaDraft
    | HydraDraft
    | RetrievalDraft
    | HybridDraft
    | HybridExitDraft
    | QuantisedDraft
    | HybridQuantisedDraft
    | TwoLevelsDraft,
    Field(discriminator="kind"),
]
DRAFTS: dict[str, type[Draft]] = {one.model_fields["kind"].default: one for one in get_args(get_args(AnyDraft)[0])}
OF_KINDS = frozenset(name for one in DRAFTS.values() for name in one.model_fields) - Draft.model_fields.keys()
