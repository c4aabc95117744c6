"""Half precision that a CPU would emulate is float32 there; the numbers are the checkpoint's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.bench import measurement
from cotrain.teacher.target_model import load_target
from cotrain.training import optim
from inference import Sampling, load
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import Metadata, load_draft, save
from inference.models import packing, pretrained
from inference.models.pretrained import load_model
from inference.proposers.independent import Independent
from tests.folders import network, target_folder, tokenizer


def pretend(monkeypatch: pytest.MonkeyPatch, kernels: bool, avx512: bool, bf16: bool) -> None:
    """A CPU for which oneDNN has kernels in half precision or not, with AVX-512 and its instructions for bfloat16."""
    for name in pretrained.SUPPORTED.values():
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: kernels, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)


@pytest.fixture(params=[True, False], ids=["emulated", "native"])
def emulates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A CPU without such instructions, and one with them."""
    pretend(monkeypatch, kernels=not request.param, avx512=not request.param, bf16=not request.param)
    monkeypatch.setattr(packing, "has_kernels", lambda: False)  # as without a compiler
    return bool(request.param)


def test_which_dtypes_are_emulated(emulates, monkeypatch):
    assert pretrained.emulated(torch.bfloat16) is emulates and pretrained.emulated(torch.float16) is emulates
    assert not pretrained.emulated(torch.float32) and not pretrained.emulated(torch.float64)
    assert pretrained.half("cpu") == (torch.float32 if emulates else torch.bfloat16)
    assert pretrained.half("cuda") == torch.bfloat16
    assert optim.precision("auto", "cpu") == ("32-true" if emulates else "bf16-mixed")
    assert optim.precision("auto", "cuda") == "bf16-mixed" and optim.precision("16-mixed", "cpu") == "16-mixed"
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert pretrained.emulated(torch.bfloat16)


@pytest.mark.parametrize("avx512, bf16, wanted", [(True, False, True), (True, True, False), (False, False, False)])
def test_kernels_that_convert_are_no_instructions(avx512, bf16, wanted, monkeypatch):
    """Of x86 before and after bfloat16, and of a CPU of another kind."""
    pretend(monkeypatch, True, avx512, bf16)
    assert pretrained.emulated(torch.bfloat16) is wanted and not pretrained.emulated(torch.float16)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A checkpoint in bfloat16."""
    network().bfloat16().save_pretrained(target_folder(tmp_path / "target"))
    return tmp_path / "target"


def test_a_target_is_loaded_in_what_the_machine_computes(emulates, target, capsys):
    wanted = torch.float32 if emulates else torch.bfloat16
    model, truth = load_target(str(target)), network().bfloat16()
    assert ("slow in bfloat16, so the target runs in float32" in capsys.readouterr().err) is emulates
    assert model.dtype == load_model(str(target)).dtype == wanted
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(model.parameters(), truth.parameters(), strict=True))
    assert load_target(str(target), dtype="bfloat16").dtype == torch.bfloat16
    assert load_model(str(target), torch.bfloat16).dtype == torch.bfloat16
    if emulates:  # what is quantised is left alone
        assert load_target(str(target), "nf4").dtype == torch.bfloat16


def test_a_draft_is_served_in_float32_where_bfloat16_is_emulated(emulates, target):
    """8 bits need a compiler."""
    config = network().config
    made_for = {"name": str(target), **hash_target(config, tokenizer())}
    metadata = Metadata(target=made_for, k=2, regime={"temperature": 1.0}, origin={}, int8=True)
    folder = save(network(1).bfloat16(), tokenizer(), target.parent / "draft", metadata, {})
    engine = load(folder)
    proposer: Any = engine.proposer
    assert proposer.model.dtype == (torch.float32 if emulates else torch.bfloat16)
    assert proposer.int8 is False
    assert len(engine.generate(["{"], max_new_tokens=4, sampling=Sampling(0.0)).tokens[0]) <= 4
    assert Independent(str(folder)).model.dtype == (torch.float32 if emulates else torch.bfloat16)
    assert load_draft(folder)[0].dtype == torch.bfloat16


def test_a_draft_is_served_in_float32_where_kernels_read_it():
    """Its numbers stay; a copy, if asked for one."""
    for dtype in (torch.bfloat16, torch.float16):
        model = network(1).to(dtype)
        wide = packing.widened_draft(model, copied=True)
        assert (model.dtype, wide.dtype) == (dtype, torch.float32 if packing.has_kernels() else dtype)
        pairs = zip(model.parameters(), wide.parameters(), strict=True)
        assert all(torch.equal(one.float(), other.float()) for one, other in pairs)
        assert packing.widened_draft(model) is model and model.dtype == wide.dtype
    assert packing.widened_draft(network().double()).dtype == torch.float64


def test_what_is_measured_is_what_is_loaded(target):
    """To the last bit: rotary frequencies too, which no file holds."""
    draft, size = network(1), type("Size", (), {"draft_dtype": "bfloat16"})
    plan = measurement.Plan(load_target(str(target)), tokenizer(), draft, Sampling(), "token", size(), ("t", "d"))  # type: ignore
    metadata = Metadata(target={"name": "t", **hash_target(draft.config, tokenizer())}, k=2, regime={}, origin={})
    loaded = load_draft(save(plan.served, tokenizer(), target.parent / "saved", metadata, {}))[0]
    ids = torch.arange(100)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, plan.served(ids).logits)
    assert draft.dtype == torch.float32
