"""The target in fewer bits as its own draft: nothing is trained, its acceptance is what rounding leaves."""

import copy
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from inference.drafts.weight_files import CONFIG, read_json
from inference.models.checksum import Stamp
from inference.models.dtypes import quantised
from inference.models.llama_weights import int8_rows
from inference.models.lm import takes_int8
from inference.proposers.base import Beside, Host
from inference.proposers.growing import Shape
from inference.proposers.independent import Independent
from inference.proposers.settings_network import SettingsNetwork

BITS = ("int8", "nf4")


class QuantisedConfig(PretrainedConfig):
    """bits: of `BITS`."""

    model_type = "cotrain_quantised"

    def __init__(self, bits: str = "int8", **others: Any) -> None:
        self.bits = bits
        super().__init__(**others)


class QuantisedNetwork(SettingsNetwork):
    """No weights: `QuantisedConfig` alone, since the target's weights are all that such a draft has."""

    config_class = QuantisedConfig


class Quantised(Independent):
    """Drafts with the target's projections in 8 bits, or in nf4 (Dettmers et al. 2023, 2305.14314), with keys and
    values of its own (self-speculation by rounding: QuantSpec, Tiwari et al. 2025, 2502.10424).

    int8: by the CPU's own kernel where it serves the target, see `lm.takes_int8`; elsewhere the same whole
    numbers in the target's dtype, which is the same distribution but for the kernel's sums, and no faster. nf4 takes
    bitsandbytes. greedy, compile, shape: as of `Independent`. Raises ValueError for other bits and for a target that is
    quantised itself.
    """

    network_class: Any = QuantisedNetwork

    def __init__(
        self, target: PreTrainedModel, bits: str = "int8", greedy: bool = False, *, compile: bool | None = None,
        shape: Shape = None,
    ) -> None:  # fmt: skip
        if bits not in BITS:
            raise ValueError(f"bits: {bits!r} is none of {', '.join(BITS)}")
        if quantised(target.config):
            raise ValueError(f"{type(target).__name__} is quantised as it is: it cannot be its own draft in {bits}")
        self.target, self.bits = target, bits
        super().__init__(target, greedy, compile=compile, shape=shape)
        self._round()

    def _round(self) -> None:
        """The target as it is now, in its bits."""
        self.int8 = self.bits == "int8" and takes_int8(self.target)
        self.model = self.target if self.int8 else held_in(self.target, self.bits)

    def open(self, host: Host) -> None:
        if not self.opened or not self.int8 or self.lm.stale:  # the kernel's numbers are those of the LM
            model = self.model
            self._round()
            self.opened = self.opened if self.model is model else None
        super().open(host)

    @classmethod
    def load(cls, folder: Path, beside: Beside) -> "Quantised":
        """Its folder holds no weights: config.json says the bits."""
        return cls.of_settings(beside, read_json(folder / CONFIG).get("bits"), str(folder / CONFIG))

    @classmethod
    def of_settings(cls, beside: Beside, bits: Any, where: str) -> "Quantised":
        """Of the bits that a config names. Raises as the class, beginning with `where`."""
        try:
            return cls(beside.target, str(bits), beside.greedy, compile=beside.compile, shape=beside.shape)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    @classmethod
    def fits(cls, network: PreTrainedModel, target: PreTrainedModel, where: str) -> None:
        """Raises for a target that is quantised as it is."""
        if quantised(target.config):
            raise ValueError(f"{where}: the target is quantised as it is: it cannot be its own draft in fewer bits")

    @property
    def weights(self) -> str | None:
        return self.bits


_HELD: WeakKeyDictionary[PreTrainedModel, dict[str, tuple[Stamp, PreTrainedModel]]] = WeakKeyDictionary()


def held_in(target: PreTrainedModel, bits: str) -> PreTrainedModel:
    """A copy of the target whose projections are numbers that `bits` can hold, in the target's dtype; its embeddings
    keep theirs, tied to the head or not. Of nf4 the head stays whole, as bitsandbytes leaves it. Made once for all that
    draft with it, and again when the target has changed."""
    kept = _HELD.setdefault(target, {})
    if bits not in kept or not kept[bits][0].holds(target):
        kept[bits] = Stamp(target, addresses=False, values=True), _held_in(target, bits)
    return kept[bits][1]


@torch.no_grad()
def _held_in(target: PreTrainedModel, bits: str) -> PreTrainedModel:
    model = copy.deepcopy(target)
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear) and (module is not head or bits == "int8"):
            module.weight = nn.Parameter(in_bits(module.weight, bits), requires_grad=False)  # not what is tied to it
    return model.eval()


def in_bits(weight: torch.Tensor, bits: str) -> torch.Tensor:
    """weight (out, in) as numbers that `bits` can hold, in its own dtype: int8, one scale a row, see `int8_rows`; nf4,
    one scale 64 values (Dettmers et al. 2023, 2305.14314)."""
    if bits == "int8":
        numbers, scale = int8_rows(weight)
        return (numbers.float() * scale.float().unsqueeze(1)).to(weight.dtype)
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(weight.contiguous(), quant_type="nf4")).to(weight.dtype)
