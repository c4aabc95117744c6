"""Quantisation of drafts: the numbers of each quantisation, the table over them, and quantisation-aware training."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from cotrain.cli import main
from cotrain.training.callbacks import QuantisationAware
from inference.models.lm import LM
from inference.proposers.quantised import round_bits
from studies.quantisation_table import rounded_draft
from tests.cotrain.commands.test_train import SIZES
from tests.folders import network, run_paths, target_and_texts

WEIGHT = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))


def test_each_quantisation_has_few_numbers_near_the_weights() -> None:
    int8, nf4 = round_bits(WEIGHT, "int8"), round_bits(WEIGHT, "nf4")
    assert all(len(row.unique()) <= 255 for row in int8) and all(len(part.unique()) <= 16 for part in nf4.view(16, 64))
    errors = [(one - WEIGHT).abs().mean() for one in (int8, nf4)]
    assert 0 < errors[0] < 0.02 and errors[0] < errors[1] < 0.15


def test_an_int8_draft_has_the_served_distribution() -> None:
    draft, ids = network(layers=1).bfloat16(), torch.arange(2, 34).view(2, 16)
    served = LM(draft, 2, 300, int8=True)
    expected = torch.cat([served.forward(ids[:, i : i + 1], [i, i]).logits for i in range(16)], 1)
    int8_draft = rounded_draft(draft, "int8")
    assert torch.equal(int8_draft.get_input_embeddings().weight, draft.get_input_embeddings().weight)
    with torch.no_grad():
        apart = [(model(ids).logits.float() - expected.float()).abs().mean() for model in (int8_draft, draft)]
    assert apart[0] < 0.7 * apart[1]  # bfloat16 rounds what both multiply


def test_rounding_leaves_the_draft_unchanged() -> None:
    draft = network(layers=1)
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    rounded_draft(draft, "nf4")
    assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())


def test_gradients_of_rounded_weights_move_the_whole_ones() -> None:
    draft, ids = network(layers=1), torch.arange(2, 12).view(1, 10)
    module, callback = SimpleNamespace(draft=draft), QuantisationAware("nf4")
    whole = copy.deepcopy(draft.state_dict())
    callback.on_train_batch_start(None, module)
    reference = rounded_draft(draft, "nf4")  # once rounded, rounding changes nothing
    for one in (draft, reference):
        one.requires_grad_(True)
        one(ids, labels=ids).loss.backward()
    callback.on_after_backward(None, module)
    assert all(torch.equal(value, whole[name]) for name, value in draft.state_dict().items())
    name = "model.layers.0.mlp.up_proj.weight"
    ours, theirs = (dict(one.named_parameters())[name] for one in (draft, reference))
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-6) and not torch.equal(ours, theirs)


FEW = "rollout.temperatures=[1.0] trainer.steps=2 trainer.validations=1 trainer.corpus_steps=0".split()


def test_a_draft_trained_for_a_quantisation_is_exported_in_it(tmp_path: Path) -> None:
    target_and_texts(tmp_path)
    assert main(["train", *run_paths(tmp_path, "run"), *SIZES, "draft.quantisation=nf4", *FEW, "measure=false"]) == 0
    recipe = json.loads((tmp_path / "run" / "draft" / "cotrain.json").read_text())["made"]
    weights = load_file(tmp_path / "run" / "draft" / "model.safetensors")
    few = [len(part.unique()) <= 16 for part in weights["model.layers.0.mlp.up_proj.weight"].view(-1, 64)]
    assert recipe["draft_quantisation"] == "nf4" and all(few)
