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
        settings = {"max_new_tokens": 10, "sampling": sampling, "seed": 4, "ignore_eos": True}
        return engine.generate(gpu_counts.PROMPTS, **settings)


ASKED = [*((kind, "cuts") for kind in gpu_counts.KINDS), ("early_exit", "one temperature"),
         ("conditioned", "temperatures")]  # fmt: skip


def test_tables_that_recordings_read_live_as_long_as_they_do() -> None:
    """A second call makes no others: what is replayed reads those of the first."""
    with standin.device():
        target = tiny().to("cuda")
        proposer: Any = kinds.KINDS["other_tokenizer"].proposer(target)
        engine, tables = Engine(target, proposer, policy=Fixed(2), rows=2), []
        for _ in range(2):
            engine.generate([[3, 5]], max_new_tokens=2, ignore_eos=True)
            tables.append((proposer.to_target, proposer.to_draft, proposer.inner.lm))
        other = Engine(tiny(seed=2).to("cuda"), proposer, policy=Fixed(2), rows=3)
        other.generate([[3, 5]], max_new_tokens=2, ignore_eos=True)
    assert all(first is second for first, second in zip(*tables, strict=True))
    assert proposer.inner.lm is not tables[0][2] and proposer.to_draft is not tables[0][1]


@pytest.mark.filterwarnings("error:.*CUDA graphs failed")
@pytest.mark.parametrize(("kind", "settings"), ASKED)
def test_replayed_drafts_are_those_of_single_steps(kind: str, settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.models.graphs.WARMUP", 0)
    several = {"cuts": gpu_counts.CUTS, "temperatures": gpu_counts.MIXED}
    sampling = several.get(settings, Sampling(0.8))
    one, other = (decoded(kind, device, sampling) for device in ("cpu", "cuda"))
    assert one.tokens == other.tokens and one.stats.rows == other.stats.rows
    assert sum(other.stats.accepted)
