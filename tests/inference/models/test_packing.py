"""Second copies of weights: the same numbers, the same products, and dropped with their model."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from inference import Engine, Sampling
from inference.measure.floor import weight_bytes
from inference.models import llama, packing
from inference.models.lm import LM
from inference.models.packing import InFloat16, can_pack, factor_of, pack
from inference.policy import Fixed
from inference.proposers.eagle import Eagle
from inference.proposers.independent import Independent
from tests import kinds
from tests.inference.models.test_llama import WIDE, build, passes
from tests.tiny import compiles, near, tiny, traced

needs_fbgemm = pytest.mark.skipif(not packing.has_fbgemm(), reason="no FBGEMM: torch has it on x86 alone")
BIASED: dict[str, Any] = WIDE | {"attention_bias": True, "mlp_bias": True}
REGIME: dict[str, Any] = {"max_new_tokens": 16, "seed": 5, "ignore_eos": True}


def halved(model: nn.Module) -> Any:
    """The model in float32 with the weights of a checkpoint in bfloat16."""
    return model.to(torch.bfloat16).to(torch.float32)


@needs_fbgemm
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (24, 40), (7, 33), (1, 1), (64, 600)])
@pytest.mark.parametrize("shrunk", [1.0, 2.0**-30, 2.0**30])
def test_products_are_those_of_the_weight(inputs: int, outputs: int, bias: bool, shrunk: float) -> None:
    """Against float64, within the rounding of float32, for every number of ids up to those of a tree and a prompt."""
    torch.manual_seed(0)
    weight = shrunk * torch.randn(outputs, inputs).to(torch.bfloat16).float()
    added = shrunk * torch.randn(outputs) if bias else None
    product = pack(weight, added)
    assert isinstance(product, InFloat16)
    for n in (1, 2, 3, 4, 5, 6, 7, 9, 17, 100):
        x = torch.randn(2, n, inputs)
        result = product(x)
        wide = None if added is None else added.double()
        exact = nn.functional.linear(x.double(), weight.double(), wide)
        terms = nn.functional.linear(x.double().abs(), weight.double().abs(), None if wide is None else wide.abs())
        assert result.dtype == torch.float32
        assert ((result.double() - exact).abs() <= (inputs + 2) * 2.0**-24 * terms).all()


@needs_fbgemm
@pytest.mark.parametrize("tiny_one", [2.0**-14, 2.0**-17 * 1.5, 2.0**-24, 2.0**-26 * 1.75])
def test_the_copy_has_the_numbers_of_the_weight(tiny_one: float) -> None:
    """Trained numbers that are nearly 0 as well, for which float16 alone has fewer digits."""
    weight = torch.randn(20, 32).to(torch.bfloat16).float()
    weight[3, 5], weight[4, 6], weight[5, 7] = tiny_one, -tiny_one * 1.0078125, 0.0
    product = pack(weight, None)
    assert isinstance(product, InFloat16)
    held = torch.ops.quantized.linear_unpack_fp16(product.held)[0] / product.factor
    assert torch.equal(held, weight)


def test_which_weights_float16_represents() -> None:
    weight = torch.randn(20, 32).to(torch.float16).float()
    assert factor_of(weight) == 1
    for power in (-20, 40):
        factor = factor_of(weight * 2.0**power)
        assert factor is not None and 2.0**14 <= float((factor * 2.0**power * weight).abs().max()) < 2.0**15
    weight[0, 0] = 1 + 2.0**-20  # between two numbers of float16
    assert factor_of(weight) is None
    fine = torch.ones(4, 4)
    fine[0, 0] = 2.0**-45  # lost, but far below what float32 rounds of the others
    assert factor_of(fine) is not None
    fine[0, 0] = 2.0**-20 * (1 + 2.0**-12)
    assert factor_of(fine) is None
    for value in (torch.inf, torch.nan):
        assert factor_of(torch.tensor([[1.0, value]])) is None
    assert factor_of(torch.zeros(2, 2)) is None and factor_of(torch.zeros(0, 2)) is None


@needs_fbgemm
def test_which_models_are_packed_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    model = halved(build("Llama", WIDE))
    assert can_pack(model)
    assert not can_pack(build("Llama", WIDE, torch.float32)) and not can_pack(model.double())
    model.float()
    count = sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(packing, "LARGEST", 2 * count)  # bytes of copies, not of the model
    assert can_pack(model)
    monkeypatch.setattr(packing, "LARGEST", 2 * count - 1)
    assert not can_pack(model)
    monkeypatch.setattr(packing, "LARGEST", 2**30)
    assert can_pack(model)
    monkeypatch.setattr(packing, "has_fbgemm", lambda: False)
    assert not can_pack(model)


@needs_fbgemm
def test_a_model_elsewhere_is_not_packed() -> None:
    assert not can_pack(halved(build("Llama", WIDE)).to("meta"))


@needs_fbgemm
@pytest.mark.parametrize("settings", [BIASED, WIDE | {"tie_word_embeddings": True}], ids=["biased", "tied"])
def test_the_forward_is_that_of_the_model(settings: dict[str, Any]) -> None:
    """One projection that float16 does not represent is left as it is."""
    model = halved(build("Llama", settings))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight += 1e-5
    lm = LM(model, 3)
    weights = lm.run.weights  # type: ignore[attr-defined]
    assert all(one.packed is not None for one in (weights.head, weights.layers[0].qkv, weights.layers[1].gate_up))
    assert weights.layers[1].down.packed is None
    torch.testing.assert_close(passes(lm), passes(LM(model, 3, stock=True)), rtol=1e-4, atol=1e-4)


@needs_fbgemm
def test_bytes_that_a_pass_reads_are_those_of_the_copy() -> None:
    model = halved(build("Llama", BIASED))
    count = sum(p.numel() for p in model.parameters()) - 32 * 64  # the embedding is not the head
    projections = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert weight_bytes(LM(model, 1)) == (4 * count - 2 * projections, count)


@needs_fbgemm
def test_copies_are_dropped_with_their_model() -> None:
    gc.collect()
    before = len(packing._products)
    lm = LM(halved(build("Llama", WIDE)), 1)
    assert len(packing._products) == before + 9  # four a layer, and the head
    del lm
    gc.collect()
    assert len(packing._products) == before


@needs_fbgemm
def test_a_compiled_pass_reads_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph has the operation of `packing` for every projection, and no product of torch's own."""
    traced(monkeypatch)
    model = halved(build("Llama", BIASED))
    lm = LM(model, 3, compile=True)
    passes(lm)  # traces
    with torch.profiler.profile() as profile:
        logits = passes(lm)
    names = {event.key for event in profile.key_averages()}
    assert "cotrain::product_in_float16" in names and not {"aten::addmm", "aten::mm"} & names
    torch.testing.assert_close(logits, passes(LM(model, 3, stock=True)), rtol=1e-4, atol=1e-4)


