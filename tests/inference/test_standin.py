"""The CUDA path without a GPU, on `standin`: devices are not mixed, graphs give the text of plain passes, waits are
few."""

from typing import Any

import pytest
import torch

import inference.models.lm as target_module
import inference.models.replay as capture
from inference import Engine, Sampling
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from tests import standin
from tests.often import often
from tests.tiny import PROMPTS, near, tiny

LIMITS = [7, 3, 11, 2, 5]
COOL = Sampling(0.8)
FULL = Sampling(
    0.9, repetition_penalty=1.2, presence_penalty=0.3, logit_bias={3: 1.0}, banned=((1, 2),), min_new_tokens=2
)


@pytest.fixture(autouse=True)
def warmed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a warm-up run writes shows after one."""
    monkeypatch.setattr("inference.models.replay.WARMUP", 1)


def engine(device: str, kind: str, rule: str, rows: int, graphs: bool | None) -> Engine:
    target, draft = tiny(), near(tiny())
    if device != "cpu":
        target, draft = target.to(device), draft.to(device)
    kinds = {"plain": lambda: None, "draft": lambda: Independent(draft), "ngram": NGram}
    return Engine(target, kinds[kind](), verify=rule, policy=Fixed(3), rows=rows, graphs=graphs)


def texts(device: str, kind: str, rule: str, rows: int, graphs: bool | None, sampling: Any = COOL) -> list[list[int]]:
    decoder, limits = engine(device, kind, rule, rows, graphs), LIMITS if sampling is COOL else LIMITS[:3]
    settings = {"max_new_tokens": limits, "sampling": sampling, "seed": 2, "ignore_eos": True}
    return decoder.generate(PROMPTS[: len(limits)], **settings).tokens


KINDS = ["plain", "draft", "ngram"]


@pytest.mark.parametrize(
    "sampling",
    often(
        [[Sampling(0.0), Sampling(0.9, top_p=0.8), FULL], [Sampling(1.0, top_k=5)] * 3], lambda each: each[-1] is FULL
    ),
)
@pytest.mark.thorough
def test_every_setting_stays_on_its_device(sampling: list[Sampling]) -> None:
    wanted = texts("cpu", "draft", "token", 2, False, sampling)
    with standin.device():
        assert texts("cuda", "draft", "token", 2, False, sampling) == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("device, arch", [("cuda", "sm80"), ("cuda:1", "sm90")])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_give_the_text_of_plain_passes(
    kind: str, device: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots grow, rows come and go, graphs are recorded in the middle of texts."""
    monkeypatch.setattr(target_module, "FIRST_SLOTS", 8)
    monkeypatch.setattr(capture, "FEWEST", 8)
    wanted = texts("cpu", kind, "token", 3, False)
    with standin.device(arch) as gpu:
        assert texts(device, kind, "token", 3, True) == wanted
        assert gpu.recordings


def test_a_recording_does_not_hold_what_it_reads() -> None:
    """Neither its inputs nor weights that were replaced; what it made itself it has."""
    with standin.device() as gpu:
        made = {"x": torch.ones(3, device="cuda")}
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            result = (made["x"] + 1) * 2
        graph.replay()
        assert result.tolist() == [4.0] * 3 and gpu.recordings
        del made["x"]
        with pytest.raises(RuntimeError, match="add was recorded with memory that is free by now"):
            graph.replay()
