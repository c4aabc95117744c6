"""Second copies of weights: the same numbers, the same products, as new as the weights, and dropped with them."""

import copy
import gc
import math
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from inference import Engine, Sampling
from inference.measure.floor import weight_bytes
from inference.models import llama, packing, pretrained
from inference.models.lm import LM
from inference.models.packing import Widened, can_pack, pack
from inference.models.passes import LAST, ChainDraws
from inference.policy import Fixed
from inference.proposers.block import Block
from inference.proposers.eagle import Eagle, EagleDrafting
from inference.proposers.independent import Independent
from inference.proposers.p_eagle import PEagle
from inference.sampling import distributions
from inference.verify.tree import Tree
from tests import kinds
from tests.inference.models.test_llama import FAMILIES, WIDE, build, passes
from tests.inference.models.test_trees import PARENTS, check
from tests.inference.test_adaptive_policy import Script
from tests.inference.test_every_proposer import Uneven
from tests.inference.test_shared_proposers import Short
from tests.tiny import near, tiny

# where there is a compiler they must compile
EXACT = {torch.bfloat16: torch.int16}  # of products that do not round
needs_kernels = pytest.mark.skipif(shutil.which(packing.compiler()) is None, reason="no C++ compiler")
BIASED: dict[str, Any] = WIDE | {"attention_bias": True, "mlp_bias": True}
PROMPTS = [[1, 2, 3, 4], [4, 5]]
REGIME: dict[str, Any] = {"max_new_tokens": 16, "seed": 5, "ignore_eos": True}
FEATURES: dict[str, tuple[Any, Any]] = {
    "eagle": (kinds.eagle, Eagle),
    "p_eagle": (kinds.p_eagle, PEagle),
    "block": (kinds.block, Block),
}


def halved(model: nn.Module) -> Any:
    """The model in float32 with the weights of a checkpoint in bfloat16."""
    return model.to(torch.bfloat16).to(torch.float32)


def in_bytes(x: torch.Tensor) -> torch.Tensor:
    """Rows of x as weights in 4 bits are multiplied: whole numbers up to 127 times a scale of each group."""
    groups = packing.in_groups(x)
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return ((groups * (127 / largest)).round() * (largest / 127)).flatten(-2)


def copies() -> int:
    gc.collect()
    return sum(isinstance(one, Widened) for one in gc.get_objects())


