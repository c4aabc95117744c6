"""What commands take from a draft folder or a sweep, and paths that arrive as they were typed."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from cotrain.cli import main
from cotrain.commands.served_pair import prompts, refuse_pair, resolved
from cotrain.errors import UserError
from cotrain.evaluation.comparison import named
from cotrain.export.engines import place
from cotrain.export.publishing import tau_table
from cotrain.run_folder import claim, held, writable
from inference.drafts.draft_folder import Metadata, ServedAs, save
from tests.cotrain.commands.test_cli import ran  # noqa: F401
from tests.folders import network, target_folder, tokenizer
from tests.tiny import TARGET

ODD = "a b, [c] = {ü} 漢字"


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft folder under an odd name, which names a target under another."""
    root = tmp_path_factory.mktemp("served") / ODD
    target_folder(root / "target")
    about = TARGET | {"name": str(root / "target")}
    metadata = Metadata(about, 3, origin={"adapter": "ad"}, served=ServedAs(prompt_tokens=100))
    return save(network(layers=1), tokenizer(), root / "draft", metadata, None)


def test_the_target_is_the_one_that_the_folder_names(
    draft: Path,
    ran: list[DictConfig],  # noqa: F811
) -> None:
    assert main(["bench", f"draft.path={draft}"]) == main(["bench", f"draft.path={draft}", "target.path=/other"]) == 0
    assert [resolved(cfg) for cfg in ran] == [str(draft.parent / "target"), "/other"]  # type: ignore[arg-type]
    assert [cfg.target.adapter for cfg in ran] == ["ad", None]
    assert main(["bench", f"draft.path={draft}", "target.adapter=/mine"]) == 0
    assert resolved(ran[2]) == str(draft.parent / "target") and ran[2].target.adapter == "/mine"  # type: ignore[arg-type]
    ran[0].target.path, ran[0].draft.path = None, str(draft.parent / "target")
    with pytest.raises(UserError, match="does not name its target: set target.path="):
        resolved(ran[0])  # type: ignore[arg-type]


def test_a_larger_draft_is_measured_and_said_to_be(draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, _, small = refuse_pair(str(draft), str(draft.parent / "target"))
    assert target.device == small.device == torch.device("meta") and capsys.readouterr().err == ""
    refuse_pair(str(draft.parent / "target"), str(draft))
    assert "is the larger model" in capsys.readouterr().err


def test_a_baseline_is_named_by_the_value_that_was_swept() -> None:
    labels = ["loss=kl", "loss=tv", "loss=kl,optimizer.lr=1"]
    assert named("tv", labels) == named("loss=tv", labels) == "loss=tv" and named("loss=kl", labels) == "loss=kl"
    with pytest.raises(UserError, match="baseline=kl: several labels have it, loss=kl, loss=kl,optimizer.lr=1"):
        named("kl", labels)
    with pytest.raises(UserError, match="the labels are "):
        named("nla", labels)


def test_runs_of_a_sweep_that_differ_in_seed_share_a_label(ran: list[DictConfig]) -> None:  # noqa: F811
    assert main(["train", "-m", "loss=kl,tv", "trainer.seed=0,1"]) == 0
    assert [cfg.label for cfg in ran] == ["loss=kl", "loss=kl", "loss=tv", "loss=tv"]
    assert len({cfg.output for cfg in ran}) == 4


def test_a_launch_command_works_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").mkdir()
    assert (place("target"), place("some/model")) == (str(tmp_path / "target"), "some/model")


def test_tau_stands_beside_every_draft_length() -> None:
    metadata = Metadata(TARGET, 2, regime={"temperature": 0.7})
    held_out = {f"tau{way}_T0.7/all/{k}": 1 + k / 10 for way in ("", "_greedy_draft") for k in (1, 2, 3)}
    lines = tau_table({"extra": {"held_out": held_out}}, metadata).splitlines()
    assert lines[0] == "| drafts a round | 1 | **2** | 3 |" and lines[2] == "| sampled | 1.10 | 1.20 | 1.30 |"
    assert tau_table({"extra": {}}, metadata) == ""


def test_a_folder_of_texts_is_held_by_one_process(tmp_path: Path) -> None:
    (tmp_path / "train_T1.parquet").write_text("earlier")
    with held(tmp_path), pytest.raises(UserError, match="in use by process"), held(tmp_path):
        pass
    with claim(tmp_path / "run"), pytest.raises(UserError, match="in use by process"), held(tmp_path / "run"):
        pass


def test_what_cannot_be_written_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    writable("report", tmp_path / "file")
    writable("output", tmp_path / "new" / "folder")
    with pytest.raises(UserError, match="output=.*file/x cannot be written"):
        writable("output", tmp_path / "file" / "x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "draft.path=DRAFT", "prompt="], "prompt= is empty"),
        (["generate", "draft.path=DRAFT", "target.path=TARGET", f"prompt={'a b ' * 200}"], "prompt has "),
        (["generate", "target.path=TARGET", "prompts=/none"], "prompts=/none: there is no such file"),
        (["generate", "target.path=TARGET", "prompts=TARGET"], "prompts=TARGET cannot be read as text: Is a directory"),
        (["generate", "target.path=ODD", "prompt=a"], "target.path: ODD has the model_type 'odd', which transformers "),
        (["generate", "draft.path=DRAFT", "target.path=ODD", "prompt=a"], "target.path: ODD has the model_type 'odd'"),
        (["generate", "target.path=ODD/config.json", "prompt=a"], "target.path: ODD/config.json is a file: give the "),
        (["plan", "log=ODD/config.json", "output=OUT"], "output=OUT: it has no plan.json"),
        (["export", "draft.path=DRAFT", "output=TARGET"], "TARGET, which draft.path=DRAFT names, lies in output="),
        (["bench", "draft.path=/none"], "draft.path: there is no folder /none"),
        (["bench", "draft.path=DRAFT", "bench.prompt_tokens=100"], "bench.prompt_tokens, bench.new_tokens: "),
        (["serve_check", "draft.path=DRAFT", "url=http://127.0.0.1:9", "output=OUT"], "url=http://127.0.0.1:9: no "),
        (
            ["rollout", "target.path=TARGET", "data.path=/none.jsonl", "rollout.new_tokens=9", "output=OUT"],
            "data.path: no such file",
        ),
    ],
)
def test_a_mistake_is_one_early_line(
    arguments: list[str], message: str, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {
        "DRAFT": str(draft),
        "TARGET": str(draft.parent / "target"),
        "OUT": str(tmp_path / "out"),
        "ODD": str(tmp_path / "odd"),
    }
    shutil.copytree(draft.parent / "target", tmp_path / "odd")
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "odd"}')
    for name, path in names.items():
        arguments, message = [one.replace(name, path) for one in arguments], message.replace(name, path)
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"cotrain {arguments[0]}: {message}") and said.count("\n") == 1


@pytest.mark.parametrize("source", ["own", "shipped"])
def test_shipped_prompts_for_a_draft_that_was_measured_on_others_are_said(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"extra": {"prompts": source}}))
    size: Any = SimpleNamespace(path=None, prompt_tokens=8)
    prompts(size, size, network(layers=1), tokenizer(), draft=tmp_path)
    said = f"prompts: the shipped ones are used, but {tmp_path / 'report.json'} was measured on prompts of the user: "
    assert capsys.readouterr().err.startswith(said) == (source == "own")
