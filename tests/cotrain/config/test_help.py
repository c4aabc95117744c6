"""`cotrain NAME --help` says what is so: keys and defaults are those that Hydra composes, ranges those of refusals."""

import re
from typing import Any

import pytest
import yaml

from cotrain.cli import COMMANDS, main
from cotrain.config.base import fields
from cotrain.config.drafts import DRAFTS
from cotrain.config.settings import SCHEMAS, flat
from tests.cotrain.config.test_conf import EXPERIMENTS, groups, options
from tests.settings import composed

LINE = re.compile(r"^  ([\w.]+)=(.*?)  (\S.*?\.) \((.+)\)$")


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, tuple[Any, str, str]]:
    """The settings on a page: key -> default, sentence, range."""
    assert main([*arguments, "--help"]) == 0
    listed = filter(None, map(LINE.match, capsys.readouterr().out.splitlines()))
    return {match[1]: (yaml.safe_load(match[2]), match[3], match[4]) for match in listed}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_has_the_defaults_that_are_composed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = lines(capsys, command)
    values = dict(flat(composed(command=command).model_dump(by_alias=True)))
    assert {key: default for key, (default, _, _) in page.items()} == {key: values[key] for key in page}
    assert all(re.search("[a-z]{2}", sentence) for _, sentence, _ in page.values())
    inner = {key for key, _ in fields(SCHEMAS[command]) if "." in key}
    left_out = inner - page.keys() - {"draft.kind"}
    kinds = {f"draft.{name}" for kind in DRAFTS.values() for name in kind.model_fields}
    for key in left_out - kinds:  # what the command does not take, it refuses
        value = "true" if values[key] is False else "{a: 1}" if isinstance(values[key], dict) else "[0.5]"
        value = value if isinstance(values[key], bool | dict | list) else "auto" if values[key] is None else "77"
        assert main([command, f"{key}={value}"]) == 1, key
        assert re.search(rf"{key}=.*the setting has no effect here|data=self: only", capsys.readouterr().err), key


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_page_of_a_kind_has_its_settings(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = lines(capsys, "train", f"draft={kind}")
    assert {key[6:] for key in page if key.startswith("draft.")} == DRAFTS[kind].model_fields.keys() - {"kind"}
    assert all(f"  draft={other}  " for other in DRAFTS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.batch", "0"),
        ("optimizer.lr", "2"),
        ("optimizer.betas", "[0.9]"),
        ("trainer.minutes", "0"),
        ("mode", "both"),
        ("bench.trees", "99"),
        ("bench.depths", "[]"),
        ("regime.temperature", "-1"),
        ("check", "7"),
        ("trainer.seed", "x"),
    ],
)
def test_a_range_is_what_a_refusal_says(key: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = lines(capsys, "train")[key][2].removesuffix(" or null")
    assert main(["train", f"{key}={value}"]) == 1
    assert capsys.readouterr().err.endswith(f": it must be {words}\n")


@pytest.mark.parametrize("command", ["train", "bench", "compare"])
def test_groups_and_recipes_are_those_of_the_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "-h"]) == 0
    said = capsys.readouterr().out
    listed = dict(re.findall(r"^(\w+)=\w+  \(one of (.*)\)$", said, re.M))
    assert listed == {group: ", ".join(options(group)) for group in groups(command) if group != "experiment"}
    recipes = re.findall(r"^  experiment=(\w+)  \S", said, re.M)
    assert recipes == (sorted(path.stem for path in EXPERIMENTS) if command == "train" else [])
