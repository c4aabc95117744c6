"""Where an independent draft begins: random weights, layers of the target, any pretrained model."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
)

from cotrain.students import independent
from cotrain.students.base import Seen
from cotrain.teacher.target_model import load_target, split
from inference import Engine
from inference.policy import Fixed
from tests.cotrain.teacher.test_target_model import logits
from tests.folders import VOCABULARY, network, target_folder, tokenizer
from tests.watched import Watched


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return network(layers=3)


def test_all_layers_are_the_target(target: LlamaForCausalLM) -> None:
    assert torch.equal(logits(independent.from_layers(target, [0, 1, 2])), logits(target))


def test_the_chosen_layers_are_copied_in_their_order(target: LlamaForCausalLM) -> None:
    cut = independent.from_layers(target, [-1, 1])
    assert cut.config.num_hidden_layers == 2
    for ours, theirs in zip(cut.model.layers, (target.model.layers[2], target.model.layers[1]), strict=True):
        assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
    assert cut.lm_head.weight is cut.model.embed_tokens.weight
    assert all(p.requires_grad and p.dtype == torch.float32 for p in cut.parameters())


def test_a_draft_shares_no_memory_with_its_target(target: LlamaForCausalLM) -> None:
    before = logits(target)
    with torch.no_grad():
        for parameter in independent.from_layers(target, [0]).parameters():
            parameter.zero_()
    assert torch.equal(logits(target), before)


@pytest.mark.parametrize("layers", [[], [3], [0, -4]])
def test_missing_layers_raise(target: LlamaForCausalLM, layers: list[int]) -> None:
    with pytest.raises(ValueError, match="init.layers=.* the target has 3 layers"):
        independent.from_layers(target, layers)


def test_a_gpt2_is_cut_too_and_read_in_halves() -> None:
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, initializer_range=0.5)
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config).eval()
    cut = independent.from_layers(whole, [1])
    assert torch.equal(cut.transformer.h[0].mlp.c_fc.weight, whole.transformer.h[1].mlp.c_fc.weight)
    cut.train()  # dropout 0.1
    split(cut)
    assert cut.training


def test_scratch_has_the_shapes_asked_for_and_the_targets_ids(target: LlamaForCausalLM) -> None:
    target.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    draft = independent.scratch(target, width=128, layers=2, intermediate=96, head_dim=32, kv_heads=2)
    assert draft.model.layers[1].self_attn.q_proj.weight.shape == (128, 128)
    assert draft.model.layers[1].self_attn.k_proj.weight.shape == (64, 128)
    assert draft.model.layers[1].mlp.up_proj.weight.shape == (96, 128)
    assert logits(draft).shape == (1, 6, VOCABULARY)
    assert (draft.config.eos_token_id, draft.config.max_position_embeddings) == (0, 128)
    assert draft.config.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(("change", "key"), [({"head_dim": 48}, "draft.width"), ({"kv_heads": 3}, "draft.kv_heads")])
def test_shapes_that_do_not_fit_are_named(target: LlamaForCausalLM, change: dict[str, int], key: str) -> None:
    shape = {"width": 128, "layers": 1, "intermediate": 64, "head_dim": 64, "kv_heads": 1} | change
    with pytest.raises(ValueError, match=key):
        independent.scratch(target, **shape)


@pytest.mark.parametrize("rows", [304, 320, 340])
def test_a_sibling_that_is_padded_to_another_number_of_rows_is_learnt_as_it_is_served(
    tmp_path: Path, rows: int
) -> None:
    """A tokenizer of 300 ids, and a target of 320 rows."""
    shape = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(vocab_size=320, **shape)).eval()
    LlamaForCausalLM(LlamaConfig(vocab_size=rows, **shape)).save_pretrained(tmp_path)
    student = independent.IndependentStudent(independent.causal_lm(str(tmp_path), target), target, VOCABULARY)
    assert student.network.config.vocab_size == min(rows, 320)
    ids = torch.randint(VOCABULARY, (2, 9))
    (guess,) = student.guesses({"ids": ids}, Seen({}))
    learnt = guess.head(guess.states).log_softmax(-1).exp().detach()
    watched = Watched(student.proposer())
    Engine(target, watched, tokenizer=tokenizer(), policy=Fixed(1)).generate(ids.tolist(), max_new_tokens=2)
    assert learnt.shape == (18, VOCABULARY)
    torch.testing.assert_close(watched.rounds[0].q[:, 0].float(), learnt[8::9], atol=1e-5, rtol=1e-4)


def test_a_draft_without_a_row_for_each_id_is_refused(target: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="here: the draft has logits for 300 ids, but the tokenizer has 301 ids"):
        independent.refuse_fewer(target, 301, "here")
    independent.refuse_fewer(target, 300, "here")


@pytest.mark.parametrize("quantisation", ["int8", "nf4"])
def test_layers_of_a_quantised_target_are_plain_numbers(tmp_path: Path, quantisation: str) -> None:
    folder = target_folder(tmp_path / "target")
    whole, quantised = load_target(str(folder), "none"), load_target(str(folder), quantisation)
    logits(quantised)  # passes move and pack the weights of bitsandbytes
    cut = independent.from_layers(quantised, [1])
    ours, theirs = cut.model.layers[0].mlp.up_proj.weight, whole.model.layers[1].mlp.up_proj.weight
    assert ours.requires_grad and ours.dtype == torch.float32
    assert 0 < (ours - theirs).abs().max() < 0.2 * theirs.abs().max()
    cut.save_pretrained(tmp_path / "cut")
    assert "quantization_config" not in AutoConfig.from_pretrained(tmp_path / "cut").to_dict()
