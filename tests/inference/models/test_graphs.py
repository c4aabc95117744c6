"""CUDA graphs on the stand-in device: what is recorded, launched, shared and let go; which attention kernels run."""

import warnings

import pytest
import torch

import inference.models.cuda_graphs as capture
import inference.models.lm as target_module
from inference import Engine, Sampling
from inference.models.cuda_graphs import Captured
from inference.models.forward import additive, attention, seen_from
from inference.models.llama import Shape, flash
from inference.models.lm import LM
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.base import Host
from tests import standin
from tests.tiny import near, tiny


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.models.recording.WARMUP", 1)
    monkeypatch.setattr(target_module, "FIRST_SLOTS", 16)
    monkeypatch.setattr(capture, "FEWEST", 8)


def ids(rows: int, n: int) -> torch.Tensor:
    return torch.arange(rows * n).view(rows, n).remainder(31).to("cuda")


def captured(rows: int = 4) -> LM:
    lm = LM(tiny().to("cuda"), rows, compile=True)
    lm.store(ids(rows, 1), [0] * rows)
    return lm


@torch.inference_mode()
def test_a_pass_is_one_copy_and_one_launch() -> None:
    """Nothing is computed to be thrown away (rotations, copies of results), nothing is read on the host."""
    with standin.device() as gpu:
        lm = captured()
        assert isinstance(lm.run, Captured)
        for only in (None, torch.tensor([1, 0, 1, 1], device="cuda")):
            window = lm._window(ids(4, 2), [1, 2, 3, 3], 0, None)
            lm.run.forward(ids(4, 2), window, only)
            given = ids(4, 2)
            gpu.clear()
            lm.run.forward(given, window, only)
            assert gpu.ops["-"] == {"cat": 1} and sum(gpu.launches.values()) == 2
            assert not gpu.h2d and not gpu.d2h


@torch.inference_mode()
def test_all_drafts_of_a_round_are_one_copy_and_one_launch() -> None:
    with standin.device() as gpu:
        lm = captured()
        u, temperature = torch.rand(4, 3, dtype=torch.float64), torch.tensor([0.5, 1.0, 2.0, 0.7], dtype=torch.float64)
        ends = torch.tensor([3, 4, 5, 3])
        given = [x.to("cuda") for x in (ends, u, temperature)]
        tails, window = ids(4, 2), target_module.Window(0, 4, given[0].unsqueeze(1), None, 7)
        lm.run.draft(tails, *given, False, window)
        gpu.clear()
        found = lm.run.draft(tails, *given, False, window)
        assert gpu.ops["-"] == {"cat": 1} and sum(gpu.launches.values()) == 2
        assert not gpu.h2d and not gpu.d2h
        drafts, distributions = (x.to("cpu") for x in found)
    host = LM(tiny(), 4, compile=False)
    host.store(torch.arange(4).view(4, 1), [0] * 4)
    logits = host.forward(torch.arange(8).view(4, 2), [1, 2, 3, 1]).logits[:, -1]
    torch.testing.assert_close(distributions[:, 0], (logits / temperature[:, None]).softmax(-1))
    assert drafts.shape == (4, 3)


@torch.inference_mode()
def test_widths_share_a_graph_and_added_ids_change_nothing() -> None:
    """Passes of 4 and of 5 ids are one graph; up to the last slot, where there is no room for an id that is not one."""
    with standin.device() as gpu:
        lm, eager = captured(), LM(tiny().to("cuda"), 4)
        eager.store(ids(4, 1), [0] * 4)
        for n, start in ((4, [1, 2, 1, 2]), (5, [5, 6, 5, 6]), (4, [10, 11, 12, 12])):
            found, wanted = lm.forward(ids(4, n), start).logits, eager.forward(ids(4, n), start).logits
            torch.testing.assert_close(found.to("cpu"), wanted.to("cpu"))
        assert {bucket[1] for bucket in lm.run.graphs} == {5}
        before = gpu.recordings
        lm.forward(ids(3, 5), [11, 10, 11])
        assert gpu.recordings == before


@torch.inference_mode()
def test_graphs_of_a_model_share_a_pool_and_of_two_models_do_not() -> None:
    with standin.device() as gpu:
        first, second = captured(), captured()
        for lm in (first, second):
            for n in (1, 2, 3):
                lm.forward(ids(4, n), [1, 2, 3, 3])
        pools = [{graph.graph.pool() for graph in lm.run.graphs.values()} for lm in (first, second)]
        assert [len(pool) for pool in pools] == [1, 1] and pools[0] != pools[1]
        assert gpu.recordings == 6


