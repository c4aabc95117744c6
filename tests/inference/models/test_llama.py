"""The few-operation forward against transformers' own."""

import copy
import shutil
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from inference.models import llama, packing
from inference.models.forward import Lean, Stock
from inference.models.llama import applies
from inference.models.lm import LM
from inference.models.pretrained import quantisation_of
from tests.tiny import tiny

SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WIDE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 48}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
}
FAMILIES = [
    ("Llama", {}),
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Llama", {"tie_word_embeddings": True}),
    ("Llama", {"rope_parameters": YARN}),
    ("Llama", {"rope_parameters": LLAMA3}),
    ("Mistral", {"sliding_window": None}),
    ("Qwen2", {}),
    ("Qwen3", {}),
    ("Llama", {"num_key_value_heads": 4}),
]


def build(family: str, settings: dict[str, Any], dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**(SHAPE | settings)))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norm weights start as constants
            parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def passes(lm: LM) -> torch.Tensor:
    """Logits of a prompt pass, a ragged pass, a pass of one id and an even pass over slots above 0."""
    ids = torch.arange(3 * 9).view(3, 9) % 32
    with torch.inference_mode():
        outputs = [lm.forward(ids, [0, 0, 0]), lm.forward(ids[:, :4], [9, 5, 7]), lm.forward(ids[:, :1], [10, 9, 11])]
        outputs.append(lm.forward(ids[1:, :2], [8, 8], low=1))
    return torch.cat([output.logits.reshape(-1, 32) for output in outputs])


@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=[f"{n}-{'-'.join(s) or 'plain'}" for n, s in FAMILIES])
def test_it_is_the_models_own_forward(family, settings):
    model = build(family, settings)
    assert applies(model)
    stock = passes(LM(model, 3, stock=True))
    torch.testing.assert_close(passes(LM(model, 3)), stock, rtol=1e-9, atol=1e-9)


def test_projections_share_the_models_memory_and_a_second_view_joins_nothing():
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    passes(LM(model, 3))
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight.untyped_storage().data_ptr() == attention.q_proj.weight.untyped_storage().data_ptr()
    place = attention.q_proj.weight.data_ptr()
    passes(LM(model, 3))
    assert attention.q_proj.weight.data_ptr() == place
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_trained_saved_and_replaced_weights_are_seen(tmp_path):
    model = tiny()
    lm = LM(model, 3)
    first = passes(lm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    trained = passes(lm)
    assert (trained - first).abs().max() > 1e-3
    torch.testing.assert_close(trained, passes(LM(model, 3, stock=True)), rtol=1e-9, atol=1e-9)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    for parameter in model.parameters():
        parameter.data = 0.5 * parameter.data  # new memory, as after a move
    torch.testing.assert_close(passes(lm), passes(LM(model, 3, stock=True)), rtol=1e-9, atol=1e-9)


class Other(nn.Linear):
    """As a quantised or adapted projection."""


def test_what_it_does_not_know_runs_through_transformers():
    other = tiny()
    other.model.layers[0].mlp.up_proj.__class__ = Other
    dynamic = build("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}})
    hooked = tiny()
    hooked.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: None)
    relu = build("Llama", {"hidden_act": "relu"})
    for model in (other, dynamic, hooked, relu):
        assert not applies(model)
        assert isinstance(LM(model, 3).run, Stock)


def test_hooks_that_only_record_change_no_forward() -> None:
    """transformers leaves them on a model that was asked for its hidden states."""
    model = tiny()
    with torch.no_grad():
        model(torch.ones(1, 2, dtype=torch.int64), output_hidden_states=True)
    assert any(m._forward_hooks for m in model.modules())
    assert isinstance(LM(model, 3).run, Lean)
    for add in (nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook):  # beside one that may change it
        handle = add(model.model.layers[0], lambda *_: None)
        assert not applies(model)
        handle.remove()


@pytest.mark.skipif(shutil.which(packing.compiler()) is None, reason="no C++ compiler")
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_int8_rows_runs_on_int8_weights_with_its_own_distribution(tied):
    settings = WIDE | {"initializer_range": 0.1, "tie_word_embeddings": tied}
    model, exact = (build("Qwen2", settings, torch.bfloat16) for _ in range(2))
    assert llama.in_int8_rows(model) is model and quantisation_of(model.config) == llama.INT8_ROWS
    assert torch.equal(model.get_input_embeddings().weight, exact.get_input_embeddings().weight)
    for ours, theirs in zip(projections(model), projections(exact), strict=True):
        assert all(map(torch.equal, llama.int8_rows(ours), llama.int8_rows(theirs)))  # rounded again, nothing changes
    lm, stock = LM(model, 3), LM(model, 3, stock=True)
    assert lm.weights == "int8" and stock.weights == "int8_rows, bfloat16"
    exactly = passes(LM(copy.deepcopy(model).double(), 3, stock=True)).softmax(-1)
    kernel, transformers_own = (
        (passes(one).double().softmax(-1) - exactly).abs().sum(-1).mean() for one in (lm, stock)
    )
    assert kernel < 1.5 * transformers_own  # as near as bfloat16 comes to the rounded weights


def projections(model):
    return [module.weight.detach() for module in model.modules() if isinstance(module, nn.Linear)]


def test_eight_bits_are_for_models_of_known_families():
    for model in (build("Llama", WIDE).double(), build("Llama", WIDE | {"hidden_act": "relu"}, torch.bfloat16)):
        with pytest.raises(ValueError, match="int8 weights need a model of the Llama"):
            LM(model, 3, int8=True)
