"""Kinds of draft that engines load by other ways than a plain folder: what is written for them, and what is refused."""

import json
from pathlib import Path

import pytest

from cotrain.errors import UserError
from cotrain.export import lookup_layout
from cotrain.export.engines import ENGINES, layout_of, refuse_kind, refuse_layout, usual_layout
from inference.drafts.draft_folder import Metadata, read, save
from tests.folders import network, tokenizer

LOOKUP = {"shortest": 3, "gate": None}


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A folder of kind hybrid, planned with 5 drafts a round."""
    model = network()
    model.config.lookup = LOOKUP
    built = Metadata({"name": "their/target", "config": None, "tokenizer": None}, 5, kind="hybrid")
    save(model, tokenizer(), tmp_path / "draft", built, None)
    return tmp_path / "draft"


def test_look_up_beside_a_model_goes_to_vllm_with_its_settings(draft: Path, tmp_path: Path) -> None:
    module = layout_of("hybrid", "vllm")
    assert module is lookup_layout and layout_of("retrieval", "vllm") is lookup_layout
    folder = module.export(draft, tmp_path / "out put")
    assert json.loads((folder / "config.json").read_text())["lookup"] == LOOKUP
    assert read(folder).metadata.kind == "hybrid" and (folder / "model.safetensors").is_file()
    card = (folder / "README.md").read_text()
    assert f"COTRAIN_DRAFT='{folder}' vllm serve their/target" in card and '"num_speculative_tokens": 5' in card
    assert '"method": "custom_class"' in card
    asked = module.export(draft, tmp_path / "other", 3, target="mine", name="me/draft")
    said = read(asked).metadata
    assert said and (said.target["name"], said.k) == ("mine", 3)
    other = (asked / "README.md").read_text()
    assert (
        "hf download me/draft --local-dir draft\nCOTRAIN_DRAFT=draft vllm serve mine" in other
        and '"num_speculative_tokens": 3' in other
    )


NONE = "it loads no {kind} drafts: set engine=vllm"
REFUSED = {  # of each kind, by the engines that have a layout for features and the others
    "eagle": ("layout=hf: feature drafts are written with layout=eagle3", NONE),
    "p_eagle": ("feature drafts are written with layout=eagle3 or speculators", NONE),
    "block": ("layout=hf: feature drafts are written with layout=dflash",) * 2,
    "early_exit": ("it loads no early_exit drafts; they are loaded by no engine of the table",) * 2,
    "hybrid_exit": ("it loads no hybrid_exit drafts; they are loaded by no engine of the table",) * 2,
    "quantised": ("it loads no quantised drafts; they are loaded by no engine of the table",) * 2,
    "hybrid_quantised": ("it loads no hybrid_quantised drafts; they are loaded by no engine of the table",) * 2,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_no_kind_is_written_as_a_plain_draft_that_it_is_not(kind: str) -> None:
    for engine in ENGINES:
        able, other = (reason.format(kind=kind) for reason in REFUSED[kind])
        reason = able if engine in ("vllm", "sglang", "tensorrt_llm", "llamacpp") else other
        with pytest.raises(UserError, match=reason):
            layout_of(kind, engine)
        assert layout_of("independent", engine) is None
    for other_kind, engine in (("retrieval", "sglang"), ("hybrid", "sglang"), ("medusa", "llamacpp")):
        with pytest.raises(
            UserError, match=f"engine={engine}: it loads no {other_kind} drafts; they are loaded by vllm"
        ):
            layout_of(other_kind, engine)
    with pytest.raises(UserError, match="^engine=llamacpp: it does not load drafts of kind parallel: set engine=vllm"):
        refuse_kind("llamacpp", "parallel")
    with pytest.raises(UserError, match="^layout=hf: llamacpp does not load it: set layout= to one of gguf"):
        refuse_layout("llamacpp", "hf")


def test_a_layout_that_is_not_named_is_one_that_the_kind_has() -> None:
    for engine in ("vllm", "sglang", "tensorrt_llm"):
        assert usual_layout("eagle", engine) == usual_layout("p_eagle", engine) == "eagle3"
        assert usual_layout("independent", engine) == usual_layout("parallel", engine) == "hf"
    assert usual_layout("block", "vllm") == "dflash" and usual_layout("retrieval", "vllm") == "hf"
    assert usual_layout("eagle", "llamacpp") == "eagle3" and usual_layout("eagle", "transformers") == "hf"
    for markov, layout in ((False, "dflash"), (True, "dspark")):
        assert usual_layout("block", "llamacpp", markov) == layout and usual_layout("block", "vllm", markov) == "dflash"