@needs_kernels
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias", "shrunk", "dtype"),
    [
        (16, 16, True, 1.0, torch.bfloat16),
        (24, 40, False, 2.0**-30, torch.bfloat16),
        (6, 33, True, 2.0**30, torch.bfloat16),
        (2, 1, False, 1.0, torch.bfloat16),
        (64, 600, True, 2.0**-112, torch.bfloat16),
        (23, 50, True, 1.0, torch.float16),
        (37, 50, True, 1.0, torch.int8),
        (96, 50, True, 1.0, torch.uint8),
        (32, 16, False, 1.0, torch.uint8),
    ],
)
def test_products_are_those_of_the_weight(inputs, outputs, bias, shrunk, dtype):
    """Against float64, within the rounding of float32, for every number of ids up to those of a tree and a prompt."""
    torch.manual_seed(0)
    rows, added = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
    weight, product = shrunk * rows.to(dtype).float(), None
    if dtype == torch.int8:
        weight, product = llama.rounded(rows), llama._rounded(llama.Linear(rows, added)).packed
    if dtype == torch.uint8:  # whole numbers from -8 to 7 times scales of both signs
        numbers = torch.randint(-8, 8, (outputs, inputs // 32, 32))
        scales = torch.randn(outputs, inputs // 32).bfloat16()
        weight = (numbers * scales.float().unsqueeze(2)).flatten(1)
        product = llama._rounded(llama.Linear(weight.bfloat16(), added, scales=scales)).packed
    product = product or pack(weight, added)
    assert isinstance(product, Widened) and product.weight.dtype == EXACT.get(dtype, dtype)
    for shape in ((inputs,), (0, inputs), *((1, n, inputs) for n in (*range(1, 20), 100))):
        x = torch.randn(shape)
        result = product(x)
        wide = None if added is None else added.double()
        exact = nn.functional.linear(x.double(), weight.double(), wide)
        terms = nn.functional.linear(x.double().abs(), weight.double().abs(), None if wide is None else wide.abs())
        assert result.dtype == torch.float32 and result.shape == exact.shape
        error = (inputs + 3) * 2.0**-24 * terms
        if dtype == torch.int8:  # x is rounded to whole numbers up to 32767
            error += x.abs().amax(-1, keepdim=True) / 32767 / 2 * weight.abs().sum(1)
        if dtype == torch.uint8:  # to whole numbers up to 127, in groups
            size = packing.in_groups(x.abs()).amax(-1) / 127 / 2
            error += nn.functional.linear(size, packing.in_groups(weight.abs()).sum(-1))
        assert ((result.double() - exact).abs() <= error).all()
    apart = torch.randn(inputs, 3).T
    torch.testing.assert_close(product(apart), product(apart.contiguous()), rtol=0, atol=0)


@needs_kernels
def test_whole_sums_do_not_overflow_or_lose_what_is_not_finite():
    """For a weight in int8: the largest products, at once, and rows beside one that is not finite."""
    assert packing.has_kernels()
    product: Any = llama._rounded(llama.Linear(torch.ones(3, 1500), None)).packed
    x = torch.ones(4, 1500)
    torch.testing.assert_close(product(x), torch.full((4, 3), 1500.0), rtol=1e-4, atol=0)
    x[1, 700], x[2, 1499] = math.nan, -math.inf
    assert product(x).isnan().all(1).tolist() == [False, True, True, False]


@needs_kernels
def test_copies_share_memory_that_stays_while_one_of_them_does():
    """Three are in a block of 32 MiB, one is in another, and one is larger."""
    assert packing.has_kernels()
    weights = [torch.randn(outputs, 2048).bfloat16() for outputs in (2304, 2304, 2304, 2304, 9216)]
    kept = [Widened(weight, None).weight for weight in weights][::4]
    again = [Widened(weight, None).weight for weight in (*weights[::-1], *weights[::4])]
    assert all(map(torch.equal, kept, again[-2:]))


@needs_kernels
def test_a_group_in_four_bits_does_not_hide_what_is_not_finite():
    assert packing.has_kernels()
    layer = llama.Linear(torch.ones(3, 64).bfloat16(), None, scales=torch.ones(3, 2).bfloat16())
    x = torch.ones(9, 64)
    x[3, 7], x[5, 63] = math.nan, math.inf
    product: Any = llama._rounded(layer).packed
    assert product(x).isnan().all(1).nonzero().flatten().tolist() == [3, 5]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_logits_of_a_draft_are_exact_and_the_others_those_of_four_bits(dtype):
    """In every row of x, at once; a row that is not finite has no exact ones."""
    assert packing.has_kernels()
    torch.manual_seed(0)
    weight, x = (0.3 * torch.randn(5001, 96)).to(dtype), torch.randn(2, 3, 96)
    head = packing.Rescored(weight)
    numbers, scales = packing.int4_groups(weight, packing.best_scales(packing.in_groups(weight.float())))
    four = in_bytes(x) @ (packing.in_groups(numbers.float()) * scales.float().unsqueeze(2)).flatten(1).T
    exact, below, found = x @ weight.float().T, four.amax(-1, keepdim=True) - four, head(x)
    near, far = below < 8.99, below > 9.01
    assert near.sum(-1).min() > 20 and far.sum(-1).min() > 20 and found.shape == (2, 3, 5001)
    torch.testing.assert_close(found[near], exact[near], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[far], four[far], rtol=1e-3, atol=1e-3)
    assert float((four - exact)[near].abs().max()) > 0.1
    assert head(torch.full((1, 96), math.nan)).isnan().all()
    assert head(x[:0]).shape == (0, 3, 5001) and head.nbytes * 7 < weight.numel() * 4.5


@needs_kernels
@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, packing.Rescored),
        ({"vocab_size": 4095}, packing.Widened),
        ({"hidden_size": 40, "head_dim": 20}, packing.Widened),
    ],
)
def test_a_large_head_is_read_in_four_bits_by_a_draft_alone(settings, kind):
    """Of a model that is itself in 8 bits it is not, since its distribution is the target's."""
    model = build("Llama", WIDE | {"vocab_size": 4096, "hidden_size": 32} | settings, torch.bfloat16)
    heads = [LM(model, 1, int8=True).run.weights.head.packed]  # type: ignore[attr-defined]
    heads.append(LM(llama.in_int8_rows(model), 1).run.weights.head.packed)  # type: ignore[attr-defined]
    assert [type(head) for head in heads] == [kind, packing.Widened]


