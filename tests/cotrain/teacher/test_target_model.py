"""The frozen target: loading, quantisation, adapters, fingerprints, and its halves."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cotrain.data.fingerprints import fingerprint
from cotrain.students import independent
from cotrain.teacher.target_model import adapted, load_pair, load_target, part_of_head, served, split
from inference.models.forward import Lean
from inference.models.llama import in_int8_rows, rounded
from inference.models.lm import LM
from inference.models.passes import LAST
from tests import standin
from tests.draft_folders import copied
from tests.folders import network, target_folder

IDS = torch.tensor([[5, 9, 250, 17, 0, 3]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("teacher") / "target")


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantised_checkpoint_stays_quantised(tmp_path: Path, kind: str) -> None:
    quantised = load_target(str(target_folder(tmp_path / "whole", hidden=128)), kind)
    quantised.save_pretrained(tmp_path / "held")
    again = load_target(str(tmp_path / "held"))
    assert again.config.to_dict()["quantization_config"]["quant_method"] == "bitsandbytes"
    assert torch.equal(logits(again), logits(quantised)) and fingerprint(again) == fingerprint(quantised)
    small = independent.from_layers(again, [0])
    assert small.dtype == torch.float32 and "quantization_config" not in small.config.to_dict()
    with pytest.raises(ValueError, match="is already quantised; set quantisation=none"):
        load_target(str(tmp_path / "held"), "int8")


@pytest.mark.parametrize("quantisation", ["int8", "nf4"])
def test_reading_leaves_a_quantised_target_unchanged(tmp_path: Path, quantisation: str) -> None:
    """Between passes, its fingerprint is computed and layers are copied."""
    model = load_target(str(target_folder(tmp_path, hidden=128)), quantisation)
    before = logits(model)
    fingerprint(model)
    independent.from_layers(model, [0])
    assert torch.equal(logits(model), before)
    split(model)
    assert torch.equal(logits(model), before)


def test_weights_are_not_packed_for_a_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    packs = [
        getattr(module, "support_avx512bf16_for_cpu", None) for module in load_target(str(folder), "nf4").modules()
    ]
    assert False in packs and True not in packs


def scaled(family: str, **changed: float) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        initializer_range=0.5,
        **changed,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


gemma = partial(scaled, "gemma2", head_dim=8, final_logit_softcapping=0.5)


CLOVA = pytest.mark.skipif("hyperclovax" not in CONFIG_MAPPING, reason="this transformers has no HyperCLOVA X")


@pytest.mark.parametrize(
    "make",
    [
        network,
        gemma,
        partial(scaled, "granite", logits_scaling=6.0),
        partial(scaled, "granitemoe", logits_scaling=6.0),
        partial(scaled, "cohere", logit_scale=0.25),
        partial(scaled, "phi"),  # its head has a bias
        pytest.param(partial(scaled, "hyperclovax", logits_scaling=6.0), marks=CLOVA),
    ],
)
def test_halves_are_the_whole(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    if (bias := model.get_output_embeddings().bias) is not None:
        torch.nn.init.normal_(bias)
    hidden, head = split(model)
    ids, some = IDS % 40, torch.tensor([7, 0, 39])
    part = part_of_head(model)
    assert part
    with torch.no_grad():
        assert torch.allclose(head(hidden(ids)), model(ids).logits, atol=1e-6)
        assert torch.allclose(part(some)(hidden(ids)), model(ids).logits[..., some], atol=1e-6)
        with torch.autocast("cpu", torch.bfloat16):
            assert part(some)(hidden(ids).float()).dtype == torch.float32


def test_a_part_of_a_head_is_where_its_ids_are() -> None:
    """The whole head may be on another GPU."""
    model, ids, states = network(), torch.tensor([7, 0, 39]), torch.randn(2, network().config.hidden_size)
    with standin.device(), torch.no_grad():
        wanted = part_of_head(model)(ids)(states)  # type: ignore[misc]
        model.get_output_embeddings().to("cuda")
        found = part_of_head(model)(ids)(states)  # type: ignore[misc]
    assert found.device == wanted.device == states.device
    torch.testing.assert_close(found, wanted)


def test_reading_states_of_layers_leaves_the_fast_forward_to_the_engine() -> None:
    """Hooks would make it run the target through transformers' own."""
    model = network()
    read, _ = served(model, layers=(0, 1))
    assert set(read(IDS)) == {0, 1, LAST}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert isinstance(LM(model, 1).run, Lean)


def test_a_head_that_does_more_raises() -> None:
    model = gemma()

    class Shifted(type(model)):
        def forward(self, *args: object, **kwargs: object) -> object:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits + 1
            return out

    model.__class__ = Shifted
    with pytest.raises(ValueError, match="Shifted: its head does more than a projection"):
        split(model)


