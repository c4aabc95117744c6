"""Every file of conf/ composes, has the types of its command's schema and leaves no value open."""

import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cotrain.cli import COMMANDS
from cotrain.config.overrides import quote
from cotrain.config.settings import presets
from cotrain.paths import folder
from tests.settings import composed

CONF = folder("conf")
PRIMARIES = sorted(path.stem for path in CONF.glob("*.yaml"))
EXPERIMENTS = sorted(CONF.glob("experiment/**/*.yaml"))


def groups(command: str) -> list[str]:
    """The groups in the defaults list of a primary configuration."""
    entries = OmegaConf.load(CONF / f"{command}.yaml").defaults
    names = [name for entry in entries if not isinstance(entry, str) for name in entry]
    return [name.split()[-1].partition("@")[0] for name in names]


def options(group: str) -> list[str]:
    return sorted({path.stem for path in (CONF / group).glob("*.yaml")} | {*presets().get(group, {})})


OPEN = {"bench", "generate", "serve_check"}  # commands that open a draft folder, whose regime it may leave to it


def swaps(command: str) -> list[list[str]]:
    """Overrides that between them choose every option of every group; an experiment says itself whose it is."""
    choices = {group: options(group) for group in groups(command) if group != "experiment"}
    if command not in OPEN:
        choices = {group: [name for name in names if name != "as_trained"] for group, names in choices.items()}
    rounds = max((len(names) for names in choices.values()), default=0)
    return [[f"{group}={names[i % len(names)]}" for group, names in choices.items()] for i in range(rounds)]


@pytest.mark.parametrize("command", PRIMARIES)
def test_a_command_composes_by_itself(command: str) -> None:
    assert command in COMMANDS
    composed(command=command)


def covering() -> list[tuple[str, list[str]]]:
    """Of all commands, that with the most groups first: those swaps that choose an option which none before does."""
    seen, kept = set[str](), list[tuple[str, list[str]]]()
    for command in sorted(PRIMARIES, key=lambda name: -len(groups(name))):
        for swap in swaps(command):
            if not {*swap} <= seen:
                kept.append((command, swap))
                seen |= {*swap}
    return kept


@pytest.mark.parametrize(("command", "swap"), covering())
def test_options_compose_where_their_group_is(command: str, swap: list[str]) -> None:
    composed(*swap, command=command)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_composes_by_the_command_in_its_header(path: Path) -> None:
    header = path.read_text(encoding="utf-8").partition("\n\n")[0]
    line = re.search(rf"^#.*?\bcotrain (\w+ .*\bexperiment={path.stem}\b.*)$", header, re.MULTILINE)
    assert line, f"{path}: its first lines hold no `cotrain NAME experiment={path.stem}`"
    command, *arguments = shlex.split(line[1].strip("` "))
    if "-m" in arguments:  # each setting at the first value of its sweep
        arguments = [argument.partition(",")[0] for argument in arguments if argument != "-m"]
    composed(*quote(arguments), command=command)


def test_every_file_is_reached() -> None:
    reached = {f"{command}.yaml" for command in PRIMARIES}
    reached |= {f"{group}/{option}.yaml" for name in PRIMARIES for group in groups(name) for option in options(group)}
    assert {path.relative_to(CONF).as_posix() for path in CONF.rglob("*") if path.is_file()} <= reached
