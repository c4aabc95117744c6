"""What a command reads does not lie where it writes, and a folder of another command is never replaced."""

import copy
import typing
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from cotrain.cli import main
from cotrain.commands import export
from cotrain.config.base import Mark, Settings, fields, marked
from cotrain.config.settings import SCHEMAS
from cotrain.errors import UserError
from cotrain.export.engines import FILES, MARK
from cotrain.run_folder import MARKER, claim, refuse_overlap, refuse_replaced
from inference.drafts.atomic import write_json
from inference.drafts.weight_files import read_json
from inference.lookup.corpus import ABOUT
from tests.settings import composed


def texts_of(schema: type[Settings]) -> set[str]:
    """The dotted names of all settings of text."""
    return {
        key
        for key, field in fields(schema)
        if {str, list[str]} & {field.annotation, *typing.get_args(field.annotation)}
        and typing.get_origin(field.annotation) is not dict
    }


# text that is no path; a new setting of text is marked as a path or stands here
WORDS = {
    "p",
    "quantisation.kind",
    "draft.quantisation",
    "init.kind",
    "loss.first",
    "loss.then",
    "objective",
    "mode",
    "data.column",
    "data.split",
    "data.config",
    "rollout.url",
    "trainer.precision",
    "trainer.accelerator",
    "trainer.strategy",
    "trainer.logger",
    "bench.draft_dtype",
    "target.dtype",
    "verify",
    "label",
    "kind",
    "baseline",
    "engine",
    "layout",
    "dtype",
    "push_to_hub",
    "url",
    "teacher.url",
    "url_draft",
    "python",
    "model",
    "prompt",
    "shapes",
}
PATHS = [
    (command, written, key)
    for command, schema in SCHEMAS.items()
    for written in marked(schema, Mark.OUTPUT)
    for key in sorted(texts_of(schema) - WORDS - {written})
]


@pytest.fixture(scope="module")
def settings() -> dict[str, dict[str, Any]]:
    """Of each command, as they stand in conf/."""
    return {name: composed(command=name).model_dump() for name in SCHEMAS}


def refused(settings: dict[str, Any], command: str, **values: Path | str) -> str | None:
    """What is said of a command with these values; None: nothing."""
    changed = copy.deepcopy(settings)
    for key, value in values.items():
        *groups, name = key.split(".")
        group = reduce(lambda some, one: some[one], groups, changed)
        group[name] = [str(value)] if isinstance(group.get(name), list) else str(value)
    try:
        refuse_overlap(command, changed)
    except UserError as error:
        return str(error)
    return None


def test_every_setting_of_text_is_a_word_or_guarded_as_a_path() -> None:
    known = {key for schema in SCHEMAS.values() for key in texts_of(schema)}
    assert WORDS - known == set()
    guarded = {key for schema in SCHEMAS.values() for key in marked(schema, Mark.PATH, Mark.STORE)}
    assert known - WORDS - {"output"} == guarded
    assert guarded == {
        "target.path",
        "target.adapter",
        "draft.path",
        "draft.datastore",
        "data.path",
        "rollout.folder",
        "trainer.cache",
        "prompts",
        "folder",
        "report",
        "run",
        "page",
        "check",
        "drafts",
        "log",
        "policy.file",
        "costs",
        "texts",
    }


@pytest.mark.parametrize(("command", "written", "key"), PATHS)
def test_no_path_that_is_read_may_lie_in_a_folder_that_is_written(
    command: str,
    written: str,
    key: str,
    settings: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if (command, key) == ("export", "check"):
        assert refused(settings[command], command, **{written: tmp_path, key: tmp_path}) is None  # it writes nothing
        return
    monkeypatch.chdir(tmp_path)
    output, other = tmp_path / "out", tmp_path / "other"
    for place in (output / "sub" / "file", other / "file"):
        place.parent.mkdir(parents=True)
        place.write_text("{}")
    (output / "link").symlink_to(other)  # what it points at stays, the link does not
    (tmp_path / "alias").symlink_to(output / "sub")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "weights").symlink_to(output / "sub" / "file")
    inside = [
        output,
        output / "sub",
        output / "sub" / "file",
        Path("out/sub"),
        output / "link",
        tmp_path / "alias",
        tmp_path / "linked",
        other / ".." / "out" / "sub",
    ]
    inside += [output / "not yet"] if key in marked(SCHEMAS[command], Mark.STORE) else []
    inside += [output / "sub" / "f*"] if key == "data.path" else []
    for place in inside:
        said = refused(settings[command], command, **{written: output, key: place})
        assert said.startswith(f"{key}=") and f"lies in {written}={output}" in said, place
        assert f"name another {written}=" in said and "\n" not in said
    said = refused(settings[command], command, **{written: other / "out", key: other})
    assert said.startswith(f"{written}={other / 'out'} lies in {key}={other}")
    (output / "link").unlink()
    for place in (other, other / "file", "org/name", "bundled", output.with_name("out2")):
        assert refused(settings[command], command, **{written: output, key: place}) is None, place


