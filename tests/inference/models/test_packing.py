"""Second copies of weights: the same numbers, the same products, as new as the weights, and dropped with them."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

from inference import Engine, Sampling
from inference.models import llama, packing
from inference.models.lm import LM
from inference.models.packing import InFloat16, can_pack, factor_of, pack
from inference.policy import Fixed
from inference.proposers.block import Block
from inference.proposers.eagle import Eagle
from inference.proposers.p_eagle import PEagle
from studies.floor import weight_bytes
from tests import kinds
from tests.inference.models.test_llama import WIDE, build, passes
from tests.tiny import tiny, traced

needs_fbgemm = pytest.mark.skipif(not packing.has_fbgemm(), reason="no FBGEMM: torch has it on x86 alone")
BIASED: dict[str, Any] = WIDE | {"attention_bias": True, "mlp_bias": True}
PROMPTS = [[1, 2, 3, 4], [4, 5]]
REGIME: dict[str, Any] = {"max_new_tokens": 16, "seed": 5, "ignore_eos": True}
FEATURES: dict[str, tuple[Any, Any]] = {
    "eagle": (kinds.eagle, Eagle),
    "p_eagle": (kinds.p_eagle, PEagle),
    "block": (kinds.block, Block),
}


@pytest.fixture(autouse=True)
def emulates(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CPU without instructions for bfloat16."""
    monkeypatch.setattr(packing, "emulated", lambda dtype: dtype == torch.bfloat16)


def halved(model: nn.Module) -> Any:
    """The model in float32 with the weights of a checkpoint in bfloat16."""
    return model.to(torch.bfloat16).to(torch.float32)


def copies() -> int:
    gc.collect()
    return len(packing._products)


@needs_fbgemm
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias", "shrunk"),
    [
        (16, 16, True, 1.0),
        (24, 40, False, 2.0**-30),
        (7, 33, True, 2.0**30),
        (1, 1, False, 1.0),
        (64, 600, True, 2.0**-112),
    ],
)
def test_products_are_those_of_the_weight(inputs: int, outputs: int, bias: bool, shrunk: float) -> None:
    """Against float64, within the rounding of float32, for every number of ids up to those of a tree and a prompt."""
    torch.manual_seed(0)
    weight = shrunk * torch.randn(outputs, inputs).to(torch.bfloat16).float()
    added = torch.randn(outputs) if bias else None
    product = pack(weight, added)
    assert isinstance(product, InFloat16)
    for shape in ((inputs,), (0, inputs), *((2, n, inputs) for n in (1, 2, 3, 4, 5, 6, 7, 9, 17, 100))):
        x = torch.randn(shape)
        result = product(x)
        wide = None if added is None else added.double()
        exact = nn.functional.linear(x.double(), weight.double(), wide)
        terms = nn.functional.linear(x.double().abs(), weight.double().abs(), None if wide is None else wide.abs())
        assert result.dtype == torch.float32 and result.shape == exact.shape
        assert ((result.double() - exact).abs() <= (inputs + 2) * 2.0**-24 * terms).all()
    apart = torch.randn(inputs, 3).T
    torch.testing.assert_close(product(apart), product(apart.contiguous()), rtol=0, atol=0)


@pytest.mark.parametrize("power", [-100, -20, 0, 10, 40])
def test_which_weights_float16_represents(power: int) -> None:
    """Errors are judged beside the largest number of their row."""
    weight = torch.randn(20, 32).to(torch.float16).float() * 2.0**power
    factor = factor_of(weight)
    assert factor is not None and (factor == 1 if power in (0, 10) else True)
    assert 2.0**14 <= float((factor * weight).abs().max()) < 2.0**15 or factor == 1
    rows = torch.ones(5000, 4)
    for last, fits in ((2.0**-18 * (1 + 2.0**-12), True), (2.0**-17 * (1 + 2.0**-12), False), (2.0**-45, True)):
        rows[4999, 0] = last  # changes by 2^-30, 2^-29 and 2^-45 of its row
        assert (factor_of(rows * 2.0**power) is not None) is fits
    rows[4998] = 2.0**-40 * (1 + 2.0**-7)  # its error is that of the smallest numbers, and nothing beside other rows
    assert factor_of(rows * 2.0**power) is None


def test_numbers_without_a_factor() -> None:
    for value in (torch.inf, torch.nan):
        assert factor_of(torch.tensor([[1.0, value]])) is None
    assert factor_of(torch.zeros(2, 2)) is None and factor_of(torch.zeros(0, 2)) is None


@needs_fbgemm
def test_which_models_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = halved(build("Llama", WIDE))
    count = sum(p.numel() for p in model.parameters())
    assert can_pack(model) and not can_pack(copy.deepcopy(model).double())
    assert not can_pack(copy.deepcopy(model).bfloat16()) and not can_pack(copy.deepcopy(model).to("meta"))
    for largest, fits in ((2 * count, True), (2 * count - 1, False)):  # bytes of copies, not of the model
        with monkeypatch.context() as patch:
            patch.setattr(packing, "LARGEST", largest)
            assert can_pack(model) is fits
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.quantized, "engine", "qnnpack")
        assert not can_pack(model)
    monkeypatch.setattr(packing, "emulated", lambda dtype: False)
    assert not can_pack(model)


