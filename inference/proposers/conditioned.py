"""A draft conditioned on the temperature. One small causal LM drafts for rows of any temperature.

The network is a causal LM. Its config lists temperatures (`KNOTS`), each with a scale. The states that the head reads
are multiplied by the scale for the row's temperature. The scale is one more module of the LM. The other weights keep
their names, so the weights of an independent draft can be loaded into the network. Between two listed temperatures the
scale is interpolated; outside them the nearest one's scale is used.

n temperatures in the config, D width of the states, A rows.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from inference.drafts.causal_lm import CausalLM, Part, tensors_of
from inference.models.lm import LM
from inference.proposers.base import Host, Proposal, Round
from inference.proposers.independent import Independent
from inference.proposers.trees import TreeShape

KNOTS = "draft_temperatures"  # key of the config: the temperatures that have a scale
MODULE = "temperature_scale"
TABLE = f"{MODULE}.weight"  # (n, D): added to a scale of 1


def put_scale(network: PreTrainedModel) -> nn.Module:
    """Add a scale to the LM, in place, and return it as a module. It is 1 at every temperature in the config."""
    width = network.config.get_text_config().hidden_size
    scale = nn.Embedding(len(knots_of(network.config)), width, dtype=network.dtype, device=network.device)
    if not scale.weight.is_meta:
        nn.init.zeros_(scale.weight)
    network.add_module(MODULE, scale)
    return scale


class ConditionedNetwork(CausalLM):
    """The network class of a conditioned draft folder: an LM with its scale. Making one raises ValueError if the config
    has no temperatures."""

    parts = (*CausalLM.parts, Part((KNOTS,), put_scale, required=True))


def table_in(path: str | Path) -> Tensor:
    """Return the tensor `TABLE` (n, D) in a local folder: the scale minus 1 at each temperature. Raises ValueError if
    the folder has none."""
    tensors = tensors_of(path)
    if TABLE not in tensors:
        raise ValueError(
            f"{path}: the tensor {TABLE} is missing, so this is no conditioned draft: give one that was "
            "trained with draft=conditioned"
        )
    return tensors[TABLE]


def conditioned(network: PreTrainedModel, temperatures: list[float]) -> PreTrainedModel:
    """Add a scale to the LM, in place, and return the LM. Before training the scale is 1 at every temperature. Raises
    ValueError unless there is at least one temperature, each occurs once, and they are in rising order."""
    if not temperatures or sorted({*temperatures}) != list(temperatures):
        raise ValueError(f"give at least one temperature, each once, in rising order, not {list(temperatures)}")
    network.config.update({KNOTS: list(temperatures)})
    put_scale(network)
    return network


def knots_of(config: PretrainedConfig) -> list[float]:
    """Return the temperatures in a network's config. Raises ValueError if there are none."""
    temperatures = getattr(config, KNOTS, None)
    if not isinstance(temperatures, list) or not temperatures:
        raise ValueError(
            f"config.json of a conditioned draft must list its temperatures under the key {KNOTS}, not "
            f"{temperatures!r}: give a folder that was trained with draft=conditioned"
        )
    return [float(one) for one in temperatures]


class Scale:
    """The scale of a network, on the network's device, for any temperature."""

    def __init__(self, network: PreTrainedModel) -> None:
        self.table = network.get_parameter(TABLE)
        self.knots = torch.tensor(knots_of(network.config), dtype=torch.float32, device=self.table.device)

    def at(self, temperature: Tensor) -> Tensor:
        """Return the factors (..., D) that states are multiplied by before the head, in float32 or wider. temperature
        (...): each row's; between two listed temperatures the factors are interpolated."""
        table = self.table.to(torch.promote_types(self.table.dtype, torch.float32))
        if len(self.knots) == 1:
            return 1 + table[0].expand(*temperature.shape, -1)
        t = temperature.to(self.knots.device, self.knots.dtype).clamp(self.knots[0], self.knots[-1])
        above = torch.searchsorted(self.knots, t).clamp(min=1)
        low, high = self.knots[above - 1], self.knots[above]
        share = ((t - low) / (high - low)).unsqueeze(-1).to(table.dtype)
        return 1 + table[above - 1].lerp(table[above], share)


class Conditioned(Independent):
    """A proposer like `Independent`, but the states that the head reads are multiplied by the scale for the row's
    temperature.

    At temperature 0 the scale still affects which token is the likeliest. model: an LM with a scale (the function
    `conditioned` adds one). greedy: whether to draft the likeliest tokens, with one-hot distributions. int8: whether
    the weights are rounded to 8 bits. shape: the tree to draft, as the parent of each node (-1 for the text); None for
    chains. Raises ValueError for a model without a scale."""

    network_class: Any = ConditionedNetwork
    scaled = True

    def __init__(
        self,
        model: PreTrainedModel,
        greedy: bool = False,
        *,
        int8: bool = False,
        shape: TreeShape = None,
    ) -> None:
        super().__init__(model, greedy, int8=int8, shape=shape)
        knots_of(model.config)
        self.scale_of: Scale
        self.written: Tensor | None = None  # the temperatures whose scales `LM.scale` holds

    def language_model(self, rows: int, vocabulary: int) -> LM | None:
        """Return None, since the distribution depends on the row's temperature, and teacher-forced passes have none."""
        return None

    def open(self, host: Host) -> None:
        super().open(host)
        self.scale_of, self.written = Scale(self.model), None  # the model may have moved since the last call

    def propose(self, round: Round) -> Proposal:
        self._write(round.temperature)
        return super().propose(round)

    def _write(self, temperature: Tensor) -> None:
        """Write each row's scale into the tensor `LM.scale`, in place, since recorded passes read its memory.
        temperature (A,): of the active rows."""
        if temperature is not self.written:
            assert self.lm.scale is not None
            self.lm.scale[: len(temperature)].copy_(self.scale_of.at(temperature))
            self.written = temperature