@needs_kernels
def test_a_rounded_draft_reads_prompts_with_its_rounded_weights():
    """As short passes do."""
    model, ids = build("Llama", WIDE, torch.bfloat16), torch.arange(40).unsqueeze(0) % 20 + 2
    once, often = (LM(model, 1, int8=True) for _ in range(2))
    once.store(ids, [0])
    for i in range(0, 40, 8):
        often.store(ids[:, i : i + 8], [i])
    near, exact = (lm.forward(ids[:, :1], [40]).logits for lm in (once, often))
    torch.testing.assert_close(near, exact, rtol=2e-3, atol=2e-3)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_a_model_in_bfloat16_round_what_they_multiply(dtype):
    """On a CPU with instructions for it, and not within checks; each row as it does beside any others."""
    torch.manual_seed(0)
    weight, added = torch.randn(70, 90).to(dtype), torch.randn(70)
    product: Any = pack(weight, added)
    rounds = packing.rounds(dtype)
    for rows in (*range(1, 20), 100):
        x = torch.randn(rows, 90)
        found = product(x)
        with pytest.raises(KeyError), packing.products_in_float32():
            exact = product(x)
            with ThreadPoolExecutor() as others:
                assert not others.submit(packing.ALONE.acquire, False).result()
            raise KeyError
        wanted = nn.functional.linear(x.bfloat16().float() if rounds else x, weight.float(), added)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(exact, nn.functional.linear(x, weight.float(), added), rtol=1e-5, atol=1e-4)
        assert torch.equal(product(x), found) and torch.equal(found, exact) != rounds
        assert not rounds or all(map(torch.equal, found.split(1), map(product, x.split(1))))
        torch.testing.assert_close(pack(weight.float(), added)(x), exact, rtol=0, atol=0)


@needs_kernels
def test_a_weight_of_odd_inputs_has_no_copy_in_pairs():
    weight = torch.tensor([[1.0, 2.0**-7, 3.0]])
    product: Any = pack(weight, None)
    assert product.weight.dtype == torch.float16 and pack(2.0**60 * weight, None) is None
    assert product(weight).item() == 10 + 2.0**-14


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_with_odd_widths_has_copies_of_the_others(dtype):
    model = halved(build("Llama", BIASED | {"intermediate_size": 33}))
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data *= 2.0**30
        layer.mlp.up_proj.bias.data *= 2.0**30
        layer.mlp.down_proj.weight.data *= 2.0**-30  # which float16 lacks
    lm, own = LM(pretrained.cast(copy.deepcopy(model), dtype), 3), LM(model, 3, stock=True)
    assert lm.run.change and lm.run.flat is None  # type: ignore[attr-defined]
    with packing.products_in_float32():
        torch.testing.assert_close(passes(lm), passes(own), rtol=1e-3, atol=1e-3)


@needs_kernels
def test_which_weights_16_bits_represent():
    rows = torch.ones(5000, 4)
    for last, dtype in (
        (2.0**-120, torch.bfloat16),
        (1 + 2.0**-7, torch.bfloat16),
        (1 + 2.0**-8, torch.float16),
        (1 + 2.0**-11, None),
        (2.0**-120 * (1 + 2.0**-8), None),
        (torch.nan, None),
    ):
        rows[4999, 0] = last
        product = pack(rows, None)
        assert (product is not None) is (dtype is not None)
        assert not isinstance(product, Widened) or product.weight.dtype == EXACT.get(dtype, dtype)


@needs_kernels
def test_which_models_are_packed(monkeypatch):
    model = halved(build("Llama", WIDE))
    count = sum(p.numel() for p in model.parameters())
    assert can_pack(model) and not can_pack(copy.deepcopy(model).double())
    assert can_pack(copy.deepcopy(model).bfloat16()) and not can_pack(copy.deepcopy(model).to("meta"))
    for memory, fits in ((16 * count, True), (16 * count - 1, False)):  # eight times the copies, not the model
        with monkeypatch.context() as patch:
            patch.setattr(packing, "memory", lambda memory=memory: memory)
            assert can_pack(model) is fits


def test_memory_is_that_of_the_container(monkeypatch):
    whole = packing.memory()
    for text, wanted in (("4096\n", 4096), ("max\n", None), (f"{2**60}", None)):
        monkeypatch.setattr(packing.Path, "read_text", lambda *_, text=text, **__: text)
        assert packing.memory() == (wanted or whole)


