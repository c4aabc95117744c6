"""init=pretrained: drafts that begin with the weights of a folder of the same or a related kind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from cotrain.cli import main
from cotrain.config.drafts import DRAFTS
from cotrain.config.groups import Init
from cotrain.students.base import KINDS, student_class
from inference.drafts.draft_folder import METADATA, read
from inference.models.pretrained import load_model
from inference.proposers.conditioned import TABLE
from tests.cotrain.students.test_p_eagle import guessed
from tests.cotrain.training.test_preconditions import SIZES as RUN
from tests.draft_folders import bare, copied, draft_folder, written
from tests.folders import run_paths, target_and_texts, target_folder
from tests.often import often

TRAINED = [kind for kind in KINDS if DRAFTS[kind].trained]
NEW = {"p_eagle": {"mask_hidden"}, "conditioned": {TABLE}}  # what folders of other kinds do not hold
PAIRS = [(kind, other) for kind in TRAINED for other in (kind, *student_class(kind).begins_with)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, texts of its own, and a folder of every kind with distinct weights."""
    place = target_and_texts(tmp_path_factory.mktemp("pretrained"))
    for kind in TRAINED:
        marked(draft_folder(place / kind, place / "target", kind))
    marked(draft_folder(place / "pruned", place / "target", "eagle", vocabulary=20))
    return place


