"""What rounds cost for shapes that were never trained: random weights, and acceptance decided by coins.

Nothing here says anything about acceptance, or about text: only time is real.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from inference.engine import Engine, _Run
from inference.noise import ACCEPT
from inference.round import DecodingRound
from inference.verify import Verdict


class Synthetic(Engine):
    """An engine that accepts each draft with probability `alpha`, whatever the laws say: for clocks alone.

    All passes, laws and draws of a real round are made, the rule's own test too. Raises ValueError for an alpha outside
    [0, 1].
    """

    def __init__(self, target: PreTrainedModel, *, alpha: float, **settings: Any) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha: an acceptance in [0, 1], not {alpha}")
        super().__init__(target, **settings)
        self.alpha = alpha

    def _turn(self, run: _Run) -> DecodingRound:
        turn = super()._turn(run)
        return _Coins(self.alpha, turn.rows, turn.k, turn.rule, turn.noise, turn.vocabulary, turn.device, turn.batch,
                      turn.replays)  # fmt: skip


class _Coins(DecodingRound):
    def __init__(self, alpha: float, *settings: Any) -> None:
        super().__init__(*settings)
        self.alpha = alpha

    def verdict(self, p: Tensor, q: Tensor | None, x: Tensor, k: list[int] | Tensor) -> Verdict:
        super().verdict(p, q, x, k)  # its time counts
        length = k if isinstance(k, Tensor) else self.length(k)
        depth = torch.arange(x.shape[1], device=self.device)
        coins = self._uniforms[ACCEPT]  # (A, K+1)
        passed = (coins[:, : x.shape[1]] < self.alpha) & (depth < length.unsqueeze(1))
        accepted = passed.long().cumprod(1).sum(1)
        return Verdict(accepted, p[torch.arange(len(p), device=self.device), accepted])


def random_model(
    path: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal LM of the shape that a config.json describes (folder or hub id), its weights drawn on the device: no
    other file is read."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    return model.eval().requires_grad_(False)
