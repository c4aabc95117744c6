"""First weights of drafts for targets of many families, whose configs name sizes in different ways."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain.students.block import BlockStudent
from cotrain.students.eagle import EagleStudent
from cotrain.students.independent import scratch
from tests.cotrain.students.test_eagle import draft, guessed
from tests.inference import test_families as families
from tests.inference.test_tree_families import SETTINGS, TWELVE

IDS = torch.tensor([[3, 5, 7, 3, 5, 1, 2, 9]])
FEED_FORWARD = {"GPT2": 64, "Mpt": 64}  # 4 times the width, unless the config has a number


@pytest.mark.parametrize("name", [*TWELVE, "Mpt"])
def test_a_block_draft_starts_for_every_family(name: str) -> None:
    """Its sizes are the target's if draft.* has none, and its guesses come from the target's states."""
    target: Any = families.build(name, SETTINGS[name])
    sizes = draft(kind="block", kv_heads=None, intermediate=None, head_dim=None, markov=3)
    network = BlockStudent.initial(sizes, SimpleNamespace(kind="target_layers", layers=[]), target)  # type: ignore[arg-type]
    assert network.config.intermediate_size == FEED_FORWARD.get(name, 32)
    assert network.config.max_position_embeddings >= families.CONTEXT
    guesses = guessed(BlockStudent(network.to(target.dtype), target), IDS)
    assert len(guesses) == 3 and all(guess.states.isfinite().all() for guess in guesses)


@pytest.mark.parametrize("name", [*TWELVE, "Mpt"])
def test_an_eagle_copies_a_layer_or_names_what_does_not_fit(name: str) -> None:
    target: Any = families.build(name, SETTINGS[name])
    copied: Any = SimpleNamespace(kind="target_layers", layers=[-1])
    if name in ("Phi3", "GPT2", "GPTNeoX", "OPT", "Olmo2", "Mpt"):
        with pytest.raises(ValueError, match=r"init=target_layers: the target has no weight .*: set init=scratch"):
            EagleStudent.initial(draft(), copied, target)
        copied = SimpleNamespace(kind="scratch")
    assert EagleStudent.initial(draft(), copied, target).config.hidden_size == 16


def test_a_random_draft_has_the_positions_of_a_target_that_names_them_otherwise() -> None:
    target: Any = families.build("Mpt", SETTINGS["Mpt"])
    assert scratch(target, 16, 1, 32, 8, 1).config.max_position_embeddings == families.MPT["max_seq_len"]