@needs_kernels
@pytest.mark.parametrize(
    ("family", "settings"), [("Llama", BIASED), ("Qwen2", BIASED), ("Qwen3", WIDE | {"tie_word_embeddings": True})]
)
def test_the_forward_is_that_of_the_model(family, settings):
    """One projection that float16 does not represent is left as it is."""
    model = halved(build(family, settings))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight += 1e-5
    lm = LM(model, 3)
    weights = lm.run.weights  # type: ignore[attr-defined]
    assert all(linear.packed is not None for linear in (weights.head, weights.layers[0].qkv, weights.layers[1].gate_up))
    assert weights.layers[1].down.packed is None
    torch.testing.assert_close(passes(lm), passes(LM(model, 3, stock=True)), rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("family", "settings"), [("Qwen2", BIASED), ("Qwen3", WIDE | {"tie_word_embeddings": True})])
def test_a_model_in_half_precision_is_served_as_the_same_model_in_float32(family, settings, dtype):
    """But for the rounding of what is multiplied, passes of any number of ids differ by nothing but the order of sums,
    and so do their states. A prompt of many ids is read by the CPU's own products in half precision where they are
    faster."""
    model = build(family, settings, dtype)
    lm, wide = LM(model, 3), LM(build(family, settings, dtype).float(), 3, stock=True)
    run: Any = lm.run
    run.long = False  # as with AMX
    assert lm.dtype == torch.float32 and lm.weights == str(dtype).removeprefix("torch.")
    ids, layers, both = torch.arange(60).view(3, 20) % 31, (0, 1, LAST), (lm, wide)
    with torch.inference_mode(), packing.products_in_float32():
        mine, theirs = (one.forward(ids, [0, 0, 0], states=layers) for one in both)
        torch.testing.assert_close(mine.logits, theirs.logits, rtol=1e-4, atol=1e-4)
        for name, state in theirs.states.items():
            torch.testing.assert_close(mine.states[name], state, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lm.head(state.to(dtype)), wide.head(state.to(dtype)), rtol=1e-4, atol=1e-4)
        stored = [one.store(ids, [0, 0, 0], states=layers) for one in both]
        after, expected = (one.forward(ids[:, :2], [20, 20, 20]).logits for one in both)
    apart = (stored[0][1] - stored[1][1]).abs().max() / stored[1][1].abs().max()
    assert stored[0][1].dtype == torch.float32 and float(apart) < 8 * torch.finfo(dtype).eps
    assert (float(apart) > 1e-5) is not pretrained.emulated(dtype)
    torch.testing.assert_close(after, expected, rtol=0.1, atol=0.5)
    assert {p.dtype for p in model.parameters()} == {dtype}


