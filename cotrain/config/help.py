"""`cotrain NAME --help`: every setting that the command takes, with its default, its sentence and its range, read from
the classes of the settings."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

from omegaconf import OmegaConf
from pydantic.fields import FieldInfo

from cotrain.config.base import Allowed, Settings
from cotrain.config.drafts import DRAFTS, Draft
from cotrain.config.overrides import EXPERIMENT
from cotrain.config.settings import SCHEMAS, presets
from cotrain.paths import folder

TYPES: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
QUESTION = re.compile(r"^# Question: (.*)$", re.MULTILINE)
FOOT = """  --cfg job      print all settings and stop
  -m key=a,b     run once for each value
A setting is typed as key=value, a list as key=[a,b], nothing as key=null."""


def help_page(command: str, about: str, typed: Mapping[str, str]) -> str:
    """Return the page of a command. command: its name. about: what it does. typed: the settings that the user typed,
    key -> value; the page of `cotrain train draft=KIND --help` has the settings of this kind of draft."""
    schema, alone, inside = SCHEMAS[command], list[str](), list[str]()
    options = _options_of(command)
    for name, field in schema.model_fields.items():
        key, default = field.alias or name, field.default
        if isinstance(default, Draft):
            kind = typed.get(key, "")
            default = DRAFTS[kind](kind=kind) if kind in DRAFTS else default
            options[key] = default.kind
        if isinstance(default, Settings):
            inside += ["", *_group(schema, key, default, options.get(key))]
        else:
            alone.append(_line(key, field, default))
    head = [f"cotrain {command}: {about}", f"usage: cotrain {command} key=value ...", ""]
    return "\n".join([*head, *alone, *inside, *_experiments(options), "", FOOT])


def _options_of(command: str) -> dict[str, str | None]:
    """Return the options that a command chooses if nothing is typed, by group, from the list in conf/COMMAND.yaml."""
    entries = _read(folder("conf") / f"{command}.yaml")["defaults"]
    return {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}


def _read(file: Path) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file)))


def _group(schema: type[Settings], key: str, default: Settings, option: str | None) -> Iterator[str]:
    """Yield the lines of a group of settings. default: the group's values in the command of class `schema`; those that
    it does not set are of `option`, the group's chosen one, if it has options."""
    group, given = type(default), default.model_dump(exclude_unset=default.presets is not None)
    known, files = presets().get(key, {}), {one.stem: one for one in (folder("conf") / key).glob("*.yaml")}
    values = default.model_dump()
    if option in known:
        values |= known[option].model_dump()
    elif option:
        values |= _read(files[option])
    values |= given
    yield f"{key}={option}  (one of {', '.join(sorted({*known, *files}))})" if option else f"{key}:"
    yield f"    {_joined(inspect.getdoc(group) or '')}"
    absent = group.foreign(schema)
    for name, field in group.model_fields.items():
        if name not in absent and not (isinstance(default, Draft) and name == "kind"):
            yield _line(f"{key}.{name}", field, values[name])
    if isinstance(default, Draft):
        yield "  the kinds of draft; draft=KIND --help has the settings of one:"
        yield from (f"  {key}={kind}  {_joined(inspect.getdoc(one) or '')}" for kind, one in DRAFTS.items())


def _line(key: str, field: FieldInfo, value: Any) -> str:
    assert field.description is not None, f"{key}: the field has no docstring"
    shown = value if isinstance(value, str) else json.dumps(value)
    return f"  {key}={shown}  {_joined(field.description)} ({_words(field.annotation, field.metadata)})"


def _joined(text: str) -> str:
    return " ".join(text.split())


def _words(annotation: Any, metadata: Sequence[Any]) -> str:
    """Return the allowed values of an annotation as text: those that its last validator names, which is the narrowest,
    else its type."""
    named = [one.words for one in metadata if isinstance(one, Allowed)]
    if named:
        return str(named[-1])
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(inner[0], annotation.__metadata__)
    if origin in (Union, UnionType):
        return " or ".join("null" if one is type(None) else _words(one, ()) for one in inner)
    if origin is list:
        return f"a list, each {_words(inner[0], ())}"
    return "key: value pairs" if origin is dict else TYPES[annotation]


def _experiments(options: Mapping[str, str | None]) -> list[str]:
    """Return lines about the recipes in conf/experiment, each with its question, for a command that can use one.
    options: the groups of the command."""
    if EXPERIMENT not in options:
        return []
    lines = ["", f"{EXPERIMENT}=null  recipes, which set many of these:"]
    for file in sorted((folder("conf") / EXPERIMENT).glob("*.yaml")):
        question = QUESTION.search(file.read_text(encoding="utf-8"))
        lines.append(f"  {EXPERIMENT}={file.stem}  {question[1] if question else ''}")
    return lines
