"""Command-line overrides. This module quotes free text for Hydra, and rewords Hydra's errors for the user."""

import difflib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast, get_origin

from cotrain.config.base import Mark, fields
from cotrain.config.drafts import OF_KINDS
from cotrain.config.names import alias, below, nearest, unknown
from cotrain.config.settings import SCHEMAS, TrainConfig, flat, keys_of, presets
from cotrain.errors import UserError, first_line
from cotrain.losses.names import REMOVED_LOSSES
from cotrain.paths import folder

TEXT = frozenset({"prompt"})  # a key whose value null is text too; other keys of free text are unset by it
_NUMBER = re.compile(r"-?[\d.]+(e-?\d+)?|true|false", re.IGNORECASE)
MAIN = {"data": "path", "target": "path", "draft": "path", "regime": "temperature", "policy": "k"}  # of a group
LISTS = frozenset({"run"})  # keys that may be typed several times: the values become one list
EXPERIMENT = "experiment"  # the group of conf/ whose files set what a user could type
_SETTING = re.compile(r"(?P<sign>\+{0,2})(?P<key>\w[\w.@:/-]*)=(?P<value>.*)", re.DOTALL)


def quote(arguments: Sequence[str]) -> list[str]:
    """Return command-line arguments for Hydra: the values of free-text and path keys are quoted, so that Hydra leaves
    them unchanged.

    Such a value is all text after `=`, including quotes, commas and `${...}`. These keys therefore cannot be swept.
    Raises UserError for a list or mapping as the option of a group, on which Hydra fails.
    """
    return [_quoted(argument) for argument in _gathered(arguments)]


def _gathered(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `run=a run=b` merged into one argument, `run=['a','b']`, at the position of the
    first."""
    values: dict[str, list[str]] = {}
    gathered: list[str] = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in LISTS:
            gathered.append(argument)
        elif key in values:
            values[key].append(value)
        else:
            values[key] = [value]
            gathered.append(key)
    return [f"{one}=[{','.join(map(literal, values[one]))}]" if one in values else one for one in gathered]


def is_setting(argument: str) -> bool:
    """Return whether `argument` sets a value (`key=value`, `+key=value`) or removes one (`~key`). Flags are no
    settings."""
    return argument.startswith("~") or _SETTING.match(argument) is not None


def _quoted(argument: str) -> str:
    setting = _SETTING.fullmatch(argument)
    if setting is not None and setting["value"].lstrip()[:1] in ("[", "{") and _is_group(setting["key"]):
        raise UserError(f"{argument}: {setting['key']}= names one option, no list: write {setting['key']}=<option>")
    if setting is not None and _NUMBER.fullmatch(setting["value"]) and _is_group(setting["key"]):
        return f"{setting['key']}={literal(setting['value'])}"  # an option's name, which Hydra wants to be no number
    if setting is None:
        return argument
    sign = setting["sign"] or "++" * _opens(setting["key"], setting["value"])
    value = literal(setting["value"]) if _literal(setting["key"], setting["value"]) else setting["value"]
    return f"{sign}{setting['key']}={value}"


def chosen(task: Iterable[str]) -> set[str]:
    """Return the keys of the settings and the names of the groups that the user chose: those that were typed, and those
    that the file of experiment= sets. task: the typed settings, as key=value. Hydra must be running a job."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    typed = dict(setting.lstrip("+~").partition("=")[::2] for setting in task)
    keys = {key.partition("@")[0] for key in typed}
    for source in HydraConfig.get().runtime.config_sources:
        file = Path(source.path, EXPERIMENT, f"{typed.get(EXPERIMENT)}.yaml")
        if source.schema == "file" and file.is_file():
            values = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file)))
            groups = [entry for entry in values.pop("defaults", []) if isinstance(entry, dict)]
            keys |= {name.rpartition("/")[2] for entry in groups for name in entry}
            keys |= {key for key, value in flat(values) if not isinstance(value, dict)}
    return keys


def _is_group(key: str) -> bool:
    return key in presets() or (folder("conf") / key).is_dir()


@cache
def _free_text() -> set[str]:
    """Return the last parts of the keys (`path` of `data.path`) whose value is passed on literally: paths and other
    free text, but no lists."""
    return {
        key.rpartition(".")[2]
        for schema in SCHEMAS.values()
        for key, field in fields(schema)
        if {Mark.PATH, Mark.STORE, Mark.OUTPUT, Mark.TEXT} & {*field.metadata}
        and get_origin(field.annotation) is not list
    }


@cache
def _open_keys() -> tuple[set[str], tuple[str, ...]]:
    """Return the keys of settings that are mappings (`data.shares`), and the prefixes of the keys inside them
    (`data.shares.`)."""
    mappings = {key for key, field in fields(TrainConfig) if get_origin(field.annotation) is dict}
    return mappings, tuple(f"{key}." for key in mappings)


