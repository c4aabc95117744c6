"""Passes replayed by bucket: on a CPU without graphs, the same logic; with a GPU, the graphs themselves."""

import copy

import pytest
import torch

import inference.models.lm as target_module
from inference import Engine, Sampling
from inference.models.cuda_graphs import Captured
from inference.models.lm import LM
from inference.policy import Fixed
from inference.proposers import Independent
from tests.tiny import near, tiny

PROMPTS = [[i % 30 + 1 for i in range(n)] for n in (3, 9, 1, 6, 14)]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are run by bucket, in slots that start few."""
    monkeypatch.setattr(target_module, "Compiled", Captured)
    monkeypatch.setattr(target_module, "FIRST_SLOTS", 16)
    monkeypatch.setattr("inference.models.cuda_graphs.FEWEST", 8)
    monkeypatch.setattr(Captured, "failed", False)


def texts(compile: bool, rows: int = 3, device: str = "cpu") -> list[list[int]]:
    target, draft = (model.to(device) for model in (tiny(), tiny(layers=1, seed=3)))
    proposer = Independent(draft, compile=compile)
    engine = Engine(target, proposer, policy=Fixed(3), rows=rows, compile=compile)
    limits = [20, 4, 33, 11, 26]
    return engine.generate(PROMPTS, max_new_tokens=limits, sampling=Sampling(0.8), seed=2, ignore_eos=True).tokens


def test_text_is_the_same_by_bucket(captured: None) -> None:
    """Rows come and go, slots grow, lengths differ: in float64 nothing may change."""
    assert texts(compile=True) == texts(compile=False)


def test_buckets_are_few_and_dropped_when_the_cache_grows(captured: None) -> None:
    lm = LM(tiny(), 4, compile=True)
    assert isinstance(lm.run, Captured)
    ids = torch.ones(3, 2, dtype=torch.int64)
    with torch.inference_mode():
        lm.forward(ids, [0, 0, 0])  # the first pass makes the cache
        for start in range(5):
            lm.forward(ids, [start, start + 1, start])
        assert {bucket[:4] for bucket in lm.run.graphs} == {(4, 2, 8, False)}
        every = lm.forward(ids * torch.tensor([[3, 7]]), [5, 6, 7]).logits
        asked = lm.forward(ids * torch.tensor([[3, 7]]), [5, 6, 7], only=torch.tensor([0, 1, 1])).logits
        torch.testing.assert_close(asked, torch.stack([every[0, :1], every[1, 1:], every[2, 1:]]))
        assert {bucket[:4] for bucket in lm.run.graphs} == {(4, 2, 8, False), (4, 2, 16, False), (4, 2, 16, True)}
        lm.forward(ids[:1], [20])
        assert {bucket[:4] for bucket in lm.run.graphs} == {(1, 2, 32, False)}


def test_padding_leaves_waiting_prompts_alone(captured: None) -> None:
    """Six rows are no power of two: what is recorded for eight may not touch a slot in which a prompt waits."""
    settings = {"sampling": Sampling(0.8), "ignore_eos": True}
    limits, prompts = [5 + 7 * i % 23 for i in range(16)], [[i + 1] * (i % 5 + 2) for i in range(16)]
    found = []
    for compile in (True, False):
        engine = Engine(tiny(), Independent(near(tiny()), compile=compile), rows=6, compile=compile)
        found.append(engine.generate(prompts, max_new_tokens=limits, **settings).tokens)
    assert found[0] == found[1]


def test_new_weights_are_seen(captured: None) -> None:
    model, ids = tiny(), torch.ones(2, 1, dtype=torch.int64)
    lm = LM(model, 2, compile=True)
    with torch.inference_mode():
        first = [lm.forward(ids, [0, 0]).logits, lm.forward(ids, [1, 2]).logits][1].clone()
        other = tiny(seed=5)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.data = theirs.data.clone()
        again = [lm.forward(ids, [0, 0]).logits, lm.forward(ids, [1, 2]).logits][1]
        truth = LM(other, 2)
        wanted = [truth.forward(ids, [0, 0]).logits, truth.forward(ids, [1, 2]).logits][1]
    assert not torch.equal(first, again)
    torch.testing.assert_close(again[:1], wanted[:1])  # of the second row, position 1 was never written


def test_what_cannot_be_recorded_runs_as_it_is(captured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Captured, "_recorded", broken)
    with pytest.warns(UserWarning, match="CUDA graphs failed, passes run without: operation not permitted"):
        found = texts(compile=True)
    assert found == texts(compile=False)


@pytest.mark.gpu
def test_graphs_give_the_text_of_plain_passes() -> None:
    assert texts(compile=True, device="cuda") == texts(compile=False, device="cuda")
    lm = LM(copy.deepcopy(tiny()).to("cuda"), 4, compile=True)
    assert isinstance(lm.run, Captured) and not Captured.failed
    ids = torch.ones(3, 2, dtype=torch.int64, device="cuda")
    with torch.inference_mode():
        lm.forward(ids, [0, 0, 0])
        lm.forward(ids, [1, 2, 3])
    assert all(graph.graph is not None for graph in lm.run.graphs.values())
