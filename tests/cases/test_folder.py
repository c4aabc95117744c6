"""Draft folders that failed."""

import json
import warnings
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from cotrain.cli import main
from cotrain.commands.served_pair import resolved
from cotrain.students.base import KINDS
from inference import Engine, Sampling, load
from inference.drafts import compatibility
from inference.drafts.compatibility import ADAPTER, hash_weights
from inference.drafts.draft_folder import METADATA, Metadata, ServedAs, describe, other_weights, read
from inference.drafts.weight_files import read_json
from inference.models import packing
from inference.models.pretrained import cast, load_model
from inference.policy import Fixed
from tests.cases import case
from tests.cotrain.students.test_initial_settings import target as target  # a fixture
from tests.cotrain.training.test_preconditions import command
from tests.draft_folders import draft_folder, new_student, written
from tests.folders import network, own_texts, target_folder, tokenizer
from tests.settings import composed
from tests.tiny import TARGET

STEP = 8  # bytes: a header's length is a multiple of them
LINE = 64  # bytes: as far as offsets go


@pytest.mark.thorough
@case("unaligned mask")
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_drafts_as_before_writing_at_every_offset_of_its_header(kind, tmp_path, monkeypatch):
    """With the weights that the kind's kernels read, in 8 bits or in 16, and without such kernels."""
    rounds = kind not in ("medusa", "hydra")
    dtype = torch.bfloat16 if rounds else torch.float32
    model, place = halved(network(), dtype), tmp_path / "target"
    model.save_pretrained(place)
    tokenizer().save_pretrained(place)
    small = {"path": str(draft_folder(tmp_path / "small", place, "independent"))} if kind == "two_levels" else {}
    student = new_student(kind, model, **small)
    disturb(student.network)
    halved(student.network, dtype)
    path = written(tmp_path / kind, place, student, rounds)
    with monkeypatch.context() as patch:
        patch.setattr(packing, "has_kernels", lambda: False)
        wanted = drafted(Engine(model, student.proposer(), policy=Fixed(2)))
    for kernels in {packing.has_kernels(), False}:
        with monkeypatch.context() as patch:
            patch.setattr(packing, "has_kernels", lambda kernels=kernels: kernels)
            found = []
            for offset in range(0, LINE, STEP):
                for file in tmp_path.glob("*/model.safetensors"):
                    begin(file, offset)
                found.append(drafted(load(path, load_model(str(place), dtype))))
            assert found == [found[0] if kernels else wanted] * len(found)


@case("changed weights")
def test_other_weights_of_the_target_are_said_and_text_stays_exact(tmp_path, capsys):
    """By every command that reads the folder, and by no command before; a folder without the hash says nothing."""
    place, draft = tmp_path / "target", tmp_path / "draft"
    own_texts(tmp_path / "own.jsonl", 60)
    target_folder(place)
    student = new_student("independent", load_model(str(place)))
    written(draft, place, student)
    named = f"draft.path={draft}"
    commands = [
        ["export", named, "engine=transformers", "overwrite=true", f"output={tmp_path / 'exported'}"],
        ["generate", named, "prompt=0001 one", "max_new_tokens=4"],
        command(tmp_path, "check=true", "init=pretrained", named),
    ]

    def said() -> list[int]:
        """Return how often each of the commands says it; `bench`, `plan` and `serve_check` where they read the
        folder."""
        counts = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for words in commands:
                assert main(words) == 0, words
                counts.append(capsys.readouterr().err + "".join(str(one.message) for one in caught))
                caught.clear()
            for name in ("bench", "plan", "serve_check"):
                resolved(composed(named, command=name))
                counts.append(capsys.readouterr().err)
        return [
            text.count(f"the weights of the target {place} are not those that the draft was trained for")
            for text in counts
        ]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(draft)
    assert said() == [0] * 6
    target_folder(place, seed=1)
    assert said() == [1] * 6
    with pytest.warns(
        UserWarning, match=r"cotrain.json: the weights of the target .* are not those that .*: text stays"
    ):
        engine = load(draft)
    greedy: Any = {"max_new_tokens": 8, "sampling": Sampling(0.0), "ignore_eos": True}
    assert engine.generate([[5, 6, 7]], **greedy).tokens == Engine(str(place)).generate([[5, 6, 7]], **greedy).tokens
    about = read_json(draft / METADATA)
    del about["target"]["weights"]
    (draft / METADATA).write_text(json.dumps(about), encoding="utf-8")
    assert read(draft).metadata is not None and other_weights(read(draft).metadata, str(place)) is None


