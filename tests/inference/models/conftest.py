"""What tests of models share."""

import pytest

import inference.models.lm as lm_module
from inference.models.graphs import GraphForward


@pytest.fixture
def graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled models run by the buckets of CUDA graphs, on a CPU without graphs, in slots that start few."""
    monkeypatch.setattr(lm_module, "CompiledForward", GraphForward)
    monkeypatch.setattr(lm_module, "FIRST_SLOTS", 16)
    monkeypatch.setattr("inference.models.graphs.FEWEST", 8)
    monkeypatch.setattr("inference.models.graphs.WARMUP", 1)
    monkeypatch.setattr(GraphForward, "failed", False)
