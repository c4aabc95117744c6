"""Kinds of draft that cannot share a target with sliding windows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from cotrain.students.early_exit import EarlyExitStudent
from cotrain.students.parallel import ParallelStudent
from tests.draft_folders import bare


def test_sliding_windows_are_rejected_before_weights_are_allocated() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = MistralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, sliding_window=8)
    with torch.device("meta"):
        target = MistralForCausalLM(config)
        draft: Any = bare("early_exit", layers=1, rank=2)
        init: Any = SimpleNamespace(kind="target_layers", layers=[0])
        with pytest.raises(ValueError, match="draft.rank=2: .*Mistral.* sliding windows.* draft.rank=0"):
            EarlyExitStudent.initial(draft, init, target)
        with pytest.raises(ValueError, match="draft=parallel: MistralForCausalLM attends only to the last 8 tokens"):
            ParallelStudent.initial(draft, init, target)
        draft.bits = 4
        with pytest.raises(ValueError, match="draft.bits=4: .*: set draft.rank=0 and draft.bits=null"):
            EarlyExitStudent.initial(draft, init, target)
        draft.bits, draft.rank = None, 0
        EarlyExitStudent.initial(draft, init, target)
