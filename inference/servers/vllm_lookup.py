"""Look-up, alone or beside a draft model, as a proposer class that vLLM loads.

    COTRAIN_DRAFT=<draft folder of kind retrieval or hybrid> PYTHONPATH=<where this package is> vllm serve TARGET \\
        --speculative-config '{"method": "custom_class", "model": "inference.servers.vllm_lookup.Lookup", \\
                               "num_speculative_tokens": 5}'

vLLM takes what such a class proposes for certain drafts, so a model drafts its likeliest tokens here. vLLM's texts are
its own to order: each row is known by its place, and what is kept of another text there is dropped.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from inference.drafts.draft_folder import load_draft
from inference.drafts.weight_files import CONFIG, read_json
from inference.lookup.suffix_array import common
from inference.lookup.suffix_automaton import SuffixAutomaton
from inference.models.dtypes import widened
from inference.models.lm import LM
from inference.proposers.gate import Gate
from inference.proposers.retrieval import Retrieval

FOLDER = "COTRAIN_DRAFT"  # names the draft folder; without it, look-up in the text alone


class Lookup:
    """What vLLM's `custom_class` method makes and asks (0.32, V1 runner)."""

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
        """Nothing of the target's: the runner for CPUs asks every proposer."""

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: Any, token_ids: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Drafts of each row, none where nothing was sampled: sampled, the ids that each row has just gained;
        token_ids (rows, n), of which the first lengths[b] are row b's text with these."""
        with torch.inference_mode():
            return [self._row(b, token_ids[b, : lengths[b]].tolist()) if ids else [] for b, ids in enumerate(sampled)]

    def _row(self, row: int, text: list[int]) -> list[int]:
        k = min(self.k, self.context - len(text) - 1)
        if k < 1:
            return []
        match = self.retrieval.of_row(self.rows[row], text, k)
        if self.model is None or self.gate is None:
            return match.drafts
        return match.drafts[: self.gate.looked_up(match, k)] or self.model.drafts(row, text, k)


class Greedy:
    """A draft model's likeliest tokens, with a slot a row."""

    def __init__(self, folder: str, rows: int, context: int) -> None:
        self.lm = LM(widened(load_draft(folder)[0]), rows, context=context)
        self.stored: list[list[int]] = [[] for _ in range(rows)]  # ids that each slot holds

    def drafts(self, row: int, text: list[int], k: int) -> list[int]:
        """k tokens behind a text, fewer where the model's own context ends."""
        at, fed = min(common(self.stored[row], text), len(text) - 1), list(text)
        drafted: list[int] = []
        for _ in range(min(k, self.lm.context - len(text))):
            ids = torch.tensor([fed[at:]], device=self.lm.device)
            at = len(fed)
            drafted.append(int(self.lm.forward(ids, [at - ids.shape[1]], low=row).logits[0, -1].argmax()))
            fed.append(drafted[-1])
        self.stored[row] = fed[:at]
        return drafted
