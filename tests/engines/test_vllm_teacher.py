"""A real vLLM as teacher: its states are transformers' own."""

import os
from pathlib import Path

import pytest
import torch

from studies.served_teacher import compared, vllm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_states_are_those_of_transformers(tmp_path: Path) -> None:
    """Of every layer that an EAGLE reads and of the last one, in float32, at magnitudes of a hundred and more."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(5, 4000, (n,), generator=generator).tolist() for n in (3, 40, 17, 120, 64, 9)]
    python = os.environ["COTRAIN_VLLM"]
    with vllm(python, "bundled", "eagle", tmp_path / "states", tmp_path / "vllm.log", dtype="float32") as url:
        read = compared({"server": [url]}, "bundled", "eagle", texts, "float32")
    assert len(read["largest_difference"]) == 4
    assert max(read["mean_difference_over_mean_size"].values()) < 1e-5, read
    assert max(read["largest_difference"].values()) < 1e-2, read
    assert not list((Path(tmp_path) / "states").rglob("*.safetensors"))