def _opens(key: str, value: str) -> bool:
    """Return whether Hydra must be allowed to add this key (`++`): an entry of a mapping, or a setting that only other
    kinds of draft have. `checked` then rejects the latter, with a better message than Hydra's."""
    mappings, inner = _open_keys()
    return (
        (key in mappings and value.startswith("{"))
        or key.startswith(inner)
        or (key.startswith("draft.") and key[6:] in OF_KINDS)
    )


def _literal(key: str, value: str) -> bool:
    if key == "check" and value.lower() in ("true", "false"):
        return False
    if value == "null" and key not in TEXT:
        return False
    return key.rpartition(".")[2] in _free_text()


def literal(text: str) -> str:
    """Return text in Hydra's syntax that Hydra resolves to exactly `text`."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if text == "???":  # OmegaConf's mark of a missing value
        return "${oc.decode:'\"???\"'}"
    return QuotedString(re.sub(r"(\\*)\$\{", r"\1\1\\${", text), Quote.single).with_quotes()


def explain(error: Exception, command: str, arguments: Sequence[str]) -> str:
    """Return one line that says why Hydra rejected the command line. The line names the key and its allowed values.
    error: Hydra's exception. command: the command's name. arguments: what the user typed, as key=value."""
    settings = [match for match in map(_SETTING.fullmatch, arguments) if match]
    typed = {setting["key"]: setting["value"] for setting in settings}
    keys = keys_of(command, typed.get("draft"))
    return (
        _path_for_group(typed, keys)
        or _several(typed, command, keys, error)
        or _unparsed(error, keys)
        or _no_option(error, keys)
        or _no_key(error, command, keys)
        or first_line(error)
    )


def _path_for_group(typed: Mapping[str, str], keys: Collection[str]) -> str | None:
    for key, value in typed.items():
        if f"{key}.path" in keys and not _NUMBER.fullmatch(value) and ("/" in value or os.path.splitext(value)[1]):
            return f"{key}={value}: {key}= cannot be a path: write {key}.path={value} instead"
    return None


def _several(typed: Mapping[str, str], command: str, keys: Mapping[str, object], error: Exception) -> str | None:
    """Return the error message if a setting has several values without -m, as Hydra's `error` says; otherwise None.
    typed: the typed values by key. command: its name. keys: the command's keys, with their defaults."""
    for key, value in typed.items():
        said = f"{key}={value}: "
        if str(error).startswith("Ambiguous value") and f"'{key}={value}'" in str(error):
            if key not in keys:
                return unknown(key, command, keys)
            many = f"write {key}=[{value}]" if isinstance(keys.get(key), list) else f"give {key}= one value"
            return f"{said}several values: {many}, or add -m to run once for each"
    return None


def _unparsed(error: Exception, keys: Mapping[str, object]) -> str | None:
    from hydra.errors import OverrideParseException

    if not isinstance(error, OverrideParseException):
        return None
    if "=" not in error.override:
        return f"{error.override!r} is not a setting: write key=value, for example output=outputs/new"
    key, _, value = error.override.partition("=")
    if isinstance(keys.get(key), list) and "=" in value:  # settings in a list
        quoted = ",".join(f'"{one}"' for one in re.split(r",(?=[\w.]+=)", value.removeprefix("[").removesuffix("]")))
        return f"{error.override}: quote each value of the list: write '{key}=[{quoted}]'"
    return f"{error.override!r} cannot be read: {first_line(error)}; quote the value, as in key='\"a, b\"'"


def _no_option(error: Exception, keys: Collection[str]) -> str | None:
    from hydra.errors import MissingConfigException

    if not isinstance(error, MissingConfigException) or not error.missing_cfg_file:
        return None
    group, _, option = error.missing_cfg_file.partition("/")
    if group == "loss" and option in REMOVED_LOSSES:
        return f"loss={option} was removed: set loss={REMOVED_LOSSES[option]}"
    if not error.options:
        return None
    main = f"{group}.{MAIN.get(group)}"
    number = _NUMBER.fullmatch(option) is not None
    hint = f"; a value of your own is {main}={option}" if main in keys and number != main.endswith(".path") else ""
    if not number and (near := difflib.get_close_matches(option, error.options, n=1, cutoff=0.75)):
        hint = f"; the nearest is {near[0]}"
    return f"{group}={option}: {group} is one of {', '.join(error.options)}{hint}"


def _no_key(error: Exception, command: str, keys: Collection[str]) -> str | None:
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    match = re.match(r"Could not (?:override|delete from config\.) '([^']+)'", str(error))
    if not match and not isinstance(error.__cause__, ConfigAttributeError | ConfigKeyError):
        return None
    key = match[1] if match else str(cast(ConfigKeyError, error.__cause__).full_key)
    return below(key, keys) if key in keys else unknown(key, command, keys)


def flag(name: str, command: str) -> str:
    """Return the error message for a flag that no command has. It names the setting that the user probably meant. name:
    the flag, such as --learning_rate. command: the command's name."""
    key = name.lstrip("-").replace("-", "_")
    keys = keys_of(command)
    if key not in keys:
        key = alias(key, keys) or nearest(key, keys) or key
    return f"no flag {name}: settings are key=value, as in {key}=..."