def marked(path: Path) -> None:
    """Shift every weight, and the tokens of a pruned vocabulary."""
    tensors = {n: t + 0.25 if t.is_floating_point() else t for n, t in load_file(path / "model.safetensors").items()}
    if "d2t" in tensors:
        tensors["d2t"] = torch.arange(20) * 2
        tensors["t2d"] = torch.zeros(300, dtype=torch.bool).index_fill(0, torch.arange(20) * 3, True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def initial(kind: str, path: Path | str | None, target: Any, **settings: Any) -> Any:
    draft = bare(kind, path=path and str(path), **settings)
    return student_class(kind).initial(draft, Init(kind="pretrained", layers=[0]), target)


def test_every_kind_that_learns_is_here() -> None:
    assert len(TRAINED) >= 8 and {other for _, other in PAIRS} <= {*TRAINED} and ("p_eagle", "eagle") in PAIRS


@pytest.mark.parametrize(
    ("kind", "other"), often(PAIRS, lambda pair: pair[0] == pair[1] or pair == ("p_eagle", "eagle"))
)
def test_a_draft_begins_with_the_weights_of_its_folder(kind: str, other: str, place: Path) -> None:
    network = initial(kind, place / other, load_model(str(place / "target")))
    state, expected = network.state_dict(), load_file(place / other / "model.safetensors")
    fresh = NEW[kind] if kind in NEW and other != kind else set()
    assert state.keys() - expected.keys() - {"lm_head.weight"} == fresh and not expected.keys() - state.keys()
    assert all(torch.equal(state[name].float(), tensor.float()) for name, tensor in expected.items())
    assert all(weight.dtype == torch.float32 and bool(weight.isfinite().all()) for weight in network.parameters())
    if "mask_hidden" in fresh:
        assert 0.3 < float(state["mask_hidden"].square().mean()) < 3  # as it begins without a folder
    student = student_class(kind)(network, load_model(str(place / "target")), 290)
    student.refuse()
    assert student.proposer() is not None


def lacks(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def more(tensors: dict[str, Tensor]) -> None:
    tensors["fc.bias"] = torch.zeros(64)


def broken(tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"][3] = torch.nan


MISFITS: dict[str, Any] = {
    "eagle, another kind": (
        "eagle",
        "hydra",
        {},
        "a draft of kind hydra, but draft=eagle can only begin with one of kind",
    ),
    "eagle, not from p_eagle": ("eagle", "p_eagle", {}, "a draft of kind p_eagle, but draft=eagle can only"),
    "medusa, another kind": ("medusa", "hydra", {}, "a draft of kind hydra, but draft=medusa can only"),
    "a model from heads": (
        "independent",
        "medusa",
        {},
        "a draft of kind medusa, but draft=independent can only begin with one of kind independent, hybrid, parallel",
    ),
    "heads from a model": ("hydra", "independent", {}, "a draft of kind independent, but draft=hydra can only"),
    "no tensor": ("eagle", "eagle", {"change": lacks("fc.weight")}, "tensor fc.weight is missing"),
    "no mask": ("p_eagle", "p_eagle", {"change": lacks("mask_hidden")}, "tensor mask_hidden is missing"),
    "no layer of an exit": ("early_exit", "early_exit", {"change": lacks("norm")}, "tensor norm is missing"),
    "a tensor more": ("eagle", "eagle", {"change": more}, "tensor fc.bias does not belong to the network"),
    "another shape": ("hydra", "hydra", {"num_heads": 4}, "tensor bias has shape .3, 64., config.json says .4, 64."),
    "another width": ("medusa", "medusa", {"hidden_size": 32, "num_heads": 3}, "tensor bias has shape"),
    "another vocabulary": ("eagle", "eagle", {"vocab_size": 301, "draft_vocab_size": 300}, "is missing"),
    "a Markov head of more ids": (
        "parallel",
        "parallel",
        {"vocab_size": 301, "markov_rank": 3},
        "its small head or Markov head has 301 ids, but the target has 300: ",
    ),
    "a small head of more ids": (
        "independent",
        "independent",
        {"vocab_size": 301, "draft_vocab_size": 20},
        "its small head or Markov head has 301 ids, but the target has 300: ",
    ),
}


@pytest.mark.parametrize("meta", often([False, True], bool), ids=["with weights", "without"])
@pytest.mark.parametrize("case", MISFITS)
def test_misfits_raise_by_name(case: str, meta: bool, place: Path, tmp_path: Path) -> None:
    """Also before any weight is read."""
    kind, other, changes, message = MISFITS[case]
    path, target = copied(tmp_path / "draft", place / other, **changes), load_model(str(place / "target"))
    if meta:
        target = target.to("meta")
    with pytest.raises(ValueError, match=f"draft.path={path}: .*{message}"):
        initial(kind, path, target)


def test_other_errors(place: Path, tmp_path: Path) -> None:
    target = load_model(str(place / "target"))
    for kind in TRAINED:
        with pytest.raises(ValueError, match=r"init=pretrained: it takes its weights from .* draft.path="):
            initial(kind, None, target)
    with pytest.raises(
        ValueError, match="draft.path=/nowhere: no such folder: with init=pretrained name the folder of an? eagle"
    ):
        initial("eagle", "/nowhere", target)
    Qwen3Config(num_hidden_layers=4).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="draft.path=.*/model: its config.json is not for a p_eagle draft"):
        initial("p_eagle", tmp_path / "model", target)
    with pytest.raises(ValueError, match="draft.path=.*: tensor norm.weight holds NaN or infinity"):
        initial("eagle", copied(tmp_path / "nan", place / "eagle", broken), target)
    with pytest.raises(ValueError, match="draft.vocabulary=16: draft.path=.* has 20 tokens; set draft.vocabulary=null"):
        initial("eagle", place / "pruned", target, vocabulary=16)
    with pytest.raises(ValueError, match="draft.path=.*: its hidden_size is 64, but the target's is 128"):
        target_folder(tmp_path / "wide", hidden=128)
        initial("hydra", place / "hydra", load_model(str(tmp_path / "wide")))
    lacking = copied(tmp_path / "lacking", place / "independent", lambda t: t.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"draft.path=.*: tensors are missing: model.norm.weight"):
        initial("parallel", lacking, target)


def test_a_folder_without_metadata_is_read_by_its_tensors(place: Path, tmp_path: Path) -> None:
    """A copy of the target's embedding in it is ignored."""
    target = load_model(str(place / "target"))

    def embedded(tensors: dict[str, Tensor]) -> None:
        tensors["embed_tokens.weight"] = torch.zeros(300, 64)

    path = copied(tmp_path / "draft", place / "eagle", embedded)
    (path / METADATA).unlink()
    assert read(path).metadata is None
    for kind in ("eagle", "p_eagle"):
        assert torch.equal(initial(kind, path, target).fc.weight, load_file(path / "model.safetensors")["fc.weight"])
    masked = copied(tmp_path / "masked", place / "p_eagle")
    (masked / METADATA).unlink()
    assert initial("p_eagle", masked, target).config.pard_token is not None
    with pytest.raises(ValueError, match="tensor mask_hidden does not belong to the network"):
        initial("eagle", masked, target)


def test_a_run_starts_from_the_loaded_weights(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a pruned EAGLE to a P-EAGLE with the same tokens, in steps that hardly change a weight."""
    settings = """init=pretrained draft=p_eagle draft.vocabulary=20 draft.depths=2 optimizer.lr=1e-9 trainer.steps=2
    measure=false""".split()
    paths = [*run_paths(place, tmp_path / "run"), f"draft.path={place / 'pruned'}"]
    assert main(["train", *paths, *RUN, *settings]) == 0
    assert "the draft's vocabulary has 20 tokens:" in capsys.readouterr().out
    state = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    expected = load_file(place / "pruned" / "model.safetensors")
    assert state.keys() - {f"draft.{name}" for name in expected} == {"draft.mask_hidden"}
    for name, tensor in expected.items():
        torch.testing.assert_close(state[f"draft.{name}"].to(tensor.dtype), tensor, atol=1e-6, rtol=0)


def test_a_folder_with_other_token_ids_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two tokens have changed places."""
    kind = "eagle"
    other = copied(tmp_path / "other", place / kind)
    words = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = words["model"]["vocab"]
    one, two = (token for token, number in vocabulary.items() if number in (250, 251))
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    settings = [*RUN, "init=pretrained", f"draft={kind}", f"draft.path={other}", "check=true"]
    assert main(["train", *run_paths(place, tmp_path / "out"), *settings]) == 1
    assert f"draft.path={other}: a draft must use the target's token ids" in capsys.readouterr().err


def test_the_head_of_a_block_stays_the_targets_unless_another_is_asked_for(place: Path, tmp_path: Path) -> None:
    """As in published folders of DFlash. Its copy computes the same before it learns."""
    target: Any = load_model(str(place / "target"))
    path, ids = draft_folder(tmp_path / "draft", place / "target", "block", head="target"), torch.arange(2, 12)[None]
    assert not {"lm_head.weight", "mask_embedding"} & load_file(path / "model.safetensors").keys()
    drafts = [initial("block", path, target, head=head) for head in (None, "target", "own")]
    assert [network.config.target_head for network in drafts] == [True, True, False]
    mask = drafts[0].config.dflash_config["mask_token_id"]
    assert mask == target.config.pad_token_id == 1
    assert torch.equal(drafts[2].lm_head.weight, target.get_output_embeddings().weight.float())
    assert torch.equal(drafts[2].mask_embedding, target.get_input_embeddings().weight[mask].float())
    students = [student_class("block")(network, target) for network in drafts]
    logits = [[guess.head(guess.states) for guess in guessed(one, ids)] for one in students]
    for one in logits[1:]:
        torch.testing.assert_close(one, logits[0])
    again = initial("block", written(tmp_path / "own", place / "target", students[2]), target)
    assert not again.config.target_head and again.config.dflash_config["mask_token_id"] == mask
    said = "the weights in draft.path=.* are for draft.head=own: set draft.head=own"
    with pytest.raises(ValueError, match=f"draft.head=target: {said}"):
        initial("block", tmp_path / "own", target, head="target")
    for key in ("vocabulary", "head_rank"):
        with pytest.raises(ValueError, match=f"draft.{key}=20: block drafts have none .* set draft.{key}=null"):
            initial("block", path, target, **{key: 20})
        with pytest.raises(ValueError, match=f"draft.{key}=20: block drafts have none with"):
            draft_folder(tmp_path / "none", place / "target", "block", head="target", **{key: 20})
