"""A draft that is the target in fewer bits. It needs no training. Its acceptance rate is below 1 only because of the
rounding."""

import copy
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from inference.drafts.weight_files import CONFIG, read_json
from inference.models.checksum import Stamp
from inference.models.llama import rounded
from inference.models.lm import takes_int8
from inference.models.pretrained import weights_quantisation
from inference.proposers.base import LoadArguments, Proposer, SettingsNetwork
from inference.proposers.independent import OnTargetsCache
from inference.proposers.trees import TreeShape

BITS = ("int8", "nf4")


class QuantisedConfig(PretrainedConfig):
    """The config of a quantised draft. bits: the format of the rounded weights, one of `BITS`."""

    model_type = "cotrain_quantised"

    def __init__(self, bits: str = "int8", **others: Any) -> None:
        self.bits = bits
        super().__init__(**others)


class QuantisedNetwork(SettingsNetwork):
    """The network of a quantised draft's folder. It has only a `QuantisedConfig`, since the draft's weights are
    computed from the target's."""

    config_class = QuantisedConfig


class Quantised(OnTargetsCache):
    """A proposer that drafts with the target's projections rounded to 8 bits or to nf4 (Dettmers et al. 2023,
    2305.14314), on the target's own keys and values (self-speculation by rounding: QuantSpec, Tiwari et al. 2025,
    2502.10424).

    bits: "int8" or "nf4". int8 reads copies in 8 bits on a CPU, if the target supports it (see `lm.takes_int8`),
    and a large head in 4 bits, whose largest logits are exact (`packing.Rescored`).
    If not, the rounded weights are stored in the target's dtype. Distributions are then the same up to rounding, but
    passes are no faster than the target's. nf4 requires bitsandbytes. greedy: whether to draft the likeliest
    tokens, with one-hot distributions. shape: the tree to draft, as the parent of each node (-1 for the text); None for
    chains. Raises ValueError for other bits, and for a target whose weights are already quantised.
    """

    network_class: Any = QuantisedNetwork
    rounds = True
    language_model = Proposer.language_model

    def __init__(
        self,
        target: PreTrainedModel,
        bits: str = "int8",
        greedy: bool = False,
        *,
        shape: TreeShape = None,
    ) -> None:
        if bits not in BITS:
            raise ValueError(f"bits must be one of {', '.join(BITS)}, not {bits!r}")
        if weights_quantisation(target.config):
            raise ValueError(
                f"{type(target).__name__} is already quantised, so it cannot be its own draft in {bits}: load "
                "the target without quantisation"
            )
        self.target, self.bits = target, bits
        super().__init__(target, greedy, shape=shape)
        self.renew()

    def renew(self, lean: bool = True) -> None:
        self.int8 = self.bits == "int8" and takes_int8(self.target)
        self.model = self.target if self.int8 else quantised_copy(self.target, self.bits)

    @classmethod
    def load(cls, folder: Path, arguments: LoadArguments) -> "Quantised":
        """Return a proposer with the bits in the folder's config.json. The folder has no weights."""
        return cls.of_settings(arguments, read_json(folder / CONFIG).get("bits"), str(folder / CONFIG))

    @classmethod
    def of_settings(cls, arguments: LoadArguments, bits: Any, where: str) -> "Quantised":
        """Return a proposer with the `bits` of a config. Raises ValueError, with `where` before its message, for
        unknown bits and for a target whose weights are already quantised. arguments: the target and how it is served.
        """
        try:
            return cls(arguments.target, str(bits), arguments.greedy, shape=arguments.shape)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    @classmethod
    def fits(cls, network: PreTrainedModel, target: PreTrainedModel, where: str) -> None:
        """Raise ValueError for a target whose weights are already quantised. where: the start of the message."""
        if weights_quantisation(target.config):
            raise ValueError(
                f"{where}: the target is already quantised, so it cannot be its own draft in fewer bits: load the "
                "target without quantisation"
            )

    @property
    def weights(self) -> str | None:
        return self.bits


_COPIES: WeakKeyDictionary[PreTrainedModel, dict[str, tuple[Stamp, PreTrainedModel]]] = WeakKeyDictionary()


def quantised_copy(target: PreTrainedModel, bits: str) -> PreTrainedModel:
    """Return a copy of the target with projections rounded to `bits`, stored in the target's dtype. The embeddings are
    not rounded, even if they are tied to the head. With nf4 the head is not rounded either, as in bitsandbytes. The
    copy is cached, and made again when the target has changed."""
    copies = _COPIES.setdefault(target, {})
    if bits not in copies or not copies[bits][0].holds(target):
        copies[bits] = Stamp(target, addresses=False, values=True), _quantised_copy(target, bits)
    return copies[bits][1]


@torch.no_grad()
def _quantised_copy(target: PreTrainedModel, bits: str) -> PreTrainedModel:
    if any(weight.is_meta for weight in target.parameters()):
        raise ValueError(
            f"{type(target).__name__}: some layers are not on a device (target.device_map=auto), so a draft cannot be "
            "the target in fewer bits: use another kind of draft"
        )
    model = copy.deepcopy(target)
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear) and (module is not head or bits == "int8"):
            module.weight = nn.Parameter(round_bits(module.weight, bits), requires_grad=False)  # a tied one stays
    return model.eval()


def round_bits(weight: torch.Tensor, bits: str) -> torch.Tensor:
    """Return a weight (out, in) rounded to numbers that `bits` can represent, in the weight's own dtype. int8 has one
    scale per row, nf4 one scale per 64 values (Dettmers et al. 2023, 2305.14314)."""
    if bits == "int8":
        return rounded(weight)
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(weight.contiguous(), quant_type="nf4")).to(weight.dtype)
