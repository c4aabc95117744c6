"""Weights changed behind what was made from them: a new engine gives the text of the weights as they are."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from inference.models import llama, llama_weights
from inference.models.checksum import fingerprint
from inference.models.lm import LM
from inference.models.step import Step
from tests.test_lean import WIDE, build, passes
from tests.tiny import tiny


@pytest.fixture(autouse=True)
def packs(monkeypatch):
    """As a CPU that packs bfloat16 weights does, whatever this one can."""
    monkeypatch.setattr(llama_weights, "can_pack", lambda model: True)
    monkeypatch.setattr(llama_weights, "_packed", lambda linear: linear._replace(packed=linear.weight.clone()))
    monkeypatch.setattr(llama.Linear, "__call__", _call)


_plain = llama.Linear.__call__


def _call(self, x):
    if self.packed is None:
        return _plain(self, x)
    return torch.nn.functional.linear(x, self.packed, self.bias)


def small():
    return build("Qwen2", WIDE | {"initializer_range": 0.1}, torch.bfloat16)


def copied(model):
    model.model.layers[1].mlp.down_proj.weight.data.copy_(torch.randn(64, 48))
    return model


def merged(model):
    settings = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, settings).merge_and_unload()


@pytest.mark.parametrize("change", [copied, merged])
@pytest.mark.parametrize("int8", [False, True])
def test_a_new_engine_has_the_new_weights(change, int8):
    model = small()
    passes(LM(model, 3, int8=int8))
    versions = [p._version for p in model.parameters()]
    model = change(model)
    assert [p._version for p in model.parameters()] == versions  # nothing was counted
    again = small()
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(passes(LM(model, 3, int8=int8)), passes(LM(again, 3, int8=int8)), rtol=0, atol=0)


def test_what_was_compiled_of_other_values_is_not_used():
    model = tiny()
    step = LM(model, 1, compile=True).run.compiled("pass", Step)
    assert LM(model, 1, compile=True).run.compiled("pass", Step) is step
    model.lm_head.weight.data.mul_(2)
    assert LM(model, 1, compile=True).run.compiled("pass", Step) is not step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_change_of_one_element_is_seen(dtype):
    layer = torch.nn.Linear(97, 53, dtype=dtype)
    seen = {fingerprint(layer)}
    for place in (0, 1, 700, 53 * 97 - 1):
        layer.weight.data.view(-1)[place] += 0.25
        seen.add(fingerprint(layer))
    layer.weight.data.copy_(layer.weight.data.flip(0))
    seen.add(fingerprint(layer))
    layer.weight.data.copy_(layer.weight.data.flip(1))
    seen.add(fingerprint(layer))
    layer.bias.data[52] += 0.25
    assert len(seen | {fingerprint(layer)}) == 8


def test_values_that_change_places_are_seen():
    """Rows of a matrix, whose columns then add up as before, and columns, whose rows do."""
    layer = torch.nn.Linear(128, 128, bias=False, dtype=torch.float64)
    order, seen = [1, 0, *range(2, 128)], {fingerprint(layer)}
    layer.weight.data.copy_(layer.weight.data[order])
    seen.add(fingerprint(layer))
    layer.weight.data.copy_(layer.weight.data[:, order])
    assert len(seen | {fingerprint(layer)}) == 3
