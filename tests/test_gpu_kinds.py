"""Every kind of draft on the stand-in device: what is replayed there drafts what single steps draft on a CPU."""

from contextlib import nullcontext
from typing import Any

import pytest

from inference import Engine, Sampling
from inference.policy import Fixed
from tests import gpu_counts, kinds, standin
from tests.tiny import tiny


def decoded(kind: str, device: str, sampling: Any) -> Any:
    compile = device == "cuda"
    with standin.device() if compile else nullcontext():
        target = tiny().to(device)
        proposer = kinds.KINDS[kind].proposer(target)
        model = getattr(proposer, "inner", getattr(proposer, "model", proposer))
        model.compile = compile
        engine = Engine(target, proposer, policy=Fixed(gpu_counts.K), rows=gpu_counts.ROWS, compile=compile)
        settings = {"max_new_tokens": 14, "sampling": sampling, "seed": 4, "ignore_eos": True}
        return engine.generate(gpu_counts.PROMPTS, **settings)


ASKED = [*((kind, "cuts") for kind in gpu_counts.KINDS), ("early_exit", "one temperature")]


@pytest.mark.filterwarnings("error:.*CUDA graphs failed")
@pytest.mark.parametrize(("kind", "settings"), ASKED)
def test_replayed_drafts_are_those_of_single_steps(kind: str, settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.models.recording.WARMUP", 0)
    sampling = gpu_counts.CUTS if settings == "cuts" else Sampling(0.8)
    one, other = (decoded(kind, device, sampling) for device in ("cpu", "cuda"))
    assert one.tokens == other.tokens and one.stats.rows == other.stats.rows
    assert sum(other.stats.accepted)
