"""Drafts that begin with the weights of a folder: whole, of the same or a related kind, and as they were loaded."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from cotrain.cli import main
from cotrain.config.groups import Draft, Init
from cotrain.students.base import KINDS, UNTRAINED, student_class
from cotrain.students.pretrained import RELATED
from cotrain.training import assembly
from inference.drafts.draft_folder import METADATA, read
from inference.models.lm import load_model
from inference.proposers.conditioned_network import TABLE
from tests.cotrain.config.test_settings_reach import job_of
from tests.cotrain.training.test_preconditions import SIZES as RUN
from tests.draft_folders import BARE, SIZES, draft_folder
from tests.folders import own_texts, target_folder

TRAINED = [kind for kind in KINDS if kind not in UNTRAINED]
NEW = {"p_eagle": {"mask_hidden"}, "conditioned": {TABLE}}  # what folders of other kinds do not hold
PAIRS = [(kind, other) for kind in TRAINED for other in (kind, *RELATED.get(kind, ()))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, texts of its own, and a folder of every kind with weights that no start has."""
    place = tmp_path_factory.mktemp("pretrained")
    target_folder(place / "target")
    own_texts(place / "own.jsonl")
    for kind in TRAINED:
        marked(draft_folder(place / kind, place / "target", kind))
    marked(draft_folder(place / "pruned", place / "target", "eagle", vocabulary=20))
    return place


def marked(path: Path) -> None:
    """Every weight moved, the tokens that a pruned draft knows too."""
    tensors = {n: t + 0.25 if t.is_floating_point() else t for n, t in load_file(path / "model.safetensors").items()}
    if "d2t" in tensors:
        tensors["d2t"] = torch.arange(20) * 2
        tensors["t2d"] = torch.zeros(300, dtype=torch.bool).index_fill(0, torch.arange(20) * 3, True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def begun(kind: str, path: Path | str | None, target: Any, **settings: Any) -> Any:
    draft = Draft(kind=kind, **BARE | SIZES.get(kind, {}) | {"path": path and str(path)} | settings)
    return student_class(kind).initial(draft, Init("pretrained", [0], 0.0), target)


def copied(path: Path, old: Path, change: Any = None, **config: Any) -> Path:
    """A copy with other tensors and another config.json."""
    shutil.copytree(old, path)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | config))
    tensors = load_file(path / "model.safetensors")
    if change:
        change(tensors)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_every_kind_that_learns_is_here() -> None:
    assert len(TRAINED) >= 8 and {*RELATED} <= {*TRAINED} and ("p_eagle", "eagle") in PAIRS


@pytest.mark.parametrize(("kind", "other"), PAIRS)
def test_a_draft_begins_as_the_folder_is(kind: str, other: str, place: Path) -> None:
    network = begun(kind, place / other, load_model(str(place / "target")))
    found, wanted = network.state_dict(), load_file(place / other / "model.safetensors")
    fresh = NEW[kind] if kind in NEW and other != kind else set()
    assert found.keys() - wanted.keys() - {"lm_head.weight"} == fresh and not wanted.keys() - found.keys()
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in wanted.items())
    assert all(weight.dtype == torch.float32 and bool(weight.isfinite().all()) for weight in network.parameters())
    if "mask_hidden" in fresh:
        assert 0.3 < float(found["mask_hidden"].square().mean()) < 3  # as it begins without a folder
    student = student_class(kind)(network, load_model(str(place / "target")), 290)
    student.refuse()
    assert student.proposer() is not None


@pytest.mark.parametrize("kind", TRAINED)
def test_drafts_of_a_round_are_as_many_as_asked_for(kind: str, place: Path) -> None:
    """But of heads, which the folder has or not."""
    if "depths" not in SIZES.get(kind, {}):
        return
    network = begun(kind, place / kind, load_model(str(place / "target")), depths=2)
    names = {"parallel": "pard_depths", "medusa": "num_heads", "hydra": "num_heads"}
    found = getattr(network.config, names.get(kind, "depths"))
    assert found == (3 if kind in ("medusa", "hydra") else 2)


