"""The gate of a hybrid draft is calibrated on rounds as they are served."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from cotrain.bench import measurement
from inference.proposers.hybrid import Gate
from tests import standin
from tests.cotrain.bench.test_measurement import plan


def test_a_gate_on_a_gpu_is_of_rounds_as_they_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded there, where single launches take several times as long."""
    met: list[Any] = []
    monkeypatch.setattr(
        "cotrain.students.retrieval.calibrate", lambda *engines, **_: met.extend(engines[:2]) or Gate.uncalibrated()
    )
    for device in ("cpu", "cuda"):
        with standin.device() if device == "cuda" else nullcontext():
            hybrid_plan = plan("hybrid")
            for model in (hybrid_plan.target, hybrid_plan.draft):
                torch.nn.Module.to(model, device)
            hybrid_plan.draft.config.lookup = {"datastore": None, "shortest": 2}
            measurement.prepare(hybrid_plan)
            drafting, plain = met[-2:]
            assert {drafting.target.graphs, plain.target.graphs} == {device == "cuda"}
