"""Distributions, draws and verdicts recorded as CUDA graphs, on the stand-in: the text of the host, one replay for all,
nothing stale."""

import gc
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.models.replay import Graph, Recorded, pool_for
from inference.policy import Fixed
from inference.proposers import Independent
from tests import standin
from tests.gpu_counts import CUTS, PENALTIES
from tests.often import often
from tests.tiny import near, tiny

PROMPTS = [[i % 30 + 1 for i in range(n)] for n in (3, 9, 2, 6)]
LIMITS = [5, 3, 6, 4]
OTHERS = [Sampling(0.9, repetition_penalty=1.5, banned=((4,), (2, 3, 1))), Sampling(0), PENALTIES]
EACH_ITS_OWN = [CUTS[5], *OTHERS]


@pytest.fixture(autouse=True)
def not_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.models.replay.WARMUP", 0)  # what one writes shows in test_standin.py


def texts(device: str, rule: str, sampling: object, draft_device: str = "", **settings: object) -> list[list[int]]:
    target, draft = tiny(), near(tiny(layers=1))
    if device != "cpu":
        target, draft = target.to(device), draft.to(draft_device or device)
    proposer = Independent(draft, **settings)
    engine = Engine(target, proposer, verify=rule, policy=Fixed(2), rows=2)
    return engine.generate(PROMPTS, max_new_tokens=LIMITS, sampling=sampling, seed=3, ignore_eos=True).tokens


@pytest.mark.parametrize("rule", often(["token", "block", "coupled"], {"block"}.__contains__))
def test_recorded_rounds_give_the_text_of_the_host(rule: str) -> None:
    """Rows with settings of their own come and go, so that recordings meet other settings than their first."""
    likeliest = rule == "block"  # drafts
    wanted = texts("cpu", rule, EACH_ITS_OWN, greedy=likeliest)
    with standin.device() as gpu:
        assert texts("cuda", rule, EACH_ITS_OWN, greedy=likeliest) == wanted
        assert gpu.recordings


@pytest.mark.thorough
def test_a_draft_on_another_device_goes_step_by_step() -> None:
    """The tensors that it draws by are made before the round is verified, and are no part of the graph."""
    wanted = texts("cpu", "coupled", CUTS[: len(PROMPTS)])
    with standin.device():
        assert texts("cuda:0", "coupled", CUTS[: len(PROMPTS)], "cuda:1") == wanted


@pytest.mark.thorough
def test_own_processors_run_as_they_are() -> None:
    def shifted(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.roll(1, -1)

    each = [Sampling(0.8, processors=(shifted,)), *CUTS[:3]]
    wanted = texts("cpu", "token", each)
    with standin.device():
        assert texts("cuda", "token", each) == wanted


@pytest.mark.thorough
def test_where_recording_fails_rounds_run_on_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = texts("cpu", "token", Sampling(0.8))

    def broken(*_: object, **__: object) -> object:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("inference.models.replay.Recorded._record", broken)
    with standin.device(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert texts("cuda", "token", Sampling(0.8)) == wanted
    found = [one for one in map(str, (one.message for one in said)) if "run without" in one]
    # of the target's passes, of the draft's, and of the verification
    reason = "passes run without CUDA graphs, since recording failed: out of memory"
    assert found == 3 * [f"LlamaForCausalLM: {reason}; to have no warning, set graphs=False"]


@torch.inference_mode()
def test_inputs_have_one_place_and_recordings_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes share memory, a larger one moves it, a steady input is copied when it is another tensor alone."""
    monkeypatch.setattr("inference.models.replay.MOST", 3)
    with standin.device() as gpu:
        device: Any = SimpleNamespace(device=torch.device("cuda", 0))
        replays, one = Recorded(device), torch.ones(1, dtype=torch.int64, device="cuda")

        def summed(x: torch.Tensor, by: torch.Tensor) -> float:
            make = lambda: lambda x, by, one: (one * x * by).sum()  # noqa: E731
            return float(replays("sum", {"x": x, "by": by, "one": one}, make, {}, steady=frozenset({"by"})))

        two, five = (torch.tensor(by, device="cuda") for by in (2.0, 5.0))
        x = torch.arange(8.0).to("cuda")
        assert [summed(x[:n], two) for n in (4, 3, 4)] == [12, 6, 12]
        assert gpu.recordings == 2 and len(replays.graphs) == 2
        gpu.clear()
        assert summed(x[:4], two) == 12 and gpu.ops["-"]["copy_"] == 1
        assert summed(x[:4], five) == 30 and gpu.ops["-"]["copy_"] == 3
        assert summed(x[:3], five) == 15 and gpu.recordings == 2
        assert summed(x, five) == 140 and len(replays.graphs) == 1
        assert [summed(x[:n], two) for n in (1, 2, 3, 4, 8)] == [0, 2, 6, 12, 56]
        assert len(replays.graphs) <= 3
        small, large = x.clone()[:3], torch.ones(64).to("cuda")
        assert [summed(one, two) for one in (small, large, 5 * small)] == [6, 128, 30]


def test_no_graph_is_destroyed_while_another_is_recorded() -> None:
    """CUDA does not allow it. Graphs of an engine that is gone wait in a cycle for the collector."""
    with standin.device(), torch.inference_mode():
        x, device = torch.ones(2, device="cuda"), torch.device("cuda", 0)
        cycle: list[Any] = [Graph(lambda: x + 1, device, pool_for(device))]
        cycle.append(cycle)
        del cycle

        def run() -> Any:
            if gc.isenabled():  # then it may collect at any time
                gc.collect()
            return x * 2

        graph = Graph(run, device, pool_for(device))
        assert graph().tolist() == [2, 2] and gc.isenabled()
        gc.disable()
        try:
            Graph(run, device, pool_for(device))
            assert not gc.isenabled()  # a user's own choice stays
        finally:
            gc.enable()
