"""What tests of models share."""

import pytest

import inference.models.lm as lm_module
from inference.models.replay import Recorded


@pytest.fixture
def graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled models run by the buckets of CUDA graphs, on a CPU without graphs, in slots that start few."""
    monkeypatch.setattr("inference.models.replay.Compiled", Recorded)
    monkeypatch.setattr(lm_module, "FIRST_SLOTS", 16)
    monkeypatch.setattr("inference.models.replay.FEWEST", 8)
    monkeypatch.setattr("inference.models.replay.WARMUP", 1)
    monkeypatch.setattr(Recorded, "failed", False)
