"""Costs of rounds for untrained models: random weights, and random acceptance.

Only the times are real; acceptance and text mean nothing.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from inference.engine import Engine
from inference.verify import Verification
from inference.verify.rules import Rule, rule_of


class Synthetic(Engine):
    """An engine that accepts each draft with probability `alpha`, whatever the distributions: for timing alone.

    It runs all passes, distributions and draws of a real round, and the rule's test too. Raises ValueError for an alpha
    outside [0, 1].
    """

    def __init__(self, target: PreTrainedModel, *, alpha: float, verify: str = "token", **settings: Any) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha: an acceptance in [0, 1], not {alpha}")
        if rule_of(verify).shared:
            raise ValueError(f"verify={verify}: accepts by the noise of the text, not by coins")
        super().__init__(target, verify=coins(alpha, rule_of(verify)), **settings)


def coins(alpha: float, timed: Rule) -> Rule:
    """A rule that runs `timed`, ignores its result, and accepts each draft with probability `alpha`."""

    def verify(p: Tensor, q: Tensor | None, x: Tensor, u: Tensor, k: Tensor) -> Verification:
        timed.verify(p, q, x, u, k)
        drafted = torch.arange(x.shape[1], device=x.device) < k.unsqueeze(1)
        accepted = ((u[:, : x.shape[1]] < alpha) & drafted).long().cumprod(1).sum(1)
        return Verification(accepted, p[torch.arange(len(p), device=p.device), accepted])

    return replace(timed, name=f"{timed.name}, accepted by coins", verify=verify, exact=False)


def random_model(
    path: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal LM of the shape that a config.json describes (folder or hub id), with weights drawn on the device; no
    other file is read."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    return model.eval().requires_grad_(False)