def test_a_target_is_frozen_and_in_eval_mode(folder: Path) -> None:
    model, tokenizer = load_pair(str(folder))
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert tokenizer.eos_token_id == 0 and model.dtype == torch.float32
    assert load_target(str(folder), dtype="bfloat16").dtype == torch.bfloat16


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> str:
    """A LoRA of random weights."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    )
    for name, weight in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(tmp_path / "adapter")
    return str(tmp_path / "adapter")


def test_an_adapter_is_merged_into_the_target(folder: Path, adapter: str) -> None:
    plain, expected = load_target(str(folder)), PeftModel.from_pretrained(load_target(str(folder)), adapter)
    model = adapted(load_target(str(folder)), adapter)
    assert type(model) is type(plain) and not any(weight.requires_grad for weight in model.parameters())
    assert torch.allclose(logits(model), logits(expected), atol=1e-4)
    assert not torch.allclose(logits(model), logits(plain), atol=1e-2)
    assert fingerprint(model) != fingerprint(plain)


@pytest.mark.parametrize("quantisation", ["int8", "nf4"])
def test_a_draft_begins_with_layers_to_which_the_adapter_is_added(
    folder: Path, adapter: str, quantisation: str
) -> None:
    plain = load_target(str(folder), quantisation)
    target = adapted(load_target(str(folder), quantisation), adapter)
    bare, draft = (logits(independent.from_layers(model, [0, 1])) for model in (plain, target))
    assert (draft - logits(target)).abs().mean() < 0.2 * (bare - logits(target)).abs().mean()


def test_an_adapter_is_merged_before_rows_are_rounded(folder: Path, adapter: str) -> None:
    """Beside rounded rows, it would keep `LM` from running them with int8 weights, and layers from being copied."""
    model, _ = load_pair(str(folder), "int8_rows", "bfloat16", adapter=adapter)
    merged = in_int8_rows(adapted(load_target(str(folder), dtype="bfloat16"), adapter))
    theirs, ours = merged.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert LM(model, 1).weights == "int8" and independent.from_layers(model, [0])
    assert fingerprint(model) != fingerprint(load_target(str(folder), "int8_rows", "bfloat16"))


@pytest.mark.parametrize("tied", [True, False])
def test_layers_of_rounded_rows_begin_a_draft_with_the_ties_of_the_checkpoint(tmp_path: Path, tied: bool) -> None:
    """The tied tensor is the target's embeddings, which are not rounded; the layers are."""
    whole = network()
    if not tied:
        whole.config.tie_word_embeddings = False
        whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.flip(0).clone())
    whole.save_pretrained(tmp_path)
    target = load_target(str(tmp_path), "int8_rows")
    assert target.lm_head.weight is not target.model.embed_tokens.weight
    draft = independent.from_layers(target, [-1])
    head = draft.get_output_embeddings().weight
    assert (head is draft.get_input_embeddings().weight) == draft.config.tie_word_embeddings == tied
    assert torch.equal(head, whole.model.embed_tokens.weight if tied else target.lm_head.weight)
    assert torch.equal(draft.get_input_embeddings().weight, whole.model.embed_tokens.weight)
    copied, original = (model.model.layers[-1].mlp.up_proj.weight for model in (draft, whole))
    assert torch.equal(copied, rounded(original)) and not torch.equal(copied, original)
    whole_draft = independent.from_layers(load_target(str(tmp_path)), [-1])
    assert draft.num_parameters() == whole_draft.num_parameters()


def test_a_folder_without_an_adapter_raises(folder: Path, adapter: str, tmp_path: Path) -> None:
    for model, place in ((load_target(str(folder)), str(tmp_path / "none")), (network(hidden=128), adapter)):
        with pytest.raises(ValueError, match=f"target.adapter: {place} is not an adapter of this target"):
            adapted(model, place)


def test_weights_that_are_not_finite_raise(folder: Path, tmp_path: Path) -> None:
    path = copied(tmp_path / "copy", folder, lambda tensors: tensors["model.norm.weight"][3:4].fill_(float("nan")))
    with pytest.raises(ValueError, match="target.path: .* NaN or infinite weights in model.norm.weight"):
        load_target(str(path))


def test_missing_weights_raise(folder: Path, tmp_path: Path) -> None:
    path = copied(tmp_path / "copy", folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ValueError, match="target.path: .* is incomplete, .* missing model.norm.weight"):
        load_target(str(path))


def test_missing_or_damaged_targets_raise(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="target.path: .*nowhere is no folder"):
        load_pair(str(tmp_path / "nowhere"))
    copy = shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(ValueError, match="quantisation must be one of none, int8, nf4, int8_rows, not 'nf5'"):
        load_pair(str(copy), "nf5")
    (copy / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        load_pair(str(copy))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    shutil.copy(folder / "model.safetensors", copy)
    with pytest.raises(ValueError, match="target.path: .* has no tokenizer files"):
        load_pair(str(copy))
