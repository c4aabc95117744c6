"""A draft that is told the temperature, at one of them: its scale becomes part of its final norm, and what is left is a
plain causal LM, which any engine serves."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cotrain.errors import UserError
from inference.drafts.draft_folder import Metadata
from inference.drafts.weight_files import CONFIG, read_json
from inference.models.output_head import head_of
from inference.proposers.conditioned_network import KNOTS, MODULE, ConditionedNetwork, Scale
from inference.proposers.early_exit_network import final_norm

TRIED = 8  # ids on which the plain model is compared with the scaled one


def refuse(folder: str | Path, temperature: float | None) -> None:
    """Raise UserError for a draft folder that is told the temperature where none is named, and for one that is not
    where one is."""
    file = Path(folder) / CONFIG
    told = KNOTS in read_json(file) if file.is_file() else False
    if told and temperature is None:
        raise UserError(f"temperature: {folder} drafts differently at each temperature, and an engine loads one: give "
                        "the one that you serve at, as temperature=0.7")  # fmt: skip
    if not told and temperature is not None:
        raise UserError(f"temperature={temperature:g}: {folder} drafts alike at every temperature: temperature=null")


def measured_elsewhere(made: Metadata | None, temperature: float) -> str | None:
    """What to say of a draft folder that was measured, and whose draft length was planned, at another temperature."""
    if made is None or made.report is None or (at := made.regime.get("temperature", 1.0)) == temperature:
        return None
    return (f"Speeds, and the draft length unless k= gives it, were measured at temperature {at:g}, not at "
            f"{temperature:g}: cotrain bench regime.temperature={temperature:g} measures there.")  # fmt: skip


def network_class(temperature: float | None) -> Any:
    """Of a folder that `refuse` passed."""
    return AutoModelForCausalLM if temperature is None else ConditionedNetwork


@torch.no_grad()
def folded(network: PreTrainedModel, temperature: float) -> PreTrainedModel:
    """The network itself, its scale at a temperature folded into the weight, and bias, of its final norm. Raises
    ValueError for a family whose head does not read that norm as it is."""
    ids = torch.arange(min(TRIED, network.config.get_text_config().vocab_size), device=network.device).unsqueeze(0)
    scale = Scale(network).at(torch.tensor(float(temperature)))
    states = network.base_model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = head_of(network)(states * scale.to(states)).float()
    norm = final_norm(network)
    for part in (norm.weight, getattr(norm, "bias", None)):
        if part is not None:
            part.copy_(part.to(scale.dtype) * scale)
    found = network(input_ids=ids, use_cache=False).logits.float()[..., : wanted.shape[-1]]
    close = 0.05 if network.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if not torch.allclose(found, wanted, rtol=close, atol=close * float(wanted.abs().max())):
        raise ValueError(f"temperature: {type(network).__name__} has a final norm that takes no scale: it is served by "
                         "this engine alone")  # fmt: skip
    delattr(network, MODULE)
    delattr(network.config, KNOTS)
    return network
