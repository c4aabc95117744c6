"""The network of a draft that is told the temperature: a causal LM and, for each temperature that it knows, a scale of
what its head reads.

The scale is one more module of the LM, whose own weights keep their names: those of an independent draft load into it.
Its config names the temperatures, `KNOTS`; between two of them the scale is interpolated, outside them it is that of
the nearest one. n temperatures that are known, D width of the states, A rows.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from inference.drafts.weight_files import weight_files

KNOTS = "draft_temperatures"  # key of the config: the temperatures that it knows
MODULE = "temperature_scale"
TABLE = f"{MODULE}.weight"  # (n, D): what is added to a scale of 1


class ConditionedNetwork:
    """What a draft folder of such a network holds, as `Proposer.network_class` asks for it: the LM with its scale."""

    config_class = AutoConfig

    def __new__(cls, config: PretrainedConfig) -> Any:
        """Of random weights, its scale 1 at every temperature."""
        return conditioned(AutoModelForCausalLM.from_config(config), knots_of(config))

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: Any = "auto", output_loading_info: bool = False, **_: Any
    ) -> Any:
        """From a local folder, safetensors only; with output_loading_info also what transformers says of the loading.
        Raises ValueError for a config that names no temperatures."""
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            family = type(AutoModelForCausalLM.from_config(config))
        tensors = _tensors(path)
        table = tensors.pop(TABLE, None)
        made: Any = family.from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
        network, info = made
        if (Path(path) / "generation_config.json").is_file():
            network.generation_config = GenerationConfig.from_pretrained(path)
        _fill(conditioned(network, knots_of(config)), table, info)
        return (network, info) if output_loading_info else network


def _tensors(path: str | Path) -> dict[str, Tensor]:
    return {name: value for file in weight_files(Path(path)) for name, value in load_file(file).items()}


def table_in(path: str | Path) -> Tensor:
    """The scale (n, D) of a local folder. Raises ValueError where it has none."""
    tensors = _tensors(path)
    if TABLE not in tensors:
        raise ValueError(f"{path}: tensor {TABLE} is missing")
    return tensors[TABLE]


@torch.no_grad()
def _fill(network: PreTrainedModel, table: Tensor | None, info: dict[str, Any]) -> None:
    """Give the scale its numbers, or say why it has none, as transformers says it of its own tensors."""
    own = network.get_parameter(TABLE)
    if table is None:
        info["missing_keys"] = {*info["missing_keys"], TABLE}
    elif table.shape != own.shape:
        info["mismatched_keys"] = [*info["mismatched_keys"], (TABLE, table.shape, own.shape)]
    else:
        own.copy_(table)


def conditioned(network: PreTrainedModel, temperatures: list[float]) -> PreTrainedModel:
    """The LM itself, with a scale that is 1 at every temperature until it learns. Raises ValueError for temperatures
    that are none, equal or not in order."""
    if not temperatures or sorted({*temperatures}) != list(temperatures):
        raise ValueError(f"temperatures {list(temperatures)}: at least one, each once, in rising order")
    width = network.config.get_text_config().hidden_size
    scale = nn.Embedding(len(temperatures), width, dtype=network.dtype, device=network.device)
    nn.init.zeros_(scale.weight)
    network.add_module(MODULE, scale)
    setattr(network.config, KNOTS, list(temperatures))
    return network


def knots_of(config: PretrainedConfig) -> list[float]:
    """The temperatures that a network knows. Raises ValueError where its config names none."""
    found = getattr(config, KNOTS, None)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{KNOTS}: the config of a conditioned draft names the temperatures that it knows")
    return [float(one) for one in found]


class Scale:
    """The scale of a network on its device, at any temperature."""

    def __init__(self, network: PreTrainedModel) -> None:
        self.table = network.get_parameter(TABLE)
        self.knots = torch.tensor(knots_of(network.config), dtype=torch.float32, device=self.table.device)

    def at(self, temperature: Tensor) -> Tensor:
        """Of what the head reads: temperature (...) -> (..., D), float32 at least."""
        table = self.table.to(torch.promote_types(self.table.dtype, torch.float32))
        if len(self.knots) == 1:
            return 1 + table[0].expand(*temperature.shape, -1)
        t = temperature.to(self.knots.device, self.knots.dtype).clamp(self.knots[0], self.knots[-1])
        above = torch.searchsorted(self.knots, t).clamp(min=1)
        low, high = self.knots[above - 1], self.knots[above]
        share = ((t - low) / (high - low)).unsqueeze(-1).to(table.dtype)
        return 1 + table[above - 1].lerp(table[above], share)