@needs_kernels
def test_passes_of_any_length_give_the_same_bits():
    """Of a model in bfloat16, on a CPU with instructions for it, alone and beside other rows, by one thread or two;
    states too. The texts are long enough for parts of attention, the widest pass for several batches of them."""
    if not packing.rounds(torch.bfloat16):
        pytest.skip("no instructions for bfloat16")
    model, long = build("Qwen2", BIASED | {"num_hidden_layers": 3}, torch.bfloat16), 240
    ids = torch.arange(3 * long).view(3, long) % 31
    runs = []
    for rows in (ids[1:2], ids):
        for width in (1, 2, 3, 5, 16, long):
            lm, parts = LM(model, len(rows)), []
            for at in range(0, long, width):
                with threads(1 + at // 16 % 2):
                    part = lm.forward(rows[:, at : at + width], [at] * len(rows), states=(1, LAST))
                parts.append(torch.cat([part.logits, part.states[1], part.states[LAST]], -1))
            runs.append(torch.cat(parts, 1)[len(rows) // 2])
    assert all(torch.equal(run, runs[0]) for run in runs)
    lm = LM(model, 1)
    with packing.products_in_float32():
        assert not torch.equal(lm.forward(ids[1:2, :1], [0]).logits[0, 0], runs[0][0, : lm.size])
    assert torch.equal(lm.forward(ids[1:2, :1], [0]).logits[0, 0], runs[0][0, : lm.size])


@needs_kernels
def test_long_chains_for_a_model_in_half_precision_are_plain_texts():
    target = tiny(hidden=32, layers=4, dtype=torch.bfloat16)
    call = REGIME | {"max_new_tokens": 40, "sampling": Sampling(0.0)}
    plain = Engine(target, rows=2).generate(PROMPTS, **call).tokens
    for k in (15, 16, 24):
        draft = Independent(near(tiny(hidden=32, layers=4, dtype=torch.bfloat16), 0.02))
        assert Engine(target, draft, policy=Fixed(k), rows=2).generate(PROMPTS, **call).tokens == plain


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


ODD: dict[str, Any] = {"head_dim": 6, "hidden_size": 20, "intermediate_size": 37, "vocab_size": 45}
SHARP = ODD | {"num_hidden_layers": 4}
LONG = {"hidden_size": 192, "head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1}
LONG |= {"max_position_embeddings": 256}


@needs_kernels
@pytest.mark.parametrize(("family", "settings"), [*FAMILIES, ("Qwen3", ODD), ("Llama", SHARP)])
def test_one_operator_runs_all_layers(family, settings):
    """The logits and the states of every layer are those of transformers, in rows of other lengths; a prompt of many
    ids goes another way to the same keys and values. Large scores overflow nothing."""
    model = halved(build(family, settings))
    if settings is ODD:
        model.model.layers[0].mlp.gate_proj.weight.data.mul_(2**10)  # gates far below and above 0
    if settings is SHARP:
        model.model.layers[1].self_attn.q_proj.weight.data.mul_(2**4)  # scores up to 200
    lm, stock = LM(model, 6), LM(model, 6, stock=True)
    assert lm.run.flat is not None  # type: ignore[attr-defined]
    layers = (*range(model.config.num_hidden_layers + 1), LAST)
    ids = torch.arange(6 * 24).view(6, 24) % 31
    with torch.inference_mode(), threads(2):
        for one in (lm, stock):
            one.store(ids[1:], [0] * 5, low=1)
            one.store(ids[:1, :7], [0])
        for start, low, n in (
            ([7], 0, 3),
            ([24, 3], 1, 2),
            ([24, 24], 1, 1),
            ([0, 0, 0], 0, 16),
            ([2, 7, 5], 0, 1),
            ([9, 4, 11], 0, 9),
            ([1, 3, 8, 2, 6, 5], 0, 16),
            ([9, 4, 11, 24, 1, 18], 0, 1),
        ):
            some = ids[low : low + len(start), :n].flip(1)
            mine, theirs = (one.forward(some, start, low=low, states=layers) for one in (lm, stock))
            for name, state in theirs.states.items():
                size = float(state.abs().max())
                torch.testing.assert_close(mine.states[name], state, rtol=1e-4, atol=2e-5 * size, msg=f"{name} {start}")
            size = float(theirs.logits.abs().max())
            torch.testing.assert_close(mine.logits, theirs.logits, rtol=1e-4, atol=2e-5 * size)


@needs_kernels
def test_one_operator_reads_long_texts():
    """Of more slots than one part of attention, with heads as wide as those of real models; three query heads a key."""
    model = halved(build("Llama", LONG))
    lm, stock = LM(model, 3), LM(model, 3, stock=True)
    ids = torch.arange(3 * 200).view(3, 200) % 31
    with torch.inference_mode(), threads(2):
        for one in (lm, stock):
            one.store(ids, [0] * 3)
        for start, n in (([130, 61, 64], 1), ([63, 127, 199], 5), ([190, 3, 128], 9)):
            mine, theirs = (one.forward(ids[:, :n], start).logits for one in (lm, stock))
            size = float(theirs.abs().max())
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5 * size, msg=str(start))


@needs_kernels
def test_one_operator_runs_trees_and_keeps_their_path():
    model = halved(build("Llama", WIDE))
    with torch.inference_mode():
        check(LM(model, 3), LM(model, 3, stock=True), [PARENTS] * 3, Tree(PARENTS), 1e-4)


@needs_kernels
def test_bytes_that_a_pass_reads_are_those_of_the_copy():
    model = halved(build("Llama", BIASED))
    count = sum(p.numel() for p in model.parameters()) - 32 * 64  # the embedding is not the head
    projections = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert weight_bytes(LM(model, 1)) == (4 * count - 2 * projections, count)


@needs_kernels
def test_copies_are_of_the_present_weights_and_dropped_with_them():
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
    assert not lm.run.change and copies() == before + 9  # type: ignore[attr-defined]
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    passes(lm)
    assert copies() == before + 9  # its stamp does not read all bytes, so it may not begin to copy
    del lm, model, third
    assert copies() == before


@pytest.mark.thorough
@needs_kernels
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", FEATURES)
def test_drafts_over_states_in_float32_have_copies(kind, int8, monkeypatch):
    """The same text and rounds as without copies, of the rounded weights. Weights that change are copied again."""
    make, proposes = FEATURES[kind]
    target = halved(tiny(hidden=32, heads=2, layers=4))
    network = halved(make(target, 0.3))
    proposer, plain = proposes(network, int8=int8), proposes(halved(make(target, 0.3)))
    plain._copied = lambda packs: plain.network
    for module in plain.network.modules():
        if int8 and isinstance(module, nn.Linear):
            module.weight.data = llama.rounded(module.weight)

    engines = {one: Engine(target, one, policy=Fixed(3), rows=2) for one in (proposer, plain)}

    def text(one: Any) -> Any:
        return engines[one].generate(PROMPTS, sampling=Sampling(1.0), **REGIME)

    with_copies, without = text(proposer), text(plain)
    module = proposer.module
    text(proposer)
    assert proposer.module is module  # what is packed once serves all calls
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
    torch.testing.assert_close(proposer.served.fc(x), plain.network.fc(x).detach(), rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize(
    ("size", "sampling", "settings", "applies"),
    [
        (16, Sampling(0.0), {}, True),
        (16, Sampling(0.7), {}, True),
        (16, Sampling(0.7), {"greedy": True}, True),
        (None, [Sampling(0.7), Sampling(1.3)], {"int8": True}, True),
        (16, Sampling(0.7), {"target": torch.bfloat16}, True),
        (16, [Sampling(0.7, top_p=0.6), Sampling(1.3)], {}, True),
        (16, Sampling(0.7, top_k=3), {}, False),
        (16, Sampling(0.7, top_p=0.6, min_p=0.1), {}, False),
        (16, [Sampling(0.7), Sampling(0.0)], {}, False),
        (16, Sampling(0.7), {"policy": Script()}, False),
        (16, Sampling(0.7), {"tokenizer": Short()}, False),
        (0, Sampling(0.0), {}, True),
        (0, [Sampling(0.7, top_p=0.6), Sampling(1.3)], {}, True),
        (0, [Sampling(0.7), Sampling(1.3)], {"greedy": True, "target": torch.bfloat16}, True),
        (0, [Sampling(0.7, top_p=0.6), Sampling(1.3)], {"even": True}, True),
        (0, [Sampling(0.7, top_p=0.6), Sampling(1.3)], {"int8": True, "vocab": 5000}, True),
        (0, Sampling(0.7, top_k=3), {}, False),
        (0, Sampling(0.7), {"policy": Script()}, False),
    ],
)
def test_one_operator_drafts_a_chain(size, sampling, settings, applies, monkeypatch):
    """The drafts and distributions are those of one pass after the other, also after rounds of other lengths; of an
    EAGLE draft with a head of that size, or of an independent draft for size 0."""
    whole, seen = {"policy": Uneven()} | settings, []
    vocab = whole.pop("vocab", 32)  # if large, the head of a draft in 8 bits is read in 4
    target = halved(tiny(vocab, hidden=32, heads=2, layers=4))
    small = near(tiny(vocab, hidden=32), 0.2)
    network = halved(kinds.eagle(target, 0.3, draft_vocab_size=size) if size != 0 else small)
    target.to(whole.pop("target", torch.float32))
    if whole.pop("even", False):
        network.lm_head.weight.data.zero_()  # equal logits, of which only a sort knows the tail
    drafting = {name: whole.pop(name) for name in ("greedy", "int8") if name in whole}
    for fast in (True, False):
        if not fast:
            monkeypatch.setattr(EagleDrafting, "chains", False)
            monkeypatch.setattr(LM, "chain", lambda *given: None)
        proposer: Any = (Eagle if size != 0 else Independent)(network, **drafting)
        propose, rounds = proposer.propose, []
        proposer.propose = lambda round, propose=propose, rounds=rounds: rounds.append(propose(round)) or rounds[-1]
        with torch.profiler.profile() as profile:
            Engine(target, proposer, rows=2, **whole).generate(PROMPTS, sampling=sampling, **REGIME)
        assert ("inference::chain" in {event.key for event in profile.key_averages()}) is (fast and applies)
        seen.append(rounds)
    assert len(seen[0]) == len(seen[1]) > 3
    for one, other in zip(*seen, strict=True):
        assert one.k == other.k
        for row, k in enumerate(one.k):
            assert torch.equal(one.x[row, :k], other.x[row, :k])
            torch.testing.assert_close(one.q[row, :k], other.q[row, :k], rtol=1e-5, atol=1e-6)


@needs_kernels
def test_rows_of_a_chain_are_drawn_as_alone():
    """With other temperatures and tails, also where only a sort knows the tail of equal logits. Rows without a
    distribution have none."""
    model, ids = halved(tiny(hidden=32)), torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    model.lm_head.weight.data.copy_(model.lm_head.weight[::8].repeat_interleave(8, 0) / 16)
    u, settings = torch.rand(4, 5, dtype=torch.float64), torch.tensor([[0.5, 1, 2, 1.5], [0, 0.4, 0.7, 0.6]]).double()

    def chain(rows: list[int], heat: torch.Tensor, tails: torch.Tensor) -> Any:
        zeros = torch.zeros(len(rows), dtype=torch.int64)
        draws = ChainDraws(u[rows], heat[rows], tails[rows])
        return LM(model, 4).chain(ids[rows], zeros, zeros + 1, draws, 3, 5)

    x, q = chain([0, 1, 2, 3], *settings)
    for a in range(4):
        torch.testing.assert_close(chain([a], *settings), (x[a : a + 1], q[a : a + 1]), rtol=1e-4, atol=1e-6)
        logits, (heat, tail) = LM(model, 1).forward(ids[a : a + 1], [0]).logits[0, -1], settings[:, a].tolist()
        expected = distributions.keep_top_p(logits / heat, 1 - tail).softmax(-1)
        torch.testing.assert_close(q[a, 0], expected, rtol=1e-5, atol=1e-6)
        assert distributions.draw(q[a], u[a, :3]).tolist() == x[a].tolist()
    model.model.norm.weight.data[3] = math.nan
    for given in (settings, torch.empty(2, 4, 0)):  # also the likeliest tokens
        assert chain([0, 1, 2, 3], *given)[1].isnan().all()


@needs_kernels
def test_scaled_states_are_not_drafted_by_one_operator():
    ids, round = torch.tensor([[1, 2]]), ChainDraws(torch.rand(1, 2), torch.ones(1), torch.empty(0))
    for scaled in (True, False):
        lm = LM(halved(tiny(hidden=32)), 1, scaled=scaled)
        drafts = lm.chain(ids, torch.tensor([0]), torch.tensor([1]), round, 2, 4)
        assert (drafts is None) is scaled
        assert lm.chain(ids, torch.tensor([0]), torch.tensor([1]), round, 2, lm.context + 1) is None


@needs_kernels
@pytest.mark.parametrize("scale", [0, 0.2, 1, 3, 30])
@pytest.mark.parametrize("size", [16, 1030, 49_157])
def test_the_operator_cuts_the_tail_that_a_sort_cuts(size, scale):
    """Of broad and narrow distributions, also with equal logits, tokens without mass, and rows without a distribution
    or without a tail."""
    assert packing.has_kernels()
    logits = scale * torch.randn(9, size, generator=torch.Generator().manual_seed(size))
    logits[1:3] = logits[1:3].round()
    logits[3, size // 2 :] = -math.inf
    logits[4] = -math.inf
    logits[5, 3] = math.nan
    tails = torch.tensor([0.5, 0.1, 0.7, 0.05, 0.1, 0.1, 0, 1e-3, 1], dtype=torch.float64)
    cut = torch.ops.inference.without_tail(logits, tails)
    for row, tail, one in zip(logits, tails, cut, strict=True):
        expected = distributions._without_tail(row, tail.float()) if tail else row
        torch.testing.assert_close(one, expected, rtol=0, atol=0, equal_nan=True)


@needs_kernels
def test_a_packed_layer_has_its_bias():
    network = nn.Sequential(halved(nn.Linear(16, 16)), nn.Linear(16, 4, bias=False))
    served = llama.packed_copy(network)
    assert isinstance(served[0], llama.PackedLinear) and isinstance(served[1], nn.Linear)
    x = torch.randn(2, 16)
    for one in (served, copy.deepcopy(served)):
        torch.testing.assert_close(one(x), network(x), rtol=1e-5, atol=1e-5)
