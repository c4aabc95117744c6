"""CUDA graphs of short passes and of all drafts: buckets on a CPU without graphs; on the stand-in device, and with a
GPU, what is recorded, launched, shared and freed; which attention kernels run."""

import copy
import warnings

import pytest
import torch

import inference.models.lm as lm_module
import inference.models.replay as replay
from inference import Engine, Sampling
from inference.models.forward import additive, attention, seen_from
from inference.models.llama import ModelShape, flash
from inference.models.lm import LM
from inference.models.step import Replayed
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.base import Host
from tests import standin
from tests.tiny import PROMPTS, near, tiny


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that start few and one run before a recording, but on a GPU."""
    if "gpu" not in request.keywords:
        monkeypatch.setattr(replay, "WARMUP", 1)
        monkeypatch.setattr(lm_module, "FIRST_SLOTS", 16)
        monkeypatch.setattr(replay, "FEWEST", 8)


def buckets(lm: LM) -> set[tuple[int, int, int, bool]]:
    """Rows, ids per row and slots of the recorded passes, and whether logits are of one id per row."""
    assert isinstance(lm.run, Replayed)
    sizes = [(key[1], dict(key[2:])) for key in lm.run.replay.graphs]
    return {(rows, part["ids"][0], part["slots"][0], "only" in part) for rows, part in sizes}


def texts(graphs: bool, device: str) -> list[list[int]]:
    target, draft = (model.to(device) for model in (tiny(), tiny(layers=1, seed=3)))
    proposer = Independent(draft)
    engine = Engine(target, proposer, policy=Fixed(3), rows=3, graphs=graphs)
    limits = [20, 4, 33, 11, 26]
    return engine.generate(PROMPTS, max_new_tokens=limits, sampling=Sampling(0.8), seed=2, ignore_eos=True).tokens


def test_padding_leaves_waiting_prompts_alone(graphs_on_cpu: None) -> None:
    """Six rows are no power of two: a graph of eight rows may not touch a slot in which a prompt waits."""
    settings = {"sampling": Sampling(0.8), "ignore_eos": True}
    limits, prompts = [5 + 7 * i % 23 for i in range(16)], [[i + 1] * (i % 5 + 2) for i in range(16)]
    tokens = []
    for graphs in (True, False):
        engine = Engine(tiny(), Independent(near(tiny())), rows=6, graphs=graphs)
        tokens.append(engine.generate(prompts, max_new_tokens=limits, **settings).tokens)
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
def test_graphs_give_the_text_of_plain_passes() -> None:
    assert texts(True, "cuda") == texts(False, "cuda")
    lm = LM(copy.deepcopy(tiny()).to("cuda"), 4, graphs=True)
    assert isinstance(lm.run, Replayed) and not lm.run.replay.failed
    ids = torch.ones(3, 2, dtype=torch.int64, device="cuda")
    with torch.inference_mode():
        lm.forward(ids, [0, 0, 0])
        lm.forward(ids, [1, 2, 3])
    assert all(graph.graph is not None for graph, _ in lm.run.replay.graphs.values())


def ids(rows: int, n: int) -> torch.Tensor:
    return torch.arange(rows * n).view(rows, n).remainder(31).to("cuda")


def recording_lm(rows: int = 4) -> LM:
    lm = LM(tiny().to("cuda"), rows, graphs=True)
    lm.store(ids(rows, 1), [0] * rows)
    return lm


@torch.inference_mode()
def test_widths_share_a_graph_and_added_ids_change_nothing() -> None:
    """Passes of 4 and of 5 ids are one graph; up to the last slot, where there is no room for an id that is not one."""
    with standin.device() as gpu:
        lm, eager = recording_lm(), LM(tiny().to("cuda"), 4)
        eager.store(ids(4, 1), [0] * 4)
        for n, start in ((4, [1, 2, 1, 2]), (5, [5, 6, 5, 6]), (4, [10, 11, 12, 12])):
            logits, wanted = lm.forward(ids(4, n), start).logits, eager.forward(ids(4, n), start).logits
            torch.testing.assert_close(logits.to("cpu"), wanted.to("cpu"))
        assert {width for _, width, *_ in buckets(lm)} == {5}
        before = gpu.recordings
        lm.forward(ids(3, 5), [11, 10, 11])
        assert gpu.recordings == before


@torch.inference_mode()
def test_graphs_of_a_model_share_a_pool_and_of_two_models_do_not() -> None:
    with standin.device() as gpu:
        first, second = recording_lm(), recording_lm()
        for lm in (first, second):
            for n in (1, 2, 3):
                lm.forward(ids(4, n), [1, 2, 3, 3])
        pools = [{graph.graph.pool() for graph, _ in lm.run.replay.graphs.values()} for lm in (first, second)]
        assert [len(pool) for pool in pools] == [1, 1] and pools[0] != pools[1]
        assert gpu.recordings == 6


@torch.inference_mode()
def test_graphs_are_dropped_before_the_cache_grows() -> None:
    """The old keys and values are freed layer by layer: at no time are both caches whole. Graphs recorded afterwards
    have a new pool: a pool whose graphs are dropped cannot be used again."""
    with standin.device() as gpu:
        lm = recording_lm()
        lm.forward(ids(4, 2), [1, 2, 3, 3])
        old = sum(store.keys.nbytes + store.values.nbytes for store in lm.cache.stores)
        rest = gpu.live - old
        gpu.peak = gpu.live
        new_ids = ids(4, 2)
        lm.cache.aim(lm._window(new_ids, [100, 2, 3, 3], 0, None))
        new = sum(store.keys.nbytes + store.values.nbytes for store in lm.cache.stores)
        assert new == 102 / 16 * old and gpu.peak < rest + new + old / 2
        lm.forward(new_ids, [100, 2, 3, 3])
        assert len(lm.run.replay.graphs) == 1


def test_graphs_are_the_default_on_a_gpu_alone() -> None:
    assert not Engine(tiny()).target.graphs
    host = Independent(tiny())
    host.open(Host(1, 0, 32, 64, LM(host.model, 1)))
    assert not host.lm.graphs
    with standin.device() as gpu:
        target, draft = tiny().to("cuda"), Independent(near(tiny()).to("cuda"))
        engine = Engine(target, draft, rows=2)
        engine.generate([[1, 2], [3]], max_new_tokens=4)
        assert engine.target.graphs and draft.lm.graphs and gpu.recordings
        assert not Engine(target, graphs=False).target.graphs


def test_a_model_without_graphs_warns_once() -> None:
    with standin.device():
        model = tiny().to("cuda")
        model.model.layers[0].register_forward_hook(lambda *_: None)
        with pytest.warns(UserWarning, match="LlamaForCausalLM: its passes cannot be recorded as CUDA graphs") as said:
            engine = Engine(model)
        assert len(said) == 1 and not engine.target.graphs
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Engine(model, graphs=False)


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("n, L", [(1, 96), (5, 101), (40, 60)])
def test_masked_attention_reads_keys_and_values_once(arch: str, groups: int, n: int, L: int) -> None:
    """Whatever the groups, one fused kernel, and little more is moved than keys, values and mask; the numbers are those
    of grouped attention."""
    A, H, D = 3, 8, 64
    shape = ModelShape(H, groups, D, D**-0.5, 1e-5, torch.bfloat16)
    q, k, v = (
        torch.randn(A, heads, length, D, dtype=torch.bfloat16) for heads, length in ((H, n), (groups, L), (groups, L))
    )
    positions = torch.tensor([[L - n], [0], [L // 3]]) + torch.arange(n)
    mask = additive(seen_from(positions, torch.arange(L)), torch.bfloat16)
    wanted = flash(q.double(), k.double(), v.double(), mask.double(), shape)
    with standin.device(arch) as gpu, torch.inference_mode():
        given = [x.to("cuda") for x in (q, k, v)]
        attend = attention(mask.to("cuda"), shape)
        gpu.clear()
        attended = attend(*given)
        assert set(gpu.attention) == {("-", {"sm80": "efficient+mask", "sm90": "cudnn+mask"}[arch])}
        once = sum(x.nbytes for x in (k, v)) + H // groups * A * n * -(-L // 16) * 16 * 2
        assert gpu.moved["-"] <= once + 6 * q.nbytes and sum(gpu.launches.values()) <= 2
        torch.testing.assert_close(attended.to("cpu").double(), wanted, atol=2e-2, rtol=2e-2)