def lacks(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def more(tensors: dict[str, Tensor]) -> None:
    tensors["fc.bias"] = torch.zeros(64)


def broken(tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"][3] = torch.nan


REFUSED: dict[str, Any] = {
    "eagle, another kind": ("eagle", "hydra", {}, "a draft of kind hydra; draft=eagle begins with the weights of one "),
    "eagle, not from p_eagle": ("eagle", "p_eagle", {}, "a draft of kind p_eagle; draft=eagle begins"),
    "medusa, another kind": ("medusa", "hydra", {}, "a draft of kind hydra; draft=medusa begins"),
    "a model from heads": ("independent", "medusa", {}, "a draft of kind medusa; draft=independent begins with the "
                           "weights of one of independent, hybrid, parallel"),
    "heads from a model": ("hydra", "independent", {}, "a draft of kind independent; draft=hydra begins"),
    "no tensor": ("eagle", "eagle", {"change": lacks("fc.weight")}, "tensor fc.weight is missing"),
    "no mask": ("p_eagle", "p_eagle", {"change": lacks("mask_hidden")}, "tensor mask_hidden is missing"),
    "no layer of an exit": ("early_exit", "early_exit", {"change": lacks("norm")}, "tensor norm is missing"),
    "a tensor more": ("eagle", "eagle", {"change": more}, "tensor fc.bias is none of its network"),
    "another shape": ("hydra", "hydra", {"num_heads": 4}, "tensor bias has shape .3, 64., config.json says .4, 64."),
    "another width": ("medusa", "medusa", {"hidden_size": 32, "num_heads": 3}, "tensor bias has shape"),
    "another vocabulary": ("eagle", "eagle", {"vocab_size": 301, "draft_vocab_size": 300}, "is missing"),
}  # fmt: skip


@pytest.mark.parametrize("meta", [False, True], ids=["with weights", "without"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case: str, meta: bool, place: Path, tmp_path: Path) -> None:
    """Also before any weight is read."""
    kind, other, changes, message = REFUSED[case]
    path, target = copied(tmp_path / "draft", place / other, **changes), load_model(str(place / "target"))
    if meta:
        target = target.to("meta")
    with pytest.raises(ValueError, match=f"draft.path={path}: .*{message}"):
        begun(kind, path, target)


def test_other_refusals(place: Path, tmp_path: Path) -> None:
    target = load_model(str(place / "target"))
    for kind in TRAINED:
        with pytest.raises(ValueError, match=r"init.kind: 'pretrained' takes its weights from .* draft.path="):
            begun(kind, None, target)
    with pytest.raises(ValueError, match="draft.path=/nowhere: no such folder; eagle drafts begin"):
        begun("eagle", "/nowhere", target)
    Qwen3Config(num_hidden_layers=4).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="draft.path=.*/model: config.json is none of a draft of kind p_eagle: "):
        begun("p_eagle", tmp_path / "model", target)
    with pytest.raises(ValueError, match="draft.path=.*: tensor norm.weight holds NaN or infinity"):
        begun("eagle", copied(tmp_path / "nan", place / "eagle", broken), target)
    with pytest.raises(ValueError, match="draft.vocabulary=16: draft.path=.* knows 20 tokens; draft.vocabulary=null"):
        begun("eagle", place / "pruned", target, vocabulary=16)
    with pytest.raises(ValueError, match="draft.path=.*: its hidden_size is 64, the target's 128"):
        target_folder(tmp_path / "wide", hidden=128)
        begun("hydra", place / "hydra", load_model(str(tmp_path / "wide")))
    lacking = copied(tmp_path / "lacking", place / "independent", lambda t: t.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"draft.path=.*: tensors are missing: model.norm.weight"):
        begun("parallel", lacking, target)


def test_a_folder_made_elsewhere_is_read_by_its_tensors(place: Path, tmp_path: Path) -> None:
    """It does not say its kind; a copy of the target's embedding is left out."""
    target = load_model(str(place / "target"))

    def embedded(tensors: dict[str, Tensor]) -> None:
        tensors["embed_tokens.weight"] = torch.zeros(300, 64)

    path = copied(tmp_path / "draft", place / "eagle", embedded)
    (path / METADATA).unlink()
    assert read(path).metadata is None
    for kind in ("eagle", "p_eagle"):
        assert torch.equal(begun(kind, path, target).fc.weight, load_file(path / "model.safetensors")["fc.weight"])
    masked = copied(tmp_path / "masked", place / "p_eagle")
    (masked / METADATA).unlink()
    assert begun("p_eagle", masked, target).config.pard_token is not None
    with pytest.raises(ValueError, match="tensor mask_hidden is none of its network"):
        begun("eagle", masked, target)


def test_what_was_loaded_is_not_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a pruned draft are counted in texts where it has none yet."""
    counted: list[Tensor] = []
    texts = SimpleNamespace(ids=torch.tensor([[0, 5, 5]]), predicted=torch.tensor([[True, True]]))
    monkeypatch.setattr(assembly, "parts", lambda job, rounds: (None, texts))
    student: Any = SimpleNamespace(know=counted.append)
    for init, vocabulary, count in (("pretrained", 4, 0), ("scratch", "null", 0), ("scratch", 4, 1)):
        assembly.prune(job_of(f"init.kind={init}", f"draft.vocabulary={vocabulary}"), student)
        assert len(counted) == count
    assert int(counted[0][5]) == 2


def run(place: Path, output: Path, *settings: str) -> int:
    paths = [f"target.path={place / 'target'}", f"data.path={place / 'own.jsonl'}", f"output={output}"]
    return main(["train", *paths, *RUN, "init=pretrained", *settings])


def test_a_run_goes_on_from_what_was_loaded(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From an eagle that knows some tokens to a P-EAGLE that knows these: steps that hardly change a weight."""
    settings = ["draft=p_eagle", f"draft.path={place / 'pruned'}", "draft.vocabulary=20", "draft.depths=2",
                "optimizer.lr=1e-9", "trainer.steps=2", "measure=false"]  # fmt: skip
    assert run(place, tmp_path / "run", *settings) == 0
    assert "the draft knows 20 tokens, which are" in capsys.readouterr().out
    found = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    wanted = load_file(place / "pruned" / "model.safetensors")
    assert found.keys() - {f"draft.{name}" for name in wanted} == {"draft.mask_hidden"}
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[f"draft.{name}"].to(tensor.dtype), tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["medusa", "early_exit", "eagle"])
def test_check_takes_folders_of_every_kind_and_refuses_before_weights_are_read(
    kind: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(place, tmp_path / "out", f"draft={kind}", f"draft.path={place / kind}", "check=true") == 0
    capsys.readouterr()
    assert run(place, tmp_path / "out", f"draft={kind}", f"draft.path={place / 'hydra'}", "check=true") == 1
    said = capsys.readouterr().err
    assert f"draft.path={place / 'hydra'}: a draft of kind hydra; draft={kind} begins" in said
    other = copied(tmp_path / "other", place / kind)
    words = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = words["model"]["vocab"]
    one, two = (token for token, number in vocabulary.items() if number in (250, 251))
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    assert run(place, tmp_path / "out", f"draft={kind}", f"draft.path={other}", "check=true") == 1
    assert f"draft.path={other}: a draft must use the target's token ids" in capsys.readouterr().err