def test_other_weights_of_an_adapter_are_said(tmp_path, capsys):
    """By the commands that take the adapter from the folder."""
    place, adapter, draft = (tmp_path / name for name in ("target", "adapter", "draft"))
    target_folder(place)
    adapter.mkdir()
    (adapter / ADAPTER[0]).write_text("{}")
    save_file({"a": torch.ones(3)}, adapter / ADAPTER[1])
    written(draft, place, new_student("independent", load_model(str(place))))
    about = read_json(draft / METADATA)
    about["made"] = {"adapter": str(adapter)}
    about["target"]["weights"] = hash_weights(str(place), str(adapter))
    (draft / METADATA).write_text(json.dumps(about), encoding="utf-8")

    def said() -> list[int]:
        counts = []
        for name in ("bench", "plan", "serve_check"):
            resolved(composed(f"draft.path={draft}", command=name))
            counts.append(capsys.readouterr().err.count("are not those that the draft was trained for"))
        return counts

    assert said() == [0] * 3
    save_file({"a": torch.zeros(3)}, adapter / ADAPTER[1])
    assert said() == [1] * 3


def test_a_hash_of_weights_is_of_what_is_stored(tmp_path):
    """Not of shards; dtype and an adapter count, and a hub id is one of the files in the hub's cache."""
    model = halved(network(), torch.float32)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    halved(model, torch.bfloat16).save_pretrained(tmp_path / "half")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    own = hash_weights(str(tmp_path / "one"))
    assert own and own == hash_weights(str(tmp_path / "shards")) != hash_weights(str(tmp_path / "half"))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"a": torch.ones(3)}, adapter / ADAPTER[1])
    with_adapter = hash_weights(str(tmp_path / "one"), str(adapter))
    save_file({"a": torch.zeros(3)}, adapter / ADAPTER[1])
    assert len({own, with_adapter, hash_weights(str(tmp_path / "one"), str(adapter))}) == 3
    assert hash_weights(str(tmp_path / "nowhere")) is None and hash_weights("some/model") is None
    assert hash_weights("bundled") and hash_weights("bundled") != own
    (tmp_path / "empty").mkdir()
    plain = Metadata(TARGET | {"weights": own}, 2)
    for path in ("nowhere", "empty"):  # what cannot be hashed is not said to differ
        assert other_weights(plain, str(tmp_path / path)) is None
    assert other_weights(plain, "some/model") is other_weights(plain, str(tmp_path / "one")) is None
    assert other_weights(plain, str(tmp_path / "half"))
    about = Metadata(TARGET | {"weights": with_adapter}, 2, origin={"adapter": "a"})
    assert other_weights(about, str(tmp_path / "one")) is None  # merged: its hash is another
    assert other_weights(plain, str(tmp_path / "one"), str(adapter))  # of the target that has an adapter now
    assert other_weights(plain, str(tmp_path / "half"), str(adapter)) is None  # may be the merged one
    assert (
        other_weights(about, str(tmp_path / "one"), str(adapter))
        and not about.exported("y", None, None).target["weights"]
    )


def test_a_hash_of_weights_reads_little_and_sees_every_layer(tmp_path, monkeypatch):
    """Of more tensors than are read, too: one of each projection of each layer, and some of the experts."""
    counted: list[int] = []

    class Counted(FileIO):
        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size) or b""
            counted.append(len(data))
            return data

    monkeypatch.setattr(Path, "open", lambda self, *_, **__: Counted(self))
    monkeypatch.setattr(compatibility, "BLOCKS", blocks := 40)
    layers, experts, size = 5, 24, 1000
    each = ["self_attn.q_proj", "self_attn.v_proj", *(f"mlp.experts.{i}.up_proj" for i in range(experts))]
    names = [f"model.layers.{layer}.{one}.weight" for layer in range(layers) for one in each]
    values = torch.zeros(len(names), size)
    file = tmp_path / "model.safetensors"

    def seen(*changed: str) -> bool:
        """Whether another value of these tensors gives another hash."""
        values[[names.index(name) for name in changed]] = 1.0
        save_file(dict(zip(names, values, strict=True)), file)
        counted.clear()
        hashed = hash_weights(str(tmp_path))
        values.zero_()
        assert hashed and len(counted) == 2 + blocks  # the header, in two reads
        assert sum(counted) == int.from_bytes(file.read_bytes()[:STEP], "little") + STEP + blocks * compatibility.BLOCK
        return hashed != own

    own = None
    seen()
    own = hash_weights(str(tmp_path))
    assert own and not seen()
    assert all(seen(name) for name in names if "self_attn" in name)
    for layer in range(layers):
        assert seen(*(name for name in names if f".{layer}.mlp" in name))
    assert sum(seen(*(name for name in names if f"experts.{i}.up" in name)) for i in range(experts)) > blocks // 4


HEADER = b'{"a": {"dtype": "%s", "shape": [%s], "data_offsets": [0, %d]}}'