@needs_fbgemm
@pytest.mark.parametrize(
    ("family", "settings"), [("Llama", BIASED), ("Qwen2", BIASED), ("Qwen3", WIDE | {"tie_word_embeddings": True})]
)
def test_the_forward_is_that_of_the_model(family: str, settings: dict[str, Any]) -> None:
    """One projection that float16 does not represent is left as it is."""
    model = halved(build(family, settings))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight += 1e-5
    lm = LM(model, 3)
    weights = lm.run.weights  # type: ignore[attr-defined]
    assert all(linear.packed is not None for linear in (weights.head, weights.layers[0].qkv, weights.layers[1].gate_up))
    assert weights.layers[1].down.packed is None
    torch.testing.assert_close(passes(lm), passes(LM(model, 3, stock=True)), rtol=1e-4, atol=1e-4)


@needs_fbgemm
def test_bytes_that_a_pass_reads_are_those_of_the_copy() -> None:
    model = halved(build("Llama", BIASED))
    count = sum(p.numel() for p in model.parameters()) - 32 * 64  # the embedding is not the head
    projections = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert weight_bytes(LM(model, 1)) == (4 * count - 2 * projections, count)


@needs_fbgemm
def test_copies_are_of_the_present_weights_and_dropped_with_them() -> None:
    before = copies()
    model = halved(build("Llama", WIDE))
    other = LM(halved(build("Qwen3", WIDE)), 3)
    lm = LM(model, 3)
    assert copies() == before + 18  # four a layer, and the head, of two models
    del other
    assert copies() == before + 9
    third = LM(halved(build("Qwen2", WIDE)), 3)
    for one in (lm, third):
        torch.testing.assert_close(passes(one), passes(LM(one.model, 3, stock=True)), rtol=1e-4, atol=1e-4)
    del one
    model.lm_head.weight.data.mul_(2)  # which torch does not count
    assert lm.stale
    torch.testing.assert_close(passes(LM(model, 3)), passes(LM(model, 3, stock=True)), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1e-5  # as training does: now float16 represents none
    lm = LM(model, 3)
    assert not lm.run.packs and copies() == before + 9  # type: ignore[attr-defined]
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    passes(lm)
    assert copies() == before + 9  # its stamp does not read all bytes, so it may not begin to copy
    del lm, model, third
    assert copies() == before


@pytest.mark.thorough
@needs_fbgemm
def test_compiled_passes_read_copies_and_share_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has the operator for every projection, and no product of torch's own. It is compiled once for all models
    of a shape, also when one of them is gone."""
    traced(monkeypatch)
    torch._dynamo.reset()
    first, second = (halved(build("Llama", BIASED)) for _ in range(2))
    with torch.no_grad():
        for weight in second.parameters():
            weight *= 0.5
    lm, other = LM(first, 3, compile=True), LM(second, 3, compile=True)
    passes(lm)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.profiler.profile() as profile:
        logits = passes(other)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
    names = {event.key for event in profile.key_averages()}
    assert "inference::product_in_float16" in names and not {"aten::addmm", "aten::mm"} & names
    torch.testing.assert_close(logits, passes(LM(second, 3, stock=True)), rtol=1e-4, atol=1e-4)
    del lm, first
    gc.collect()
    torch.testing.assert_close(passes(other), logits, rtol=0, atol=0)
    with torch.inference_mode():
        other.forward(torch.ones(3, 2, dtype=torch.int64), [12, 12, 12], states=(1,))  # a module of another name
    del other
    before = copies()
    with torch.no_grad():
        second.lm_head.weight *= 2
    passes(LM(second, 3, compile=True))
    assert copies() == before  # no copies of the old weights


@pytest.mark.thorough
@needs_fbgemm
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kind", FEATURES)
def test_drafts_over_states_in_float32_have_copies(kind: str, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text and rounds as without copies. Weights that change later are copied again."""
    traced(monkeypatch)
    make, proposes = FEATURES[kind]
    target = halved(tiny(hidden=32, heads=2, layers=4))
    network = halved(make(target, 0.3))
    proposer, plain = proposes(network), proposes(halved(make(target, 0.3)))
    plain._copied = lambda packs: plain.network

    engines = {one: Engine(target, one, policy=Fixed(3), rows=2, compile=compile) for one in (proposer, plain)}

    def text(one: Any) -> Any:
        return engines[one].generate(PROMPTS, sampling=Sampling(1.0), **REGIME)

    with_copies, without = text(proposer), text(plain)
    assert with_copies.tokens == without.tokens
    assert with_copies.stats.target_calls == without.stats.target_calls
    packed = [m for m in proposer.served.modules() if isinstance(m, llama.PackedLinear)]
    assert len(packed) == sum(isinstance(m, nn.Linear) for m in network.modules()) > 0
    network.fc.weight.data.mul_(0.5)  # which torch does not count
    plain.network.fc.weight.data.mul_(0.5)
    with torch.profiler.profile() as profile:
        tokens = text(proposer).tokens
    assert not {"aten::addmm", "aten::mm"} & {event.key for event in profile.key_averages()}
    assert tokens == text(plain).tokens
    x = torch.randn(1, network.fc.in_features)
    torch.testing.assert_close(proposer.served.fc(x), network.fc(x).detach(), rtol=1e-4, atol=1e-4)


@needs_fbgemm
def test_a_packed_layer_has_its_bias() -> None:
    network = nn.Sequential(halved(nn.Linear(16, 16)), nn.Linear(16, 4, bias=False))
    served = llama.packed_copy(network)
    assert isinstance(served[0], llama.PackedLinear) and isinstance(served[1], nn.Linear)
    x = torch.randn(2, 16)
    for one in (served, copy.deepcopy(served)):
        torch.testing.assert_close(one(x), network(x), rtol=1e-5, atol=1e-5)
