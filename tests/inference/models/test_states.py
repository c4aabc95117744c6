"""States of layers: those of transformers' own forward, whatever runs the pass; and passes left behind some layers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.models.forward import Lean, Stock
from inference.models.lm import LM, store_prompts
from inference.models.passes import LAST
from inference.models.pretrained import decoder_layers
from tests.inference import test_families as families
from tests.inference.models.test_trees import no_gradients as no_gradients  # a fixture
from tests.inference.models.test_trees import tiny
from tests.often import often

TEXTS = [[3, 5, 7, 3, 5, 1, 30, 2, 9], [4, 0, 4, 31, 8, 1], [12, 13, 14, 15, 16, 17, 18]]
START = [6, 3, 4]  # where the last three ids of each text begin
FAMILIES = {name: settings for name, settings, *_ in [*families.BEHAVING, *families.SUPPORTED]}


def own_states(model: PreTrainedModel, text: list[int]) -> dict[int, Tensor]:
    """As transformers gives them, (T, D) each: its last are those behind the final norm."""
    model = copy.deepcopy(model)  # transformers leaves its hooks there
    hidden = model(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    return {i if i + 1 < len(hidden) else LAST: states[0] for i, states in enumerate(hidden)}


def stored(lm: LM, texts: list[list[int]] = TEXTS) -> Any:
    """All but the last three ids of every text, and then these in one ragged pass."""
    layers = (*range(lm.depth), LAST)
    prompts = [text[:-2] for text in texts]  # the last id of a prompt is not stored
    of_prompts = store_prompts(lm, 0, prompts, 3, states=layers)
    ids = torch.tensor([text[-3:] for text in texts], device=lm.device)
    return of_prompts, lm.forward(ids, START, states=layers)


def close(values: Tensor, wanted: Tensor, within: float = 1e-6) -> None:
    # families compute some sums in float32: small entries of a state have the error of its large ones
    atol = within * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(values.to("cpu"), wanted, rtol=within, atol=atol)


def check(model: PreTrainedModel, lm: LM) -> None:
    host = copy.deepcopy(model).to("cpu")
    of_prompts, later = stored(lm)
    for row, text in enumerate(TEXTS):
        wanted = own_states(host, text)
        assert set(of_prompts) == set(later.states) == set(wanted)
        for layer, states in wanted.items():
            close(of_prompts[layer][row, : START[row]], states[: START[row]])
            close(later.states[layer][row], states[-3:])
        close(later.logits[row], host(torch.tensor([text]), use_cache=False).logits[0, -3:])


@pytest.mark.parametrize("family", often(FAMILIES, {"GPT2", *families.OFTEN}.__contains__))
def test_states_are_transformers_own(family: str) -> None:
    with torch.inference_mode(False):
        model = families.build(family, FAMILIES[family])
    lm = LM(model, 3, stock=True)
    assert isinstance(lm.run, Stock)
    check(model, lm)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_states_in_few_operations_are_transformers_own() -> None:
    model = tiny(layers=4)
    lm = LM(model, 3)
    assert isinstance(lm.run, Lean)
    check(model, lm)


def test_all_keys_of_a_prompt_are_stored_for_any_requested_states() -> None:
    model, ids = tiny(layers=4), torch.arange(6).view(1, 6)
    wanted = LM(model, 1)
    wanted.store(ids, [0])
    for layers in ((), (0,), (2,), (4,), (1, LAST)):
        lm = LM(model, 1)
        lm.store(ids, [0], states=layers)
        for ours, theirs in zip(lm.cache.stores, wanted.cache.stores, strict=True):
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_prompts_of_one_token_have_no_states() -> None:
    of_prompts = store_prompts(LM(tiny(), 2), 0, [[3], [4]], states=(1, LAST))
    assert {layer: states.shape for layer, states in of_prompts.items()} == {1: (2, 0, 16), LAST: (2, 0, 16)}


def test_states_by_buckets_are_transformers_own(graphs_on_cpu: None) -> None:
    model = tiny(layers=3)
    lm = LM(model, 3, graphs=True)
    check(model, lm)
    assert ("pass", (0, 1, 2, LAST)) in {key[0] for key in lm.run.replay.graphs}  # type: ignore[attr-defined]


def test_layers_that_the_model_lacks_are_named() -> None:
    lm, ids = LM(tiny(), 1), torch.ones(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"states: LlamaForCausalLM has layers 0 to 2, and -1 for .*, but no layer 3"):
        lm.forward(ids, [0], states=(LAST, 3))


def test_states_that_are_not_the_models_own_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is run once, when states are first requested."""
    right = decoder_layers
    lm, ids = LM(tiny(layers=3), 1), torch.ones(1, 1, dtype=torch.int64)
    monkeypatch.setattr("inference.models.pretrained.decoder_layers", lambda model: list(right(model))[::-1])
    lm.forward(ids, [0])
    with pytest.raises(ValueError, match="LlamaForCausalLM: its states cannot be used here: states differ"):
        lm.forward(ids, [0], states=(1,))