@pytest.mark.parametrize(
    ("data", "of_adapter"),
    [
        (b"", True),
        (b"[1]", True),
        *(
            (data, False)
            for data in (
                b"",
                b"abc",
                (2**62).to_bytes(8, "little") + b"{}",
                b"[1]",
                b"{",
                b'{"a": 3}',
                b"\xff\xfe",
                HEADER % (b"F32", b"9", 36),
                HEADER % (b"F32", b"1", -4),
                HEADER % (b"NONE", b"1", 4),
                HEADER % (b"F4", b"8", 4),
            )
        ),
    ],
)
def test_a_hash_of_weights_never_raises(data, of_adapter, tmp_path, monkeypatch):
    """Of files cut short, broken headers, dtypes that torch lacks, and files that cannot be mapped or read."""
    target, adapter = tmp_path / "target", tmp_path / "adapter"
    for place, name in ((target, "model.safetensors"), (adapter, ADAPTER[1])):
        place.mkdir()
        save_file({"a": torch.ones(3)}, place / name)
    asked = (str(target), str(adapter)) if of_adapter else (str(target),)
    own = hash_weights(*asked)
    file = adapter / ADAPTER[1] if of_adapter else target / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(
        data if len(data) < 4 or data[7:8] == b"\x40" else len(data).to_bytes(8, "little") + data + bytes(4)
    )
    hashed = hash_weights(*asked)
    assert own and hashed != own and (hashed is None or b"F4" in data)
    file.write_bytes(whole)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("unable to mmap 36 bytes: Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("inference.drafts.weight_files.safe_open", fails)
        assert hash_weights(*asked) is None
    file.unlink()
    file.mkdir()
    assert hash_weights(*asked) is None


def halved(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model itself, with weights that bfloat16 represents."""
    return cast(cast(model, torch.bfloat16), dtype)


def disturb(network: PreTrainedModel) -> None:
    """Make an untrained draft right at times only."""
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.1 * torch.randn_like(weight)


def drafted(engine: Engine) -> tuple[Any, ...]:
    """Return what is drafted and emitted after two prompts, by draws that depend on all distributions."""
    out = engine.generate([[5, 6, 7, 8], [9, 10]], max_new_tokens=8, sampling=Sampling(), ignore_eos=True)
    return out.tokens, out.stats.drafted, out.stats.accepted


def begin(file: Path, offset: int) -> None:
    """Pad the header of a file so that its tensors begin `offset` bytes after a multiple of `LINE`."""
    data = file.read_bytes()
    size = int.from_bytes(data[:STEP], "little")
    head = data[STEP : STEP + size].rstrip(b" ")
    head = head.ljust(len(head) + (offset - STEP - len(head)) % LINE)
    file.write_bytes(len(head).to_bytes(STEP, "little") + head + data[STEP + size :])


EVERY: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS} | {"eagle": {"vocabulary": 100, "head_rank": 8}}


@pytest.mark.parametrize("kind", EVERY)
@case("own folders")
def test_a_folder_that_was_not_touched_passes_the_check(kind, target, tmp_path, capsys):
    """And one that lacks a tensor does not."""
    folder = draft_folder(tmp_path / "draft", target, kind, **EVERY[kind])
    assert main(["export", f"check={folder}"]) == 0, capsys.readouterr().err
    weights = load_file(folder / "model.safetensors")
    if len(weights) > 1:  # some kinds have none, but for a constant
        dropped = max(weights, key=lambda key: weights[key].numel())
        save_file(
            {key: one for key, one in weights.items() if key != dropped}, folder / "model.safetensors", {"format": "pt"}
        )
        assert main(["export", f"check={folder}"]) == 1
        assert f"tensor {dropped} is missing" in capsys.readouterr().err


@case("folder's rule")
def test_a_folder_that_was_measured_with_block_is_served_with_it(tmp_path):
    path = draft_folder(tmp_path / "draft", target_folder(tmp_path / "target"), "independent")
    metadata = read(path).metadata
    assert load(path).rule.name == "token"
    describe(path, replace(metadata, served=ServedAs(verify="block")))
    assert load(path).rule.name == "block" and load(path, verify="match").rule.name == "match"


@pytest.mark.parametrize("value", [[0], {"a": 1}, "zero"], ids=type)
@pytest.mark.parametrize("of", ["target", "draft"])
def test_a_generation_config_of_another_type_is_named(of, value, tmp_path, capsys):
    target = target_folder(tmp_path / "target", layers=1)
    draft = draft_folder(tmp_path / "draft", target, "independent")
    (tmp_path / of / "generation_config.json").write_text(json.dumps({"pad_token_id": value}))
    assert main(["generate", f"draft.path={draft}", f"target.path={target}", "prompt=say it", "max_new_tokens=2"]) == 1
    said = capsys.readouterr().err
    assert f"{of}.path: {tmp_path / of / 'generation_config.json'}: " in said and "Traceback" not in said
