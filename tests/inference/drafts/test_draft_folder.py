"""Draft folders: what goes in comes out, a crash leaves the old one, a damaged one is refused by name."""

import copy
import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from inference.drafts.bundled_target import draft_of
from inference.drafts.compatibility import hash_target, hash_weights
from inference.drafts.draft_folder import Metadata, load_draft, read, save
from inference.drafts.weight_files import read_json
from studies.pretrain.tokenizer import train_tokenizer
from tests.tiny import tiny

TEXTS = ["def add(a, b):\n    return a + b\n", "the cat sat on the mat and the dog sat on the cat"]
VOCAB = 300
TREE = {"parents": [-1, -1, 0], "rule": "tree", "likeliest": False}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, VOCAB, 256)


def metadata(tokenizer: PreTrainedTokenizerFast | None, **changes: object) -> Metadata:
    hashes = hash_target(tiny(VOCAB, layers=1).config, tokenizer)
    values = {"k": 3, "regime": {"temperature": 0.7}, "origin": {"command": "cotrain train"}} | changes
    return Metadata(target={"name": "some/target", **hashes}, **values)


@pytest.fixture(scope="module")
def good(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "draft"
    return save(tiny(VOCAB, layers=1, seed=1, eos=1), tokenizer, folder, metadata(tokenizer), {"tau": 2.5})


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy of the good folder, to be damaged."""
    return Path(shutil.copytree(good, tmp_path / "draft"))


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(20).view(2, 10)).logits


def test_round_trip(good: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model, words, result = load_draft(good)
    assert torch.equal(logits(model), logits(tiny(VOCAB, layers=1, seed=1)))
    assert not model.training
    assert words.get_vocab() == tokenizer.get_vocab()
    assert words.decode(words.encode(TEXTS[0])) == TEXTS[0]
    assert (result.k, result.regime, result.origin) == (3, {"temperature": 0.7}, {"command": "cotrain train"})
    assert result.target == metadata(tokenizer).target
    assert read(good).kind == "independent"
    assert read_json(good / "report.json") == {"tau": 2.5}
    assert len(result.report) == 64


def test_generation_config_fixes_the_draft_length(good: Path) -> None:
    values = read_json(good / "generation_config.json")
    assert values["num_assistant_tokens"] == 3
    assert values["num_assistant_tokens_schedule"] == "constant"
    assert values["assistant_confidence_threshold"] == 0.0
    assert values["eos_token_id"] == 1


def test_no_file_names_a_path_of_this_machine(good: Path, tmp_path: Path) -> None:
    model, words, result = load_draft(good)
    again = save(model, words, tmp_path / "again", result, None)
    for file in again.glob("*.json"):
        assert str(good.parent) not in file.read_text(), file


def test_dtype_of_the_folder_or_the_given_one(good: Path) -> None:
    assert load_draft(good)[0].dtype == torch.float64
    assert load_draft(good, torch.bfloat16)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("config_tied", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_come_back_as_they_were(config_tied: bool, tied: bool, tmp_path: Path) -> None:
    """Whatever the config says: a shared tensor is stored once, and must not be filled at random."""
    model = tiny(VOCAB, layers=1)
    head = model.model.embed_tokens.weight if tied else torch.nn.Parameter(torch.randn(VOCAB, 16).double())
    model.lm_head.weight = head
    model.config.tie_word_embeddings = config_tied
    save(model, None, tmp_path / "draft", metadata(None), None)
    names = load_file(tmp_path / "draft" / "model.safetensors").keys()
    assert ("lm_head.weight" in names) is not tied
    back, words, _ = load_draft(tmp_path / "draft")
    assert torch.equal(logits(back), logits(model))
    assert words is None


def test_a_crash_in_the_middle_leaves_the_old_folder(
    folder: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    monkeypatch.setattr("inference.drafts.draft_folder.asdict", lambda _: 1 / 0)  # the last file of all
    with pytest.raises(ZeroDivisionError):
        save(tiny(VOCAB, seed=2), tokenizer, folder, metadata(tokenizer), None, replace=True)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [entry.name for entry in folder.parent.iterdir()] == ["draft"]


def test_an_old_folder_is_replaced_only_with_replace(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (folder / "stale.txt").write_text("old")
    other = tiny(VOCAB, layers=1, seed=2)
    with pytest.raises(FileExistsError, match="draft"):
        save(other, tokenizer, folder, metadata(tokenizer), None)
    save(other, tokenizer, folder, metadata(tokenizer, k=5), None, replace=True)
    assert not (folder / "stale.txt").exists()
    assert not (folder / "report.json").exists()
    model, _, result = load_draft(folder)
    assert result.k == 5
    assert torch.equal(logits(model), logits(other))


def test_a_folder_without_metadata_is_read(tmp_path: Path) -> None:
    model = tiny(VOCAB, layers=1)
    model.save_pretrained(tmp_path / "plain")
    back, words, result = load_draft(tmp_path / "plain")
    assert torch.equal(logits(back), logits(model))
    assert (words, result) == (None, None)


def without_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")


def with_tensor(value: torch.Tensor) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {"model.norm.weight": value}, folder / "model.safetensors")

    return change


def cut_short(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-9])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def other_tokenizer(folder: Path) -> None:
    train_tokenizer(["zyx wvu zyx wvu tsr tsr"], VOCAB, 256).save_pretrained(folder)


def key(name: str, value: object, file: str = "cotrain.json") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = read_json(folder / file)
        (folder / file).write_text(json.dumps(values | {name: value}))

    return change


def stray_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGE = {
    "missing tensor": (without_tensor, r"model\.safetensors: tensor model\.norm\.weight is missing"),
    "wrong shape": (with_tensor(torch.ones(8).double()), r"model\.norm\.weight has shape \(8,\).*\(16,\)"),
    "NaN": (with_tensor(torch.full((16,), torch.nan).double()), r"model\.norm\.weight holds NaN"),
    "truncated weights": (cut_short("model.safetensors"), r"model\.safetensors is damaged or cut short"),
    "pickled weights": (pickled, r"pytorch_model\.bin is pickled"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors is missing"),
    "weights outside": (stray_index, r"index\.json: weight_map must name files of this folder"),
    "wrong tokenizer": (other_tokenizer, r"draft: its tokenizer is not the target's"),
    "broken tokenizer": (cut_short("tokenizer.json"), r"tokenizer\.json is broken"),
    "broken metadata": (cut_short("cotrain.json"), r"cotrain\.json is broken"),
    "broken report": (cut_short("report.json"), r"report\.json is broken"),
    "a list": (lambda folder: (folder / "cotrain.json").write_text("[]"), r"cotrain\.json must hold .* list"),
    "format version": (key("format", 2), r"cotrain\.json: format is 2, but this version of cotrain reads 1"),
    "unknown key": (key("colour", 2), r"cotrain\.json: keys missing: none; keys unknown: colour"),
    "draft length": (key("k", 0), r"cotrain\.json: k must be"),
    "objective": (key("objective", "best"), r"cotrain\.json: objective must be one of sampled, greedy"),
    "tree": (key("tree", [-1, 0]), r"cotrain\.json: tree must be null, or have the keys parents, rule and likeliest"),
    "tree's nodes": (
        key("tree", {**TREE, "parents": [-1, 1]}),
        r"cotrain\.json: tree\.parents: the parent of node 1 is 1",
    ),
    "tree's numbers": (
        key("tree", {**TREE, "parents": ["-1"]}),
        r"cotrain\.json: tree\.parents must be a list of whole",
    ),
    "tree's rule": (
        key("tree", {**TREE, "rule": "block"}),
        r"cotrain\.json: tree\.rule must be 'tree' or 'traversal'",
    ),
    "target": (
        key("target", {"name": "x"}),
        r"cotrain\.json: target must have the keys name \(text\), config and tokenizer",
    ),
    "kind": (key("kind", "medusa"), r"cotrain\.json: .* of kind 'medusa'"),
    "unknown kind": (key("kind", "eagl3"), r"cotrain\.json: kind: there is no kind of draft 'eagl3'"),
    "temperature": (key("regime", {"temperature": -1}), r"cotrain\.json: regime: Sampling\.temperature must be .* -1"),
    "dtype": (key("served", {"dtype": "flot"}), r"cotrain\.json: served\.dtype must be .*, not 'flot'"),
    "quantisation": (
        key("served", {"quantisation": "int9"}),
        r"cotrain\.json: served\.quantisation must be one of .*, not 'int9'",
    ),
    "no heads": (key("num_attention_heads", 0, "config.json"), r"config\.json: this config cannot build .* zero"),
    "model type": (key("model_type", "none_such", "config.json"), r"config\.json: .*none_such"),
    "no draft": (lambda folder: (folder / "config.json").unlink(), r"is no draft folder: .*config\.json"),
    "no folder": (shutil.rmtree, r"there is no folder .*draft"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_rejected_by_name(name: str, folder: Path) -> None:
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_draft(folder)


def test_code_in_a_folder_does_not_run(folder: Path) -> None:
    key("auto_map", {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}, "config.json")(folder)
    key("model_type", "own", "config.json")(folder)
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()")
    with pytest.raises(ValueError, match=r"config\.json: .*trust_remote_code"):
        load_draft(folder)
    assert not (folder / "ran").exists()


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    model = tiny(VOCAB, layers=1)
    model.model.norm.weight.data[3] = torch.nan
    with pytest.raises(ValueError, match=r"model\.norm\.weight holds NaN"):
        save(model, None, tmp_path / "draft", metadata(None), None)
    assert list(tmp_path.iterdir()) == []


def test_a_target_with_another_tokenizer_is_rejected(good: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = tiny(VOCAB, layers=1).config
    load_draft(good, target=hash_target(config, tokenizer))
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="its tokenizer is not the target's"):
        load_draft(good, target=hash_target(config, other))


def test_a_target_of_another_shape_is_warned_of(good: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.warns(UserWarning, match=r"cotrain\.json: .*another shape, some/target"):
        load_draft(good, target=hash_target(tiny(VOCAB, layers=2).config, tokenizer))


def test_a_target_of_unknown_shape_is_not_warned_of(tmp_path: Path) -> None:
    model, unknown_target = tiny(VOCAB, layers=1), {"name": "some/target", "config": None, "tokenizer": None}
    save(model, None, tmp_path / "draft", Metadata(unknown_target, 3), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_draft(tmp_path / "draft", target=hash_target(model.config, None))


def test_a_relative_target_is_found_where_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the working directory or above the folder, with the weights that were hashed rather than any."""
    target, other, name = tmp_path / "project" / "models" / "t", tmp_path / "elsewhere" / "models" / "t", "models/t"
    for seed, place in enumerate((target, other)):
        tiny(VOCAB, layers=1, seed=seed).save_pretrained(place)
    for run in ("project/runs/draft", "elsewhere/draft", "moved"):
        weights = hash_weights(str(target))
        about = {"name": name, "config": None, "tokenizer": None, "weights": weights}
        save(tiny(VOCAB, layers=1), None, tmp_path / run, Metadata(about, 3), None)
    for working, run, wanted in (
        ("project", "project/runs/draft", name),  # as it was made
        (".", "project/runs/draft", str(target)),
        ("elsewhere", "project/runs/draft", str(target)),
        ("project", "elsewhere/draft", name),
        (".", "elsewhere/draft", str(other)),  # of other weights, as is then said
        (".", "moved", name),
    ):
        monkeypatch.chdir(tmp_path / working)
        assert read(tmp_path / run).metadata.target["name"] == wanted, (working, run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundled").mkdir()
    shutil.copy(target / "config.json", tmp_path / "bundled")
    edited = (tmp_path / "moved" / "cotrain.json").read_text().replace(name, "bundled")
    (tmp_path / "moved" / "cotrain.json").write_text(edited)
    assert read(tmp_path / "moved").metadata.target["name"] == "bundled"


@pytest.mark.parametrize("change", [None, "edited", "missing"])
def test_a_report_of_something_else_is_said_and_not_refused(folder: Path, change: str | None) -> None:
    if change == "edited":
        (folder / "report.json").write_text('{"tau": 9}')
    elif change:
        (folder / "report.json").unlink()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert read(folder).metadata.k == 3
    assert ["report.json is missing, or is not the file" in str(one.message) for one in said] == [True] * (
        change is not None
    )


def test_a_draft_that_comes_along_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read(draft_of("smollm2")).kind == "eagle"
    for other in ("a/smollm2", "another", ".."):
        assert draft_of(other) == Path(other)
    Path("smollm2").mkdir()  # the user's own
    assert draft_of("smollm2") == Path("smollm2")