@torch.inference_mode()
def test_graphs_are_gone_before_the_cache_grows() -> None:
    """Layer by layer the old keys and values are freed: at no time are both caches there whole. And what is recorded
    then has a pool of its own: one whose graphs are gone is not used again."""
    with standin.device() as gpu:
        lm = captured()
        lm.forward(ids(4, 2), [1, 2, 3, 3])
        old = sum(store.keys.nbytes + store.values.nbytes for store in lm.cache.stores)
        rest = gpu.live - old
        gpu.peak = gpu.live
        made = ids(4, 2)
        lm.cache.aim(lm._window(made, [100, 2, 3, 3], 0, None))
        new = sum(store.keys.nbytes + store.values.nbytes for store in lm.cache.stores)
        assert new == 102 / 16 * old and gpu.peak < rest + new + old / 2
        lm.forward(made, [100, 2, 3, 3])
        assert len(lm.run.graphs) == 1


def test_graphs_are_the_default_on_a_gpu_alone() -> None:
    assert not Engine(tiny()).target.compiled
    host = Independent(tiny())
    host.open(Host(1, 0, 32, 64, LM(host.model, 1)))
    assert not host.lm.compiled
    with standin.device() as gpu:
        target, draft = tiny().to("cuda"), Independent(near(tiny()).to("cuda"))
        engine = Engine(target, draft, rows=2)
        engine.generate([[1, 2], [3]], max_new_tokens=4)
        assert isinstance(engine.target.run, Captured) and isinstance(draft.lm.run, Captured) and gpu.recordings
        assert not Engine(target, compile=False).target.compiled


def test_what_cannot_be_replayed_says_so_once() -> None:
    with standin.device():
        model = tiny().to("cuda")
        model.model.layers[0].register_forward_hook(lambda *_: None)
        with pytest.warns(UserWarning, match="LlamaForCausalLM: its passes cannot be replayed as CUDA graphs") as said:
            engine = Engine(model)
        assert len(said) == 1 and not engine.target.compiled
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Engine(model, compile=False)


def test_one_failure_leaves_other_models_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft cannot be recorded; the target still is, and the text is that of plain passes."""
    recorded = Captured._recorded

    def broken(self: Captured, *given: object) -> object:
        if self.model.config.num_hidden_layers == 1:
            raise RuntimeError("out of memory")
        return recorded(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Captured, "_recorded", broken)
    settings = {"max_new_tokens": 6, "sampling": Sampling(0.8), "ignore_eos": True}
    wanted = Engine(tiny(), Independent(tiny(layers=1)), policy=Fixed(2), rows=2).generate([[1, 2], [3]], **settings)
    with standin.device():
        draft = Independent(tiny(layers=1).to("cuda"))
        engine = Engine(tiny().to("cuda"), draft, policy=Fixed(2), rows=2)
        with pytest.warns(UserWarning, match="LlamaForCausalLM: CUDA graphs failed, passes run without: out of memory"):
            found = engine.generate([[1, 2], [3]], **settings)
        assert found.tokens == wanted.tokens
        assert draft.lm.run.failed and not engine.target.run.failed and engine.target.run.graphs


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("n, L", [(1, 96), (5, 101), (40, 60)])
def test_masked_attention_reads_keys_and_values_once(arch: str, groups: int, n: int, L: int) -> None:
    """Whatever the groups, one fused kernel, and little more is moved than keys, values and mask; the numbers are those
    of grouped attention."""
    A, H, D = 3, 8, 64
    shape = Shape(H, groups, D, D**-0.5, 1e-5, torch.bfloat16)
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
        found = attend(*given)
        assert set(gpu.attention) == {("-", {"sm80": "efficient+mask", "sm90": "cudnn+mask"}[arch])}
        once = sum(x.nbytes for x in (k, v)) + H // groups * A * n * -(-L // 16) * 16 * 2
        assert gpu.moved["-"] <= once + 6 * q.nbytes and sum(gpu.launches.values()) <= 2
        torch.testing.assert_close(found.to("cpu").double(), wanted, atol=2e-2, rtol=2e-2)