@needs_fbgemm
@compiles
def test_compiled_engines_write_the_same_text() -> None:
    target = halved(tiny(hidden=64, heads=4, seed=3))
    draft = halved(near(target))
    settings: dict[str, Any] = {"policy": Fixed(3), "rows": 2, "compile": True}
    plain, drafting = Engine(target, rows=2), Engine(target, Independent(draft), **settings)
    assert drafting.target.run.weights.head.packed is not None  # type: ignore[attr-defined]
    for temperature in (0.0, 1.0):
        texts = [engine.generate([[1, 2, 3], [4, 5]], sampling=Sampling(temperature), **REGIME).tokens
                 for engine in (plain, drafting)]  # fmt: skip
        assert texts[0] == texts[1] or temperature


@needs_fbgemm
def test_an_eagle_in_float32_drafts_with_copies() -> None:
    """The same text and rounds as without copies. Weights that change later are copied again."""
    target = halved(tiny(hidden=32, heads=2, layers=4))
    network = halved(kinds.eagle(target, 0.3))
    proposer, plain = Eagle(network), Eagle(halved(kinds.eagle(target, 0.3)))
    plain._copied = lambda: plain.network  # type: ignore[method-assign]

    def text(proposer: Eagle) -> Any:
        return Engine(target, proposer, policy=Fixed(3)).generate([[1, 2, 3, 4]], sampling=Sampling(1.0), **REGIME)

    with_copies, without = text(proposer), text(plain)
    assert with_copies.tokens == without.tokens
    assert with_copies.stats.target_calls == without.stats.target_calls
    changed = [m for m in proposer.served.modules() if isinstance(m, llama.PackedLinear)]
    assert len(changed) == sum(isinstance(m, nn.Linear) for m in network.modules()) > 0
    with torch.no_grad():
        network.fc.weight.zero_()
    text(proposer)
    assert float(proposer.served.fc(torch.ones(1, network.fc.in_features)).detach().abs().max()) == 0
