"""What tests of models share."""

import pytest

from tests.tiny import record_on_cpu


@pytest.fixture
def graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpu(monkeypatch)
    monkeypatch.setattr("inference.models.replay.WARMUP", 1)
