"""Look-up, with or without a draft model, as a proposer class that vLLM loads.

COTRAIN_DRAFT=<draft folder of kind retrieval or hybrid> PYTHONPATH=<where this package is> vllm serve TARGET \\
--speculative-config '{"method": "custom_class", "model": "inference.servers.vllm_lookup.Lookup", \\
"num_speculative_tokens": 5}'

vLLM treats the drafts of such a class as deterministic, so a model drafts its likeliest tokens here. State is stored by
row number. vLLM may move a text to another row; the row's state is then computed again.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from inference.drafts.draft_folder import load_draft
from inference.drafts.weight_files import CONFIG, read_json
from inference.lookup.suffixes import SuffixAutomaton, common_prefix
from inference.models.lm import LM
from inference.models.pretrained import widened
from inference.proposers.hybrid import Gate
from inference.proposers.retrieval import Retrieval

FOLDER = "COTRAIN_DRAFT"  # names the draft folder; without it, look-up in the text alone


class Lookup:
    """The proposer of vLLM's method `custom_class` (0.32, V1 runner). It drafts by look-up, with or without a model.
    vllm_config: vLLM's config. It gives the number of drafts per round, the number of rows, and the largest number of
    tokens per text."""

    def __init__(self, vllm_config: Any) -> None:
        self.k = int(vllm_config.speculative_config.num_speculative_tokens)
        self.context, rows = int(vllm_config.model_config.max_model_len), int(vllm_config.scheduler_config.max_num_seqs)
        folder = os.environ.get(FOLDER)
        lookup = (read_json(Path(folder) / CONFIG).get("lookup") or {}) if folder else {}
        self.retrieval, gate = Retrieval.of_settings(lookup), lookup.get("gate")
        self.gate = Gate.of_json(gate) if gate else None
        self.model = Greedy(folder, rows, self.context) if folder and self.gate else None
        self.rows = [SuffixAutomaton() for _ in range(rows)]

    def load_model(self, model: Any) -> None:
        """Do nothing; vLLM's runner for CPUs calls this method of every proposer."""

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: Any, token_ids: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Return, for each row, the ids of its drafts; [] for a row without new ids. sampled: for each row, its new
        ids. lengths: for each row b, the number of ids of its text. token_ids (rows, n): the first lengths[b] ids are
        row b's text, new ids included. slot_mappings is not used."""
        with torch.inference_mode():
            return [self._row(b, token_ids[b, : lengths[b]].tolist()) if ids else [] for b, ids in enumerate(sampled)]

    def _row(self, row: int, text: list[int]) -> list[int]:
        k = min(self.k, self.context - len(text) - 1)
        if k < 1:
            return []
        match = self.retrieval.of_row(self.rows[row], text, k)
        if self.model is None or self.gate is None:
            return match.drafts
        looked_up = match.drafts[: self.gate.looked_up(match, k)]
        return looked_up or self.model.drafts(row, text, self.gate.modelled(match, k))


class Greedy:
    """Drafts a model's likeliest tokens, with a cache for each row. folder: the draft folder. rows: number of rows.
    context: the largest number of tokens of a text."""

    def __init__(self, folder: str, rows: int, context: int) -> None:
        self.lm = LM(widened(load_draft(folder)[0]), rows, context=context)
        self.stored: list[list[int]] = [[] for _ in range(rows)]  # ids that each slot holds

    def drafts(self, row: int, text: list[int], k: int) -> list[int]:
        """Return k drafted ids after a row's text, each the likeliest token; fewer near the end of the model's context.
        row: index of the row. text: its ids."""
        at, fed = min(common_prefix(self.stored[row], text), len(text) - 1), list(text)
        drafted: list[int] = []
        for _ in range(min(k, self.lm.context - len(text))):
            ids = torch.tensor([fed[at:]], device=self.lm.device)
            at = len(fed)
            drafted.append(int(self.lm.forward(ids, [at - ids.shape[1]], low=row).logits[0, -1].argmax()))
            fed.append(drafted[-1])
        self.stored[row] = fed[:at]
        return drafted
