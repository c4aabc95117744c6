"""Draft folders that failed."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from cotrain.cli import main
from cotrain.commands.served_pair import resolved
from cotrain.config.settings import checked, register
from cotrain.paths import folder
from cotrain.students.base import KINDS
from inference import Engine, Sampling, load
from inference.drafts.compatibility import hash_weights
from inference.drafts.draft_folder import METADATA, Metadata, ServedAs, describe, other_weights, read
from inference.models import packing
from inference.models.pretrained import cast, load_model
from inference.policy import Fixed
from tests.cases import case
from tests.cotrain.training.test_preconditions import command
from tests.draft_folders import draft_folder, new_student, written
from tests.folders import network, own_texts, target_folder, tokenizer

STEP = 8  # bytes: a header's length is a multiple of them


@case("unaligned mask")
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_drafts_as_before_writing_at_every_offset_of_its_header(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the weights that the kind's kernels read: in 8 bits, or packed in float16 by FBGEMM."""
    aligned_kernels(monkeypatch)
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
    wanted = drafted(Engine(model, student.proposer(int8=rounds), policy=Fixed(2)))
    for offset in range(0, packing.ALIGNED, STEP):
        for file in tmp_path.glob("*/model.safetensors"):
            begin(file, offset)
        assert drafted(load(path, load_model(str(place), dtype))) == wanted, offset


@case("changed weights")
def test_other_weights_of_the_target_are_said_and_text_stays_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    register()

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
            with initialize_config_dir(str(folder("conf")), version_base="1.3"):
                for name in ("bench", "plan", "serve_check"):
                    resolved(checked(name, compose(name, overrides=[named])))
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
    about = json.loads((draft / METADATA).read_text(encoding="utf-8"))
    del about["target"]["weights"]
    (draft / METADATA).write_text(json.dumps(about), encoding="utf-8")
    assert read(draft).metadata is not None and other_weights(read(draft).metadata, str(place)) is None


def test_a_hash_of_weights_is_of_their_numbers_alone(tmp_path: Path) -> None:
    """Not of dtype and shards; an adapter counts, and a hub id is one of the files in the hub's cache."""
    model = halved(network(), torch.float32)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    halved(model, torch.bfloat16).save_pretrained(tmp_path / "half")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    own = hash_weights(str(tmp_path / "one"))
    assert own and {hash_weights(str(tmp_path / name)) for name in ("shards", "half")} == {own}
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"a": torch.ones(3)}, adapter / "adapter_model.safetensors")
    with_adapter = hash_weights(str(tmp_path / "one"), str(adapter))
    save_file({"a": torch.zeros(3)}, adapter / "adapter_model.safetensors")
    assert len({own, with_adapter, hash_weights(str(tmp_path / "one"), str(adapter))}) == 3
    assert hash_weights(str(tmp_path / "nowhere")) is None and hash_weights("some/model") is None
    assert hash_weights("bundled") and hash_weights("bundled") != own
    merged = {"name": "x", "config": None, "tokenizer": None, "weights": with_adapter}
    about = Metadata(merged, 2, origin={"adapter": "a"})
    assert other_weights(about, str(tmp_path / "one")) is None  # merged: its hash is another
    assert (
        other_weights(about, str(tmp_path / "one"), str(adapter))
        and not about.exported("y", None, None).target["weights"]
    )


def aligned_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test fails where another processor would end the process."""

    def checked(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            tensors = [one for one in inputs if isinstance(one, torch.Tensor)]
            assert all(one.is_contiguous() and not one.data_ptr() % packing.ALIGNED for one in tensors)
            return kernel(*inputs)

        return run

    monkeypatch.setattr(torch, "_weight_int8pack_mm", checked(torch._weight_int8pack_mm))
    products = SimpleNamespace(default=checked(torch.ops.quantized.linear_dynamic_fp16.default))
    monkeypatch.setattr(torch.ops.quantized, "linear_dynamic_fp16", products)


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
    """Pad the header of a file so that its tensors begin `offset` bytes after a multiple of `ALIGNED`."""
    data = file.read_bytes()
    size = int.from_bytes(data[:STEP], "little")
    head = data[STEP : STEP + size].rstrip(b" ")
    head = head.ljust(len(head) + (offset - STEP - len(head)) % packing.ALIGNED)
    file.write_bytes(len(head).to_bytes(STEP, "little") + head + data[STEP + size :])


EVERY: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS} | {"eagle": {"vocabulary": 100, "head_rank": 8}}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target") / "target")


@pytest.mark.parametrize("kind", EVERY)
@case("own folders")
def test_a_folder_that_was_not_touched_passes_the_check(
    kind: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one that lacks a tensor does not."""
    folder = draft_folder(tmp_path / "draft", target, kind, **EVERY[kind])
    assert main(["export", f"check={folder}"]) == 0, capsys.readouterr().err
    weights = load_file(folder / "model.safetensors")
    if len(weights) > 1:  # some kinds have none, but for a constant
        dropped = max(weights, key=lambda key: weights[key].numel())
        save_file({key: one for key, one in weights.items() if key != dropped}, folder / "model.safetensors",
                  {"format": "pt"})  # fmt: skip
        assert main(["export", f"check={folder}"]) == 1
        assert f"tensor {dropped} is missing" in capsys.readouterr().err


@case("folder's rule")
def test_a_folder_that_was_measured_with_block_is_served_with_it(tmp_path: Path) -> None:
    path = draft_folder(tmp_path / "draft", target_folder(tmp_path / "target"), "independent")
    metadata = read(path).metadata
    assert metadata is not None and load(path).rule.name == "token"
    describe(path, replace(metadata, served=ServedAs(verify="block")))
    assert load(path).rule.name == "block" and load(path, verify="match").rule.name == "match"