@pytest.mark.parametrize(
    ("file", "outer", "inner"),
    [
        ("cotrain.json", "target", "name"),
        ("cotrain.json", "made", "adapter"),
        ("config.json", "lookup", "datastore"),
    ],
)
def test_what_a_draft_folder_names_is_read_too(
    file: str, outer: str, inner: str, settings: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    draft, output = tmp_path / "draft", tmp_path / "out"
    for place in (draft, output / "kept"):
        place.mkdir(parents=True)
    write_json(draft / file, {outer: {inner: str(output / "kept")}})
    said = refused(settings["bench"], "bench", **{"draft.path": draft, "output": output})
    assert said.startswith(f"{output / 'kept'}, which draft.path={draft} names, lies in output=")


MAKERS = ("train", "bench", "serve_check")


@pytest.mark.parametrize("command", [name for name, schema in SCHEMAS.items() if "output" in texts_of(schema)])
def test_the_folder_of_another_command_is_refused_and_stays(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maker = "bench" if command == "train" else "train"
    with claim(tmp_path / "out", command=maker) as run:
        (tmp_path / "out" / "weights").write_text("w")
        run.finish()
    assert read_json(tmp_path / "out" / MARKER)["command"] == maker
    overwrite = [] if command in ("rollout", "teacher") else [["overwrite=true"]]
    for more in ([], *overwrite):
        assert main([command, f"output={tmp_path / 'out'}", *more]) == 1
        said = capsys.readouterr().err
        assert f"output={tmp_path / 'out'} has a run of cotrain {maker}: name another folder" in said
        assert said.count("\n") == 1 and (tmp_path / "out" / "weights").read_text() == "w"


def test_a_run_of_an_earlier_version_is_known_by_its_settings(
    settings: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    for kept, own in (({"seed": 0}, ("train",)), ({}, ("bench", "serve_check"))):
        write_json(tmp_path / MARKER, {"cotrain": "0", "state": "finished", "settings": kept})
        allowed = [name for name in MAKERS if refused(settings[name], name, output=tmp_path) is None]
        assert tuple(sorted(allowed)) == tuple(sorted(own))


def test_overwrite_replaces_no_folder_that_the_command_did_not_write(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = tmp_path_factory.mktemp("draft")
    (tmp_path / "README.md").write_text("# mine")
    for command in (
        ["datastore", f"output={tmp_path}"],
        ["datastore", "overwrite=true", f"output={tmp_path}"],
        ["export", f"draft.path={draft}", f"output={tmp_path}"],
        ["export", f"draft.path={draft}", f"output={tmp_path}", "overwrite=true"],
    ):
        assert main(command) == 1
        assert "name another folder (a command replaces only its own folders)" in capsys.readouterr().err
    with pytest.raises(UserError, match="no README.md that this command wrote"):
        refuse_replaced(tmp_path, "README.md", FILES, MARK)
    report = tmp_path / "README.md"
    assert main(["compare", f"report={report}"]) == 1 and "did not write" in capsys.readouterr().err
    assert report.read_text() == "# mine" and export.MARK == MARK
    report.write_text(MARK)
    (tmp_path / ABOUT).write_text("{}")
    (note := tmp_path / "NOTES.md").write_text("mine")
    for name, *more in (["datastore"], ["export", f"draft.path={draft}"]):
        assert main([name, *more, f"output={tmp_path}", "overwrite=true"]) == 1
        assert "was not written by this command, which would delete it" in capsys.readouterr().err and note.exists()
